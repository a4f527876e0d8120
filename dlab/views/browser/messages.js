// Messages on their way: ranks on a circle, the parcels of one step after another between them; below, when it was.
// `until` counts steps: 2.5 is the middle of the third one. What is drawn was recorded; only the pace is the reader's.

const LANES = 24; // steps in the timeline at most, and only of one round
const LONG = 120; // pixels; longer ways cross each other

views.messages = {
  clock: "own",
  extent: (data) => [0, data.steps.length],
  seconds: (data) => Math.min(60, 1.5 * data.steps.length), // how long a replay takes
  height: (data, width) => (data.steps.length ? layOut(data, width).height : 60), // none: a sentence

  controls(picture, bar) {
    picture.options.bar = bar;
    for (const [words, by] of [["◀ step", -1], ["step ▶", 1]]) {
      make("button", bar, { type: "button", textContent: words }).onclick = () => turnStep(picture, by);
    }
    picture.options.note = make("div", picture.box, { className: "dlab-note", hidden: true });
    picture.canvas.addEventListener("mousemove", (event) => pointAt(picture, event.offsetX, event.offsetY));
    picture.canvas.addEventListener("mouseleave", () => pointAt(picture, NaN, NaN));
  },

  draw(paint, data, until) {
    const { picture } = paint;
    picture.options.bar.hidden = !slider(picture) || data.steps.length < 2; // a live picture has nothing to go through
    picture.options.messages = []; // where each message is drawn: a box, and its place in the data
    if (!data.steps.length) return writeNothing(paint, "No messages were recorded."); // the title says what went without
    const now = atCursor(data, until);
    const place = layOut(data, paint.width);
    picture.box.dataset.step = now.index < 0 ? "" : `${data.steps[now.index].phase} ${data.steps[now.index].step}`.trim();
    picture.box.dataset.messages = now.messages;
    drawWords(paint, data, now, place);
    drawCircle(paint, data, now, place.circle);
    drawLanes(paint, data, now, place.lanes);
  },
};

// Below the cursor: what the message there carries.
function pointAt(picture, x, y) {
  const { note, messages = [] } = picture.options;
  const there = messages.findLast(({ left, right, top, bottom }) => left <= x && x <= right && top <= y && y <= bottom);
  note.hidden = !there;
  if (!there) return;
  note.textContent = describe(picture.data, there.message);
  const { offsetLeft, offsetTop, clientWidth } = picture.canvas;
  note.style.left = `${offsetLeft + Math.max(0, Math.min(x + 12, clientWidth - note.offsetWidth))}px`;
  note.style.top = `${offsetTop + y + 16}px`;
}

function describe(data, k) {
  const name = (rank) => data.names[rank] ?? `rank ${rank}`;
  const step = data.steps[data.begin.findLastIndex((begin) => begin <= k)];
  const numbers = (count) => `${count.toLocaleString("en")} number${count === 1 ? "" : "s"}`;
  const last = data.first[k] + data.numbers[k] - 1;
  const part = data.of[k] < 0 ? "" : `, from ${data.first[k]} to ${last} of ${data.of[k].toLocaleString("en")}`;
  return [
    `${name(data.source[k])} → ${name(data.destination[k])}, ${step.title}`,
    [chunkOf(data, k), data.numbers[k] < 0 ? "" : `${numbers(data.numbers[k])}${part}`, size(data.bytes[k])].filter(Boolean).join(" · "),
    Number.isNaN(data.low[k]) ? "" : `values from ${short(data.low[k])} to ${short(data.high[k])}`,
  ].filter(Boolean).join("\n");
}

// `chunk 2`, or `chunk 0/2` where the tensor was not cut into as many as there are ranks.
function chunkOf(data, k) {
  if (data.chunk[k] < 0) return "";
  return `chunk ${data.chunk[k]}` + (data.chunks[k] === data.bytes_per_rank.length ? "" : `/${data.chunks[k]}`);
}

const slider = (picture) => picture.box.querySelector(".dlab-replay input");

// To the end of the step before or after, where its parcels have arrived.
function turnStep(picture, by) {
  const bar = slider(picture);
  const steps = picture.data.steps.length;
  const done = (Number(bar.value) / bar.max) * steps;
  const next = by > 0 ? Math.floor(done + 1.001) : Math.ceil(done - 1.001);
  bar.value = (Math.max(0, Math.min(steps, next)) / steps) * bar.max;
  bar.dispatchEvent(new Event("input"));
}

