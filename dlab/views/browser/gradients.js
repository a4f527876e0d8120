// Gradient flow: norms by layer and rank as colours, each layer's norm over the steps, and the path of one gradient.

// cividis, a scale that colour-blind readers see as others do
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
const BROKEN = "#D55E00"; // a norm that is infinite or not a number

function cividis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1);
  const below = Math.min(Math.floor(place), CIVIDIS.length - 2);
  const mixed = CIVIDIS[below].map((part, i) => Math.round(part + (place - below) * (CIVIDIS[below + 1][i] - part)));
  return `rgb(${mixed.join(" ")})`;
}

function shortNorm(norm) {
  if (norm === Infinity) return "broken";
  return norm > 0 && norm < 0.001 ? norm.toExponential(1) : String(Number(norm.toPrecision(3)));
}

// The last step in which each rank had told its norms by then, or -1.
function lastTold(data, until) {
  const ranks = data.ranks.length;
  return data.ranks.map((_, rank) => {
    let step = data.steps.length - 1;
    while (step >= 0 && !(data.times[step * ranks + rank] <= until)) step--;
    return step;
  });
}

views.gradients = {
  extent: (data) => [0, data.times.reduce((last, time) => (time > last ? time : last), 0.001)],

  height: (data) => 118 + rowHeight(data) * data.layers.length + Math.min(data.ranks.length, 32) * 17,

  controls(picture, bar) {
    const label = make("label", bar, { textContent: "path of the gradient of " });
    const select = make("select", label);
    select.onchange = () => { picture.options.layer = select.selectedIndex; picture.ask(); };
    picture.options.select = select;
    picture.canvas.onclick = (event) => { // a row of the heat map chooses its layer, too
      const row = Math.floor((event.offsetY - picture.options.top) / rowHeight(picture.data));
      if (row < 0 || row >= picture.data.layers.length) return;
      picture.options.layer = select.selectedIndex = row;
      picture.ask();
    };
  },

  draw(paint, data, until) {
    if (!data.layers.length) return writeNothing(paint);
    const { options } = paint.picture;
    if (options.select.length !== data.layers.length) {
      options.select.replaceChildren(...data.layers.map((name) => make("option", null, { textContent: name })));
      options.select.selectedIndex = options.layer = data.layer;
    }
    const told = lastTold(data, until);
    const good = Array.from(data.norms).filter((norm) => norm > 0 && norm < Infinity);
    const [lowest, highest] = good.reduce(([low, high], norm) => [Math.min(low, norm), Math.max(high, norm)], [Infinity, 0]);
    const middle = good.length ? Math.sqrt(lowest * highest) : 1;
    const scale = [Math.min(lowest, middle / Math.sqrt(10)), Math.max(highest, middle * Math.sqrt(10))];
    const row = rowHeight(data);
    const names = Math.min(Math.max(...data.layers.map((name) => paint.context.measureText(name).width)), paint.width / 4);
    const top = (options.top = 34);
    const bottom = top + row * data.layers.length;
    const left = names + 20;
    const wide = Math.min(Math.max((0.44 * paint.width - left) / data.ranks.length, 3), 60) * data.ranks.length;
    drawHeat(paint, data, told, scale, { left, right: left + wide, top, bottom });
    drawLines(paint, data, told, { left: left + wide + 14, right: paint.width - 82, top, bottom });
    drawPath(paint, data, until, { left: 46, right: paint.width - 12, top: bottom + 56, bottom: paint.height - 34 });
  },
};

const rowHeight = (data) => Math.min(24, Math.max(7, Math.round(330 / data.layers.length)));

