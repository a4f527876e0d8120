// Loss curves: each rank's own, faint, and their mean; by step or by wall clock. Runs side by side, if there are several.

views.curves = {
  extent: (data) => [0, Math.max(0.001, ...data.curves.flatMap((curve) => Array.from(curve.time.slice(-1))))],

  controls(picture, bar) {
    for (const by of ["step", "time"]) {
      const button = make("button", bar, { type: "button", textContent: by === "step" ? "by step" : "by time" });
      button.onclick = () => {
        picture.options.by = by;
        picture.ask();
      };
    }
    picture.options.buttons = Array.from(bar.children);
  },

  draw(paint, data, until) {
    const { context } = paint;
    const by = paint.picture.options.by ?? data.by;
    paint.picture.options.buttons.forEach((button) => button.setAttribute("aria-pressed", button.textContent === `by ${by}`));
    if (!data.curves.length) return writeNothing(paint);
    const shown = data.curves.map((curve) => {
      const points = (by === "time" && curve.timely) || curve; // means are others by time
      let count = points.time.findIndex((moment) => moment > until);
      if (count < 0) count = points.time.length;
      const colour = curve.colour < 0 ? paint.text : COLOURS[curve.colour % COLOURS.length];
      return { ...curve, ...points, count, colour, rank: curve.colour >= 0, x: points[by] };
    });
    const [most, least] = [(most, each) => (each > most && each < Infinity ? each : most), (least, each) => (each < least && each > -Infinity ? each : least)];
    const all = (column, pick, first) => shown.map((curve) => curve[column].slice(0, curve.count).reduce(pick, first));
    const [begin, last] = [Math.min(...all("x", least, 0)), Math.max(...all("x", most, 1e-9))]; // steps may go backwards
    const [lowest, highest] = [Math.min(...all("loss", least, 0)), Math.max(...all("loss", most, 1e-9))];
    const named = shown.map((curve) => [curve.name, curve.colour]);
    const crowd = shown.filter((curve) => !curve.strong).length > data.named;
    if (crowd) named.splice(0, named.length - 1, [`${named.length - 1} ranks`, shown[0].colour]);
    const at = axes(paint, {
      x: [begin, last], y: [lowest * 1.05, Math.min(data.top ?? Infinity, highest * 1.05)], whole: by === "step",
      xlabel: by === "step" ? "step" : "seconds", ylabel: "loss", top: writeNote(paint, data.note, legend(paint, named)),
    });
    inside(paint, at.box, () => shown.forEach((curve) => this.line(context, curve, at)));
    for (const { sign, colour, ...end } of shown.flatMap(({ lost, colour }) => lost.map((end) => ({ ...end, colour })))) {
      if (end.time > until) continue;
      context.fillStyle = colour;
      context.textBaseline = "middle";
      const height = sign === "✕" && end.loss !== null ? at.y(end.loss) : 0; // beyond the top if it is not known
      write(paint, sign, at.x(end[by]), Math.max(height, at.box.top + 5), 1);
    }
  },

  line(context, curve, at) {
    context.globalAlpha = curve.strong ? 1 : 0.85;
    context.lineWidth = curve.strong ? 2.2 : 1.4;
    context.strokeStyle = curve.colour;
    context.beginPath();
    let begun = false; // a loss that is not finite leaves a gap
    for (let point = 0; point < curve.count; point++) {
      const there = Number.isFinite(curve.loss[point]);
      if (there) context[begun ? "lineTo" : "moveTo"](at.x(curve.x[point]), at.y(curve.loss[point]));
      begun = there;
    }
    context.stroke();
  },
};