// What had happened: the step that is drawn, how far its parcels are, and everything that was sent before.
function atCursor(data, until) {
  const last = data.steps.length - 1;
  const live = until === Infinity;
  const index = live ? data.complete : Math.min(Math.ceil(until - 1e-6) - 1, last); // a whole number is the end of a step
  const share = live ? 1 : until - index;
  const travel = Math.max(0, Math.min(1, (share - 0.1) / 0.75)); // a rest at both ends
  const way = travel * travel * (3 - 2 * travel);
  const end = live ? data.source.length : data.begin[Math.max(0, index + (travel === 1))];
  const sent = Array.from(data.bytes_per_rank);
  const links = new Map();
  data.links.source.forEach((source, k) => links.set(`${source} ${data.links.destination[k]}`, data.links.bytes[k]));
  for (let k = end; k < data.source.length; k++) { // all, without what comes later
    const link = `${data.source[k]} ${data.destination[k]}`;
    sent[data.source[k]] -= data.bytes[k];
    links.set(link, links.get(link) - data.bytes[k]);
  }
  const current = index < 0 ? [] : range(data.begin[index], data.begin[index + 1]);
  return { index, share, way, sent, links, current, messages: data.messages - (data.source.length - end) };
}

// Ranks have numbers; `names` has those of servers.
const isServed = (data) => data.bytes_per_rank.some((_, rank) => rank in data.names);

const range = (from, to) => Array.from({ length: to - from }, (_, k) => from + k);