function drawHeat(paint, data, told, scale, box) {
  const { context, picture } = paint;
  const [ranks, row, width] = [data.ranks.length, rowHeight(data), (box.right - box.left) / data.ranks.length];
  const share = (norm) => Math.log(norm / scale[0]) / Math.log(scale[1] / scale[0]);
  const every = Math.ceil(12 / row); // names that have room
  context.textBaseline = "middle";
  data.layers.forEach((name, layer) => {
    const y = box.top + layer * row;
    const chosen = layer === picture.options.layer;
    context.fillStyle = paint.text;
    context.textAlign = "right";
    context.font = `${chosen ? "bold " : ""}12px system-ui, sans-serif`;
    const apart = Math.abs(layer - picture.options.layer) >= every;
    if (chosen || (apart && layer % every === 0)) context.fillText(fitted(context, name, box.left - 8), box.left - 6, y + row / 2);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    told.forEach((step, rank) => {
      const norm = step < 0 ? NaN : data.norms[(step * data.layers.length + layer) * ranks + rank];
      const x = box.left + rank * width;
      if (Number.isNaN(norm)) return;
      context.fillStyle = norm === Infinity ? BROKEN : cividis(norm > 0 ? share(norm) : 0);
      context.fillRect(x + 0.5, y + 0.5, width - 1, row - 1);
      if (row < 14 || width < 38) return;
      context.fillStyle = norm < Infinity && share(norm) > 0.55 ? "#000000" : "#ffffff";
      context.fillText(shortNorm(norm), x + width / 2, y + row / 2 + 0.5);
    });
    if (chosen) {
      context.strokeStyle = paint.text;
      context.lineWidth = 1.5;
      context.strokeRect(box.left - 0.5, y, box.right - box.left + 1, row);
    }
  });
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.fillStyle = paint.text;
  const last = Math.max(...told);
  const middle = (box.left + box.right) / 2;
  const heading = last < 0 ? "rank" : `rank, step ${data.steps[last]}`;
  context.fillText(context.measureText(heading).width < box.right - box.left ? heading : "rank", middle, box.top - 25);
  const sparse = Math.ceil(20 / width);
  data.ranks.forEach((rank, column) => {
    if (column % sparse === 0) context.fillText(rank, box.left + (column + 0.5) * width, box.top - 9);
  });
  for (let x = 0; x < box.right - box.left; x++) { // the colour bar
    context.fillStyle = cividis(x / (box.right - box.left));
    context.fillRect(box.left + x, box.bottom + 5, 1.5, 8);
  }
  context.fillStyle = paint.text;
  context.fillText("gradient norm", middle, box.bottom + 22);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillText(shortNorm(Number(scale[0].toPrecision(2))), box.left - 4, box.bottom + 9);
  context.textAlign = "left";
  context.fillText(shortNorm(Number(scale[1].toPrecision(2))), box.right + 4, box.bottom + 9);
}

function fitted(context, name, width) {
  if (context.measureText(name).width <= width) return name;
  while (name.length > 1 && context.measureText(`…${name}`).width > width) name = name.slice(1);
  return `…${name}`;
}

// A small curve in each row: the mean of the ranks and their spread, on a scale of its own, whose ends stand beside it.
function drawLines(paint, data, told, box) {
  const { context } = paint;
  const [layers, ranks, row] = [data.layers.length, data.ranks.length, rowHeight(data)];
  const until = Math.max(...told);
  if (box.right - box.left < 40 || until < 0) return;
  const [first, last] = [data.steps[0], data.steps[data.steps.length - 1]];
  const x = (step) => box.left + ((data.steps[step] - first) / (last - first || 1)) * (box.right - box.left);
  context.lineWidth = 1;
  context.textBaseline = "middle";
  data.layers.forEach((_, layer) => {
    const seen = [];
    let [low, high] = [Infinity, 0];
    for (let step = 0; step < data.steps.length; step++) { // the scale is that of all steps, so that it stays in a replay
      const from = (step * layers + layer) * ranks;
      const norms = Array.from(data.norms.slice(from, from + ranks)).filter((norm) => norm > 0 && norm < Infinity);
      if (!norms.length) continue;
      const [least, most] = [Math.min(...norms), Math.max(...norms)];
      [low, high] = [Math.min(low, least), Math.max(high, most)];
      if (step <= until) seen.push([x(step), least, norms.reduce((a, b) => a + b) / norms.length, most]);
    }
    const y = (norm) => box.top + (layer + 0.9) * row - 0.8 * row * (Math.log(norm / low) / (Math.log(high / low) || 1));
    context.strokeStyle = paint.line;
    context.beginPath();
    context.moveTo(box.left, Math.round(box.top + (layer + 1) * row) - 0.5);
    context.lineTo(box.right, Math.round(box.top + (layer + 1) * row) - 0.5);
    context.stroke();
    if (!seen.length) return;
    context.fillStyle = context.strokeStyle = COLOURS[5];
    context.globalAlpha = 0.35;
    context.beginPath();
    for (const [at, least] of seen) context.lineTo(at, y(least));
    for (const [at, , , most] of seen.slice().reverse()) context.lineTo(at, y(most));
    context.fill();
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [at, , mean] of seen) context.lineTo(at, y(mean));
    context.stroke();
    context.lineWidth = 1;
    context.beginPath();
    context.arc(seen[seen.length - 1][0], y(seen[seen.length - 1][2]), 2.5, 0, 7);
    context.fill();
    if (row < 12) return;
    context.fillStyle = paint.text;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    const short2 = (norm) => shortNorm(Number(norm.toPrecision(2)));
    context.fillText(`${short2(low)} – ${short2(high)}`, box.right + 8, box.top + (layer + 0.5) * row);
  });
  context.fillStyle = paint.text;
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  const heading = box.right - box.left > 170 ? "mean and spread of the ranks" : "mean and spread";
  context.fillText(heading, (box.left + box.right) / 2, box.top - 25);
  context.textAlign = "left";
  if (row >= 12) context.fillText("norm", box.right + 8, box.top - 9);
  context.textAlign = "center";
  const beyond = box.left + 40; // where the end of the colour bar has its number
  for (const tick of ticks(first, last, 4)) {
    const at = box.left + ((tick - first) / (last - first || 1)) * (box.right - box.left);
    if (Number.isInteger(tick) && at > beyond) context.fillText(short(tick), at, box.bottom + 9);
  }
  context.fillText("step", (box.left + box.right) / 2, box.bottom + 22);
}

