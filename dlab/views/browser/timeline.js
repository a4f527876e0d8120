// Timeline: a lane per rank. Computing is plain, waiting hatched, messages are thin bars on it; delays, pauses and
// deaths are marked. Shows the last seconds before `until`.

views.timeline = {
  extent: (data) => [0, Math.max(0.001, data.end)],

  height: (data) => 62 + 44 * data.lanes.length,

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

  look: { compute: "#0072B2", wait: "#E69F00", send: "#009E73", trouble: "#D55E00", quiet: "#8a8a8a" },

  draw(paint, data, until) {
    const { context, width, height } = paint;
    const last = Math.max(0.05, Math.min(until, data.end));
    const first = Math.max(0, last - (paint.picture.options.seconds || data.seconds));
    const box = { left: 88, right: width - 14, top: 24, bottom: height - 36, first, last };
    const x = (moment) => box.left + ((moment - first) / (last - first)) * (box.right - box.left);
    const hatch = this.hatch(context);
    this.key(paint, box, data, hatch);
    this.clock(paint, box, x);
    data.lanes.forEach((lane, place) => {
      const y = box.top + ((box.bottom - box.top) * (place + 0.5)) / data.lanes.length;
      context.save();
      context.beginPath();
      context.rect(box.left, box.top - 4, box.right - box.left + 14, box.bottom - box.top + 8);
      context.clip();
      const shares = this.steps(context, lane, y, x, box, hatch, paint);
      this.messages(context, lane, y, x, box);
      this.states(paint, lane, y, x, box);
      context.restore();
      this.name(paint, lane, y, shares, until);
    });
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
  steps(context, lane, y, x, { first, last }, hatch, paint) {
    let [compute, wait, shown] = [0, 0, 0];
    const ends = [];
    for (let at = lane.steps.length - 3; at >= 0; at -= 3) {
      const [end, computed, waited] = lane.steps.subarray(at, at + 3);
      if (end < first) break;
      if (end > last + 1e-4) continue; // float32
      const [a, b, c] = [x(end - waited - computed), x(end - waited), x(end)];
      context.fillStyle = this.look.compute;
      context.fillRect(a, y - 15, Math.max(b - a, 0.3), 24);
      context.fillStyle = hatch;
      context.fillRect(b, y - 15, c - b, 24);
      ends.push(c);
      compute += computed;
      wait += waited;
      shown++;
    }
    context.fillStyle = paint.ground;
    if (shown <= 90) for (const end of ends) context.fillRect(end - 0.5, y - 15, 1, 24);
    return { compute, wait };
  },

  messages(context, lane, y, x, { first, last }) {
    context.fillStyle = this.look.send;
    context.font = "9px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let at = lane.messages.length - 3; at >= 0; at -= 3) {
      const [start, end, destination] = lane.messages.subarray(at, at + 3);
      if (end < first) break;
      if (start > last) continue;
      const wide = Math.max(x(end) - x(start), 0.4);
      context.fillStyle = this.look.send;
      context.fillRect(x(start), y, wide, 9);
      context.fillStyle = "#ffffff";
      if (wide > 18) context.fillText(`→${destination}`, x(start) + wide / 2, y + 5);
    }
  },

  states(paint, lane, y, x, { first, last, left }) {
    const { context } = paint;
    let taken = paint.width; // from here on to the right, by the words of a later state
    for (let number = lane.states.length - 1; number >= 0; number--) {
      const [moment, state, words] = lane.states[number];
      const after = Math.min(last, lane.states[number + 1]?.[0] ?? last);
      const bad = state === "dead" || state === "failed";
      if (moment > last || after < first || !(bad || state === "delayed" || state === "paused")) continue;
      const from = Math.max(left, x(moment));
      context.fillStyle = state === "paused" ? this.look.quiet : this.look.trouble;
      if (bad) {
        context.font = "bold 20px system-ui, sans-serif";
        context.textBaseline = "middle";
        context.textAlign = "center";
        context.fillText("✕", Math.max(from, left + 8), y - 3);
      } else {
        context.fillRect(from, y + 11, x(after) - from, 3);
      }
      context.font = "10px system-ui, sans-serif";
      context.textBaseline = "top";
      context.textAlign = "left";
      context.fillStyle = paint.text;
      const start = Math.max(left, Math.min(from, paint.width - 4 - context.measureText(words).width));
      if (start + context.measureText(words).width > taken) continue;
      context.fillText(words, start, y + 15);
      taken = start - 8;
    }
  },

  name(paint, lane, y, { compute, wait }, until) {
    const { context } = paint;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = paint.text;
    context.font = "12px system-ui, sans-serif";
    context.fillText(lane.name, 2, y - 9);
    context.font = "10px system-ui, sans-serif";
    if (compute + wait > 0) context.fillText(`wait ${Math.round((100 * wait) / (compute + wait))} %`, 2, y + 4);
    const told = lane.note.split(", ").filter((word) => word === "slow" || word.startsWith("waits"))[0];
    if (told && until === Infinity) context.fillText(told, 2, y + 16);
  },

  key(paint, box, data, hatch) {
    const { context } = paint;
    const names = data.lanes.some((lane) => lane.messages.length) ? ["compute", "wait", "send"] : ["compute", "wait"];
    context.textAlign = "left";
    context.textBaseline = "middle";
    names.forEach((name, place) => {
      const left = box.left + 92 * place;
      context.fillStyle = name === "wait" ? hatch : this.look[name];
      context.fillRect(left, name === "send" ? 6 : 3, 22, name === "send" ? 6 : 12);
      context.fillStyle = paint.text;
      context.fillText(name, left + 27, 9);
    });
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
      context.fillText(String(Number(tick.toFixed(3))), x(tick), box.bottom + 6);
    }
    context.fillText("seconds since the run began", (box.left + box.right) / 2, box.bottom + 20);
  },
};