function size(count) {
  const power = count < 1 ? 0 : Math.min(3, Math.floor(Math.log2(count) / 10));
  return `${Number((count / 1024 ** power).toFixed(1))} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function fromTo(counts) {
  const [low, high] = [size(Math.min(...counts)), size(Math.max(...counts))];
  const [[number, unit], [, same]] = [low.split(" "), high.split(" ")];
  return low === high ? high : unit === same ? `${number}–${high}` : `${low} – ${high}`;
}

// Where things are: words on top; the circle, and the lanes beside it, or below it where there is no room.
function layOut(data, width) {
  const ranks = data.bytes_per_rank.length;
  const beside = width >= 680;
  const words = beside ? 44 : 28 + 16 * (2 + isServed(data) + (data.count > data.steps.length));
  const side = Math.min(beside ? 340 : width, ranks > 9 ? 400 : 330);
  const lane = Math.max(9, Math.min(beside ? 34 : 24, 230 / ranks));
  const lanes = { left: beside ? side + 14 : 0, right: width, lane, height: ranks * lane + 62 };
  lanes.top = beside ? words + Math.max(0, (side - lanes.height) / 2) : words + side + 6;
  const circle = { x: beside ? side / 2 : width / 2, y: words + side / 2, radius: side / 2 - (ranks > 9 ? 40 : 46) };
  return { words, beside, circle, lanes, height: Math.max(words + side, lanes.top + lanes.height) };
}

function drawWords(paint, data, now, place) {
  const { context } = paint;
  const step = data.steps[now.index];
  const ranks = (counts) => fromTo(counts.filter((_, rank) => !(rank in data.names)));
  const servers = (counts) => fromTo(counts.filter((_, rank) => rank in data.names));
  const counters = [
    `messages ${now.messages} of ${data.messages}`,
    `bytes per rank ${ranks(now.sent)} of ${ranks(data.bytes_per_rank)}`,
  ];
  if (data.formula) {
    counters[0] += ` (formula ${data.formula.messages})`;
    counters[1] += ` (formula ${ranks(data.formula.bytes_per_rank)})`;
  }
  if (isServed(data)) counters.push(`bytes per server ${servers(now.sent)} of ${servers(data.bytes_per_rank)}`);
  if (data.count > data.steps.length) counters.push(`here: the last ${data.steps.length} of ${data.count} steps`);
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = step ? colourOf(step) : paint.faint;
  context.fillRect(0, 5, 12, 12);
  context.fillStyle = paint.text;
  context.font = "600 14px system-ui, sans-serif";
  context.fillText(step ? step.title : "before the first step", 19, 12, paint.width - 19);
  context.font = "12px system-ui, sans-serif";
  const lines = place.beside ? [counters.join("  ·  ")] : counters;
  lines.forEach((line, number) => context.fillText(line, 0, 32 + 16 * number, paint.width));
}

const colourOf = (step) => COLOURS[step.colour % COLOURS.length];

// As in the still picture: an arrow swings so that it meets neither the one that comes back nor the ranks between.
function bend(hop, ranks, clockwise) {
  hop = (hop + ranks) % ranks;
  if (hop === ranks - 1 && ranks > 2 && !clockwise) return 0.16;
  if (2 * hop === ranks) return -0.24;
  if (hop === 1 || hop === ranks - 1) return -0.16;
  return 2 * hop < ranks ? 0.06 : -0.26;
}

// The way of a message: a point and a direction for every share of it, from the rim of one rank to that of the other.
function wayBetween(nodes, source, destination, rim, clockwise = true) {
  const [from, to] = [nodes[source], nodes[destination]];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const swing = bend(destination - source, nodes.length, clockwise);
  const middle = { x: (from.x + to.x) / 2 - swing * dy, y: (from.y + to.y) / 2 + swing * dx };
  const length = Math.hypot(dx, dy);
  const cut = Math.min(0.4, rim / length);
  const at = (share) => {
    const [t, s] = [cut + share * (1 - 2 * cut), 1 - cut - share * (1 - 2 * cut)];
    return {
      x: s * s * from.x + 2 * s * t * middle.x + t * t * to.x,
      y: s * s * from.y + 2 * s * t * middle.y + t * t * to.y,
      angle: Math.atan2(s * (middle.y - from.y) + t * (to.y - middle.y), s * (middle.x - from.x) + t * (to.x - middle.x)),
    };
  };
  const side = Math.sign(swing) / length; // to which it swings
  return { at, length: length * (1 - 2 * cut), aside: { x: -dy * side, y: dx * side } };
}

function drawCircle(paint, data, now, { x, y, radius }) {
  const { context } = paint;
  const ranks = data.bytes_per_rank.length;
  const disc = Math.max(8, Math.min(19, (1.2 * radius) / ranks));
  const turn = ranks === 2 ? -Math.PI : -Math.PI / 2; // rank 0 on top, the others clockwise; two side by side
  const nodes = range(0, ranks).map((rank) => {
    const angle = (2 * Math.PI * rank) / ranks + turn;
    return { x: x + radius * Math.cos(angle), y: y + radius * Math.sin(angle) };
  });
  const clockwise = now.current.some((k) => (data.destination[k] - data.source[k] + ranks) % ranks === 1);
  const ways = now.current.map((k) => wayBetween(nodes, data.source[k], data.destination[k], disc + 3, clockwise));
  const crowd = ranks > 9 || ways.length > 9 || (ways.length > 6 && ways.some((way) => way.length > LONG));
  const colour = now.index < 0 ? paint.faint : colourOf(data.steps[now.index]);
  drawLinks(paint, data, now, nodes, disc, crowd);
  ways.forEach((way) => drawArrow(context, way, colour, crowd));
  const busy = new Set(now.current.flatMap((k) => [data.source[k], data.destination[k]]));
  context.textAlign = "center";
  context.textBaseline = "middle";
  nodes.forEach((node, rank) => {
    const [fill, ink] = busy.has(rank) ? [paint.text, paint.ground] : [paint.line, paint.text];
    drawNode(context, node, data.names[rank]?.split(" ") ?? [rank], disc, fill, ink);
  });
  context.font = "11px system-ui, sans-serif";
  const most = Math.max(...now.current.map((k) => data.bytes[k]), 1);
  ways.forEach((way, number) => {
    const message = now.current[number];
    const lines = crowd ? [] : [chunkOf(data, message), size(data.bytes[message])].filter(Boolean);
    const box = drawParcel(paint, way, now.way, colour, lines, 3 + 3 * Math.sqrt(data.bytes[message] / most));
    paint.picture.options.messages.push({ ...box, message });
  });
  const each = `${fromTo(now.current.map((k) => data.bytes[k]))} each`;
  if (ways.length) outlined(paint, crowd ? each : "Σ: on this link so far", x, y + radius + disc + 14);
}

// A rank is a disc with its number; a server is a square with its name, a word below the other.
function drawNode(context, { x, y }, words, disc, fill, ink) {
  const letters = words.length > 1 ? Math.max(8, disc * 0.5) : Math.min(13, disc * 1.1);
  context.font = `600 ${letters}px system-ui, sans-serif`;
  const half = Math.max(0.95 * disc, ...words.map((word) => context.measureText(word).width / 2 + 1.5));
  context.beginPath();
  if (words.length > 1) context.roundRect(x - half, y - 0.95 * disc, 2 * half, 1.9 * disc, disc / 2);
  else context.arc(x, y, disc, 0, 2 * Math.PI);
  context.fillStyle = fill;
  context.fill();
  context.fillStyle = ink;
  words.forEach((word, line) => context.fillText(word, x, y + 0.5 + (line - (words.length - 1) / 2) * letters));
}

// Every link that was used so far: the wider, the more went over it. At those of this step the sum is said.
function drawLinks(paint, data, now, nodes, disc, crowd) {
  const { context } = paint;
  const most = Math.max(...data.links.bytes);
  const current = new Set(now.current.map((k) => `${data.source[k]} ${data.destination[k]}`));
  for (const [link, bytes] of now.links) {
    if (!bytes) continue;
    const [source, destination] = link.split(" ").map(Number);
    const way = wayBetween(nodes, source, destination, disc);
    context.strokeStyle = paint.line;
    context.lineWidth = (nodes.length > 9 ? 3 : 9) * Math.sqrt(bytes / most);
    strokeWay(context, way, 1);
    if (crowd || !current.has(link)) continue;
    const words = `Σ ${size(bytes)}`;
    const beside = way.at(way.length > LONG ? 0.27 : 0.5); // not where they cross
    context.font = "11px system-ui, sans-serif";
    const away = 19 + (12 + 0.5 * context.measureText(words).width) * Math.abs(way.aside.x);
    context.textAlign = "center";
    context.textBaseline = "middle";
    outlined(paint, words, beside.x + away * way.aside.x, beside.y + away * way.aside.y);
  }
}

function strokeWay(context, way, share) {
  context.beginPath();
  for (let part = 0; part <= 16; part++) {
    const point = way.at((share * part) / 16);
    context.lineTo(point.x, point.y);
  }
  context.stroke();
}

function drawArrow(context, way, colour, crowd) {
  const { x, y, angle } = way.at(1);
  const head = crowd ? 6 : 9;
  context.globalAlpha = 0.75;
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = crowd ? 1 : 1.5;
  strokeWay(context, way, 0.98);
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - head * Math.cos(angle - 0.4), y - head * Math.sin(angle - 0.4));
  context.lineTo(x - head * Math.cos(angle + 0.4), y - head * Math.sin(angle + 0.4));
  context.fill();
  context.globalAlpha = 1;
}

// A box with its chunk and bytes on it, or, where many are on their way, a dot that is larger for more bytes. Gives the
// place that it takes.
function drawParcel(paint, way, share, colour, lines, radius) {
  const { context } = paint;
  const half = lines.length ? Math.max(...lines.map((line) => context.measureText(line).width)) / 2 + 5 : radius;
  const high = lines.length ? 3 + 6 * lines.length : radius;
  const { angle } = way.at(share);
  const reach = lines.length ? Math.min(half / Math.abs(Math.cos(angle)), high / Math.abs(Math.sin(angle))) : radius;
  const edge = Math.min(0.5, reach / way.length); // it begins and ends beside a rank, not upon it
  const { x, y } = way.at(edge + share * (1 - 2 * edge));
  context.fillStyle = lines.length ? paint.ground : colour;
  context.strokeStyle = lines.length ? colour : paint.ground;
  context.lineWidth = lines.length ? 2 : 1;
  context.beginPath();
  if (lines.length) context.roundRect(x - half, y - high, 2 * half, 2 * high, 4);
  else context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
  context.fillStyle = paint.text;
  context.textAlign = "center";
  context.textBaseline = "middle";
  lines.forEach((line, number) => context.fillText(line, x, y + 0.5 + 12 * (number - (lines.length - 1) / 2)));
  return { left: x - half, right: x + half, top: y - high, bottom: y + high };
}

// Text that can be read where lines cross it.
function outlined(paint, words, x, y) {
  paint.context.strokeStyle = paint.ground;
  paint.context.lineWidth = 4;
  paint.context.lineJoin = "round";
  paint.context.fillStyle = paint.text;
  paint.context.strokeText(words, x, y);
  paint.context.fillText(words, x, y);
}

// A lane per rank: a bar from the start to the end of each of its messages, in the time that it really took.
function drawLanes(paint, data, now, { left, right, top, lane, height }) {
  const { context } = paint;
  const at = Math.max(0, now.index);
  const [first, last] = partAround(data.steps, at);
  const shown = range(data.begin[first], data.begin[last + 1]);
  const low = shown.reduce((least, k) => Math.min(least, data.start[k]), Infinity);
  const span = shown.reduce((most, k) => Math.max(most, data.end[k]), low) - low || 1e-6;
  const ranks = data.bytes_per_rank.length;
  const box = { left: left + (isServed(data) ? 56 : 48), right: right - 62, top: top + 16, bottom: top + 16 + ranks * lane };
  const across = (time) => box.left + ((time - low) / span) * (box.right - box.left);
  const [unit, scale] = span < 1e-3 ? ["µs", 1e6] : span < 1 ? ["ms", 1e3] : ["s", 1];

  context.font = `${Math.min(11, lane + 1)}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.fillStyle = paint.text;
  context.strokeStyle = paint.line;
  context.lineWidth = 1;
  for (let rank = 0; rank < ranks; rank++) {
    const y = box.top + (rank + 0.5) * lane;
    context.beginPath();
    context.moveTo(box.left, y);
    context.lineTo(box.right, y);
    context.stroke();
    context.textAlign = "right";
    context.fillText(data.names[rank] ?? (lane < 12 ? rank : `rank ${rank}`), box.left - 6, y);
    context.textAlign = "left";
    context.fillText(size(now.sent[rank]), box.right + 6, y);
  }
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  context.fillText("sent", box.right + 6, top + 6);
  drawPhases(paint, data.steps.slice(first, last + 1), box.left, top + 6);
  for (let index = first; index <= last; index++) {
    const state = index === now.index ? 1 : index < now.index ? 0.6 : 0.25;
    for (const k of range(data.begin[index], data.begin[index + 1])) {
      const y = box.top + data.source[k] * lane + lane * 0.18;
      const [from, to] = [across(data.start[k]), across(data.end[k])];
      context.globalAlpha = state;
      context.fillStyle = colourOf(data.steps[index]);
      context.fillRect(from, y, Math.max(1.5, to - from - 0.75), lane * 0.64);
      paint.picture.options.messages.push({ left: from - 1, right: Math.max(from + 2, to), top: y, bottom: y + lane * 0.64, message: k });
      context.globalAlpha = 1;
      context.strokeStyle = paint.text;
      if (state === 1 && lane >= 12) context.strokeRect(from, y, Math.max(1.5, to - from - 0.75), lane * 0.64);
    }
  }
  context.strokeStyle = context.fillStyle = paint.text;
  const cursor = across(timeOf(data, first, now, low));
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(cursor, box.top - 3);
  context.lineTo(cursor, box.bottom + 3);
  context.stroke();

  context.textAlign = "center";
  context.textBaseline = "top";
  for (const tick of ticks(0, span * scale, 4)) context.fillText(short(tick), across(low + tick / scale), box.bottom + 5);
  context.fillText(`time, ${unit}; a bar is one send or exchange: long if it had to wait`, (left + right) / 2, box.bottom + 20);
}

