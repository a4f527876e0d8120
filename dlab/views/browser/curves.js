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
    const by = paint.picture.options.by ?? data.by;
    paint.picture.options.buttons.forEach((button) => button.setAttribute("aria-pressed", button.textContent === `by ${by}`));
    const shown = data.curves.map((curve) => {
      const points = (by === "time" && curve.timely) || curve; // means are others by time
      let count = points.time.findIndex((moment) => moment > until);
      if (count < 0) count = points.time.length;
      return { ...curve, ...points, count, x: points[by] };
    });
    const last = Math.max(1e-9, ...shown.map((curve) => (curve.count ? curve.x[curve.count - 1] : 0)));
    const highest = Math.max(1e-9, ...shown.map((curve) => curve.loss.slice(0, curve.count).reduce((a, b) => Math.max(a, b), 0)));
    const at = axes(paint, {
      x: [0, last], y: [0, highest * 1.05], xlabel: by === "step" ? "step" : "seconds", ylabel: "loss",
    });
    for (const curve of shown) {
      paint.context.globalAlpha = curve.strong ? 1 : 0.35;
      paint.context.lineWidth = curve.strong ? 2 : 1;
      paint.context.strokeStyle = curve.colour < 0 ? paint.text : COLOURS[curve.colour % COLOURS.length];
      paint.context.beginPath();
      for (let point = 0; point < curve.count; point++) paint.context.lineTo(at.x(curve.x[point]), at.y(curve.loss[point]));
      paint.context.stroke();
    }
    paint.context.globalAlpha = 1;
    legend(paint, shown.map((curve) => [curve.name, curve.colour < 0 ? paint.text : COLOURS[curve.colour % COLOURS.length]]));
  },
};
