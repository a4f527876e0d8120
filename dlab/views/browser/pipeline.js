// A pipeline: a lane per rank with a box for each action, as planned and, below, as it was measured, on one time axis.
// A replay runs through the time of one step.

views.pipeline = {
  clock: "own",
  unit: "time",
  extent: (data) => [0, Math.max(1e-6, ...data.parts.map((part) => part.end.reduce((most, end) => Math.max(most, end), 0)))],
  digits: (value, data) => (data.measured ? `${short(value)} ms` : short(value)),

  tall: (data) => Math.max(7, Math.min(26, Math.floor(520 / (data.lanes.length * Math.max(1, data.parts.length))))),

  height(data, width) {
    if (!data.parts.length) return 60;
    return this.legendHeight(data, width) + data.parts.length * (22 + this.tall(data) * data.lanes.length) + 44;
  },

  names: (data) => [...data.key, ["bubble: the rank waits", data.idle]],

  legendHeight(data, width) { // as `legend` folds its rows
    let [x, rows] = [52, 1];
    for (const [name] of this.names(data)) {
      const wide = textWidth(name) + 34;
      if (x > 52 && x + wide > width) [x, rows] = [52, rows + 1];
      x += wide;
    }
    return 23 + 15 * (rows - 1);
  },

  controls(picture, bar) {
    bar.hidden = true;
    picture.options.note = make("div", picture.box, { className: "dlab-note", hidden: true });
    picture.canvas.addEventListener("mousemove", (event) => this.point(picture, event.offsetX, event.offsetY));
    picture.canvas.addEventListener("mouseleave", () => this.point(picture, NaN, NaN));
  },

  draw(paint, data, until) {
    const { context, width, height, picture } = paint;
    picture.options.boxes = [];
    if (!data.parts.length) return writeNothing(paint);
    const [, last] = this.extent(data);
    const now = Math.min(until, last);
    const tall = this.tall(data);
    const box = { left: 64, right: width - 12 };
    const x = (moment) => box.left + (moment / last) * (box.right - box.left);
    let top = legend(paint, this.names(data));
    this.axis(paint, data, box, x, top, height - 40, last);
    for (const part of data.parts) {
      context.font = "12px system-ui, sans-serif";
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillStyle = paint.text;
      context.fillText(fold(part.title, width - box.left - 4, 1)[0], box.left, top + 9);
      this.lanes(paint, data, part, { ...box, top: top + 20, tall, now, last }, x);
      top += 22 + tall * data.lanes.length;
    }
    if (until < last) { // where the replay is
      context.strokeStyle = paint.text;
      context.beginPath();
      context.moveTo(x(now), 24);
      context.lineTo(x(now), height - 40);
      context.stroke();
    }
  },

  lanes(paint, data, part, { left, right, top, tall, now, last }, x) {
    const { context, picture } = paint;
    const end = Math.min(now, part.end.reduce((most, each) => Math.max(most, each), 0));
    const every = Math.ceil(13 / tall); // of so many lanes, one has its name
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    data.lanes.forEach((name, lane) => {
      context.fillStyle = data.idle;
      if (part.lane.includes(lane)) context.fillRect(left, top + tall * lane + 1, x(end) - left, tall - 2);
      context.fillStyle = paint.text;
      if (lane % every === 0) context.fillText(name, left - 5, top + tall * (lane + 0.5));
    });
    const actions = part.action.split(" ");
    const typical = (right - left) / last * (part.end[0] - part.start[0] || last);
    const gap = typical > 5 ? 1 : 0;
    const widths = actions.map((text) => text.length).reduce((most, long) => Math.max(most, long), 0);
    const size = Math.min(11, tall - 4);
    context.font = `${size}px system-ui, sans-serif`;
    const whole = textWidth("0".repeat(widths), context.font) + 3 <= typical;
    context.textAlign = "center";
    for (let k = 0; k < part.lane.length; k++) {
      if (part.start[k] >= now) continue;
      const [from, to] = [x(part.start[k]), x(Math.min(now, part.end[k]))];
      const y = top + tall * part.lane[k] + 1;
      context.fillStyle = data.colours[part.colour[k]];
      context.fillRect(from, y, Math.max(0.5, to - from - gap), tall - 2);
      picture.options.boxes.push({ left: from, right: to, top: y, bottom: y + tall - 2, part, k, action: actions[k] });
      const label = whole ? actions[k] : String(part.microbatch[k]);
      if (size < 7 || textWidth(label, context.font) + 3 > to - from) continue;
      context.fillStyle = this.ink(context.fillStyle);
      context.fillText(label, (from + to - gap) / 2, y + (tall - 2) / 2 + 0.5);
    }
  },

  ink(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
    return 0.21 * red + 0.72 * green + 0.07 * blue < 0.5 ? "#ffffff" : "#000000";
  },

  axis(paint, data, { left, right }, x, top, bottom, last) {
    const { context } = paint;
    context.strokeStyle = paint.line;
    context.fillStyle = paint.text;
    context.lineWidth = 1;
    context.textBaseline = "top";
    for (const tick of ticks(0, last)) {
      context.beginPath();
      context.moveTo(x(tick), top + 16);
      context.lineTo(x(tick), bottom + 3);
      context.stroke();
      write(paint, short(tick), x(tick), bottom + 6, 1);
    }
    write(paint, data.unit, (left + right) / 2, bottom + 21, 1);
  },

  // Below the cursor: which action it is, and when it was.
  point(picture, x, y) {
    const { note, boxes = [] } = picture.options;
    const there = boxes.find(({ left, right, top, bottom }) => left <= x && x < right && top <= y && y <= bottom);
    note.hidden = !there;
    if (!there) return;
    const { part, k, action } = there;
    const times = `from ${short(part.start[k])} to ${this.digits(part.end[k], picture.data)}`;
    note.textContent = `${action}, ${picture.data.lanes[part.lane[k]]}\n${times}`;
    const { offsetLeft, offsetTop, clientWidth } = picture.canvas;
    note.style.left = `${offsetLeft + Math.max(0, Math.min(x + 12, clientWidth - note.offsetWidth))}px`;
    note.style.top = `${offsetTop + y + 16}px`;
  },
};