// The names of the phases, with their colours.
function drawPhases(paint, steps, x, y) {
  const { context } = paint;
  const phases = new Map(steps.filter((step) => step.phase).map((step) => [step.phase, colourOf(step)]));
  for (const [phase, colour] of phases) {
    context.fillStyle = colour;
    context.fillRect(x, y - 4, 9, 9);
    context.fillStyle = paint.text;
    context.fillText(phase, x + 13, y);
    x += context.measureText(phase).width + 28;
  }
}

// The first and last step that share a timeline with this one: those of its round, but not too many.
function partAround(steps, index) {
  const round = (place) => (steps[place]?.phase ? steps[place].round : steps[place] && -1);
  let [first, last] = [index, index];
  while (first > 0 && round(first - 1) === round(index)) first--;
  first += LANES * Math.floor((index - first) / LANES);
  while (last - first < LANES - 1 && round(last + 1) === round(index)) last++;
  return [first, last];
}

// Where the cursor is in recorded time. Ranks overtake each other: a step begins here when the one before it has ended.
function timeOf(data, first, now, low) {
  let [from, to] = [low, low];
  for (let index = first; index <= now.index; index++) {
    from = to;
    for (let k = data.begin[index]; k < data.begin[index + 1]; k++) to = Math.max(to, data.end[k]);
  }
  return from + Math.max(0, Math.min(1, now.share)) * (to - from);
}