const MARKS = {
  computed: (context, x, y) => context.arc(x, y, 4.5, 0, 7),
  bucketed: (context, x, y) => context.rect(x - 4, y - 4, 8, 8),
  sent: (context, x, y) => polygon(context, [[x - 4, y - 5], [x + 6, y], [x - 4, y + 5]]),
  reduced: (context, x, y) => polygon(context, [[x, y - 6], [x + 5, y], [x, y + 6], [x - 5, y]]),
  applied: (context, x, y) => polygon(context, Array.from({ length: 10 }, (_, corner) => {
    const [angle, size] = [(corner * Math.PI) / 5, corner % 2 ? 3 : 7];
    return [x + size * Math.sin(angle), y - size * Math.cos(angle)];
  })),
};

function polygon(context, corners) {
  for (const [x, y] of corners) context.lineTo(x, y);
  context.closePath();
}

// A row per rank: when the gradient of the chosen layer got to each stage.
function drawPath(paint, data, until, box) {
  const { context } = paint;
  const [layers, ranks, stages] = [data.layers.length, data.ranks.length, data.stages.length];
  const layer = paint.picture.options.layer;
  let step = until === Infinity && data.step >= 0 ? data.step : data.steps.length - 1;
  while (step > 0 && !(data.starts[step] <= until)) step--;
  const moment = (rank, stage) => {
    const found = data.moments[((step * layers + layer) * ranks + rank) * stages + stage];
    return data.starts[step] + found / 1000 <= until ? found : NaN;
  };
  const from = step * layers * ranks * stages;
  const all = data.moments.slice(from, from + layers * ranks * stages);
  const end = all.reduce((latest, each) => (each > latest ? each : latest), 0.1) * 1.03; // the same for all layers
  const x = (value) => box.left + (value / end) * (box.right - box.left);
  const height = (box.bottom - box.top) / Math.max(1, Math.min(ranks, 32));
  context.strokeStyle = paint.line;
  context.fillStyle = paint.text;
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const tick of ticks(0, end, 6)) {
    context.beginPath();
    context.moveTo(x(tick), box.top);
    context.lineTo(x(tick), box.bottom);
    context.stroke();
    context.fillText(short(tick), x(tick), box.bottom + 9);
  }
  context.fillText(`ms since the first gradient of step ${data.steps[step]} was computed`, (box.left + box.right) / 2, box.bottom + 25);
  const there = new Set();
  for (let rank = 0; rank < Math.min(ranks, 32); rank++) {
    const y = box.top + (rank + 0.5) * height;
    const found = data.stages.map((stage, number) => [stage, moment(rank, number)]).filter(([, at]) => at === at);
    context.fillStyle = paint.text;
    context.textAlign = "right";
    context.fillText(`rank ${data.ranks[rank]}`, box.left - 7, y);
    if (!found.length) continue;
    const at = Object.fromEntries(found.map(([stage, when]) => [stage.name, x(when)]));
    context.strokeStyle = paint.faint;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(found[0][1]), y);
    context.lineTo(x(found[found.length - 1][1]), y);
    context.stroke();
    if (at.sent !== undefined && at.reduced !== undefined) { // on its way between the ranks
      context.fillStyle = data.stages.find((stage) => stage.name === "sent").colour;
      context.globalAlpha = 0.4;
      context.fillRect(at.sent, y - 4, at.reduced - at.sent, 8);
      context.globalAlpha = 1;
    }
    for (const [stage, when] of found) {
      there.add(stage);
      drawMark(context, stage, x(when), y);
    }
  }
  let place = 4;
  context.textAlign = "left";
  for (const stage of data.stages.filter((each) => there.has(each))) {
    drawMark(context, stage, place + 6, box.top - 12);
    context.fillStyle = paint.text;
    context.fillText(stage.name, place + 17, box.top - 12);
    place += 28 + context.measureText(stage.name).width;
  }
}

function drawMark(context, stage, x, y) {
  context.fillStyle = stage.colour;
  context.beginPath();
  MARKS[stage.name](context, x, y);
  context.fill();
}
