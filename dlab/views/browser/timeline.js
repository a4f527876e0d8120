// Timeline: a lane per rank. Computing is plain, waiting hatched, delay dotted, messages are thin bars below; pauses and
// deaths are marked. Shows the last seconds before `until`, and more if a rank was done before them.

views.timeline = {
  extent: (data) => [0, Math.max(0.001, data.end)],

  tall: (data) => (data.lanes.length > 12 ? 14 : 36), // a lane; many of them have no room for a second line of text

  height(data) { return 62 + this.tall(data) * Math.max(1, data.lanes.length); },

  controls(picture, bar) {
    picture.options.seconds = 0; // as the data says
    const choices = [["latest steps", 0], ["1 s", 1], ["5 s", 5], ["all", Infinity]];
    for (const [name, seconds] of choices) {
      const button = make("button", bar, { type: "button", textContent: name });
      button.setAttribute("aria-pressed", seconds === 0);
      button.onclick = () => {
        picture.options.seconds = seconds;
        for (const other of bar.children) other.setAttribute("aria-pressed", other === button);
        picture.ask();
      };
    }
  },

  look: { delay: "#CC79A7", compute: "#0072B2", wait: "#E69F00", send: "#009E73", trouble: "#D55E00", quiet: "#8a8a8a" },

  draw(paint, data, until) {
    const { context, width, height } = paint;
    if (!data.lanes.some((lane) => lane.steps.length || lane.messages.length)) return writeNothing(paint);
    const last = Math.max(0.05, Math.min(until, data.end));
    const first = this.first(data, last, paint.picture.options.seconds);
    const tall = this.tall(data);
    const small = tall < 30;
    const box = { left: small ? 104 : 88, right: width - 14, top: 24, bottom: height - 36, first, last, small };
    box.bar = small ? { top: -6, high: 9, sent: 4, sentHigh: 2 } : { top: -15, high: 17, sent: 3, sentHigh: 4 };
    paint.picture.box.dataset.first = first;
    const x = (moment) => box.left + ((moment - first) / (last - first)) * (box.right - box.left);
    const fills = { compute: this.look.compute, wait: this.hatch(context), delay: this.dots(context) };
    this.key(paint, box, data, fills);
    this.clock(paint, box, x);
    data.lanes.forEach((lane, place) => {
      const y = box.top + tall * (place + 0.5);
      context.save();
      context.beginPath();
      context.rect(box.left, box.top - 4, box.right - box.left + 14, box.bottom - box.top + 8);
      context.clip();
      const seconds = this.steps(context, lane, y, x, box, fills, paint);
      this.messages(context, lane, y, x, box);
      this.states(paint, lane, y, x, box);
      context.restore();
      this.name(paint, lane, y, seconds, until, box);
    });
  },

  // By default so early that there are steps of every rank; a rank that is dead has its cross instead.
  first(data, last, chosen) {
    if (chosen) return Math.max(0, last - chosen);
    const ends = data.lanes.filter((lane) => lane.alive && lane.steps.length).map((lane) => {
      let at = lane.steps.length - 4;
      while (at > 0 && lane.steps[at] > last + 1e-4) at -= 4; // float32
      return lane.steps[at];
    });
    const done = ends.filter((end) => end <= last - data.seconds);
    return Math.max(0, Math.min(last, ...done) - data.seconds);
  },

  dots(context) {
    const tile = make("canvas", null, { width: 12, height: 12 });
    const brush = tile.getContext("2d");
    brush.fillStyle = this.look.delay;
    brush.fillRect(0, 0, 12, 12);
    brush.fillStyle = "#ffffff";
    for (const [x, y] of [[3, 3], [9, 9]]) { brush.beginPath(); brush.arc(x, y, 1.6, 0, 7); brush.fill(); }
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(0.5));
    return pattern;
  },

  hatch(context) {
    const tile = make("canvas", null, { width: 12, height: 12 });
    const brush = tile.getContext("2d");
    brush.scale(2, 2); // twice as fine, for sharp screens
    brush.globalAlpha = 0.18;
    brush.fillStyle = this.look.wait;
    brush.fillRect(0, 0, 6, 6);
    brush.globalAlpha = 1;
    brush.strokeStyle = this.look.wait;
    brush.lineWidth = 1.2;
    brush.beginPath();
    for (const shift of [-6, 0, 6]) { brush.moveTo(shift - 1, 7); brush.lineTo(shift + 7, -1); }
    brush.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(0.5));
    return pattern;
  },

  // Draws the steps that were over by `last` and gives the seconds of computing and waiting among them.
  steps(context, lane, y, x, { first, last, bar }, fills, paint) {
    const seconds = { compute: 0, wait: 0, delay: 0 };
    const ends = [];
    for (let at = lane.steps.length - 4; at >= 0; at -= 4) {
      const [end, compute, wait, delay] = lane.steps.subarray(at, at + 4);
      if (end < first) break;
      if (end > last + 1e-4) continue; // float32
      let right = end;
      for (const [name, length] of [["wait", wait], ["compute", compute], ["delay", delay]]) {
        context.fillStyle = fills[name];
        const wide = x(right) - x(right - length);
        context.fillRect(x(right - length), y + bar.top, name === "compute" ? Math.max(wide, 0.3) : wide, bar.high);
        seconds[name] += length;
        right -= length;
      }
      ends.push(x(end));
    }
    const wide = ends.length > 1 ? (ends[0] - ends[ends.length - 1]) / (ends.length - 1) : 100;
    context.fillStyle = paint.ground;
    if (wide > 5) for (const end of ends) context.fillRect(end - 0.5, y + bar.top, 1, bar.high);
    return seconds;
  },

  messages(context, lane, y, x, { first, last, bar }) {
    context.fillStyle = this.look.send;
    for (let at = lane.messages.length - 3; at >= 0; at -= 3) {
      const [start, end] = lane.messages.subarray(at, at + 2);
      if (end < first) break;
      if (start <= last) context.fillRect(x(start), y + bar.sent, Math.max(x(end) - x(start), 0.4), bar.sentHigh);
    }
  },

  states(paint, lane, y, x, { first, last, left, small }) {
    const { context } = paint;
    let taken = paint.width; // from here on to the right, by the words of a later state
    for (let number = lane.states.length - 1; number >= 0; number--) {
      const [moment, state, words] = lane.states[number];
      const after = Math.min(last, lane.states[number + 1]?.[0] ?? last);
      const bad = state === "dead" || state === "failed";
      const shown = paint.picture.until === Infinity ? Infinity : last; // at the end, what was told after the last step too
      if (moment > shown || after < first || !(bad || state === "delayed" || state === "paused")) continue;
      const from = Math.max(left, x(Math.min(moment, last)));
      context.fillStyle = { paused: this.look.quiet, delayed: this.look.delay }[state] ?? this.look.trouble;
      if (bad) {
        context.font = `bold ${small ? 13 : 20}px system-ui, sans-serif`;
        context.textBaseline = "middle";
        context.textAlign = "center";
        context.fillText("✕", Math.min(Math.max(from, left + 8), paint.width - 12), y - (small ? 0 : 5));
      } else {
        context.fillRect(from, y + (small ? 6 : 8), x(after) - from, 2);
      }
      if (small) continue;
      context.font = "10px system-ui, sans-serif";
      context.textBaseline = "top";
      context.textAlign = "left";
      context.fillStyle = paint.text;
      const [shortened] = fold(words, paint.width - left - 8, 1, context.font);
      const start = Math.max(left, Math.min(from, paint.width - 4 - context.measureText(shortened).width));
      if (start + context.measureText(shortened).width > taken) continue;
      context.fillText(shortened, start, y + 11);
      taken = start - 8;
    }
  },

  name(paint, lane, y, { compute, wait, delay }, until, { small }) {
    const { context } = paint;
    const total = compute + wait + delay;
    const waits = total > 0 ? `wait ${Math.round((100 * wait) / total)} %` : "";
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = paint.text;
    context.font = small ? "10px system-ui, sans-serif" : "12px system-ui, sans-serif";
    context.fillText(lane.name, 2, small ? y : y - 9);
    if (!small) context.font = "10px system-ui, sans-serif";
    context.fillText(waits, small ? 50 : 2, small ? y : y + 2);
    const told = lane.note.split(", ").filter((word) => word === "slow" || word.startsWith("waits"))[0];
    if (told && until === Infinity && !small) context.fillText(told, 2, y + 12);
  },

  key(paint, box, data, fills) {
    const { context } = paint;
    const names = ["compute", "wait"];
    if (data.lanes.some((lane) => lane.steps.some((value, place) => place % 4 === 3 && value > 0))) names.push("delay");
    if (data.lanes.some((lane) => lane.messages.length)) names.push("send");
    context.textAlign = "left";
    context.textBaseline = "middle";
    let left = box.left;
    for (const name of names) {
      context.fillStyle = fills[name] ?? this.look[name];
      context.fillRect(left, name === "send" ? 6 : 3, 22, name === "send" ? 5 : 12);
      context.fillStyle = paint.text;
      context.fillText(name, left + 27, 9);
      left += textWidth(name) + 38;
    }
    const more = `${data.lanes.length} of ${data.ranks} ranks`;
    context.textAlign = "right";
    if (data.ranks > data.lanes.length) context.fillText(more, box.right, 9);
  },

  clock(paint, box, x) {
    const { context } = paint;
    context.strokeStyle = paint.line;
    context.fillStyle = paint.text;
    context.lineWidth = 1;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of ticks(box.first, box.last)) {
      context.beginPath();
      context.moveTo(x(tick), box.top - 2);
      context.lineTo(x(tick), box.bottom + 3);
      context.stroke();
      write(paint, String(Number(tick.toFixed(3))), x(tick), box.bottom + 6, 1);
    }
    write(paint, "seconds since the run began", (box.left + box.right) / 2, box.bottom + 20, 1);
  },
};
