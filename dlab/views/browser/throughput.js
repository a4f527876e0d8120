// Throughput: samples per second, a line per rank and a strong one for all; names and last values stand at their ends.

views.throughput = {
  extent: (data) => [0, Math.max(0.001, data.time[data.time.length - 1] ?? 0)],

  draw(paint, data, until) {
    if (!data.lines.length) return writeNothing(paint);
    let count = data.time.findIndex((moment) => moment > until);
    if (count < 0) count = data.time.length;
    const highest = Math.max(1e-9, data.top); // of all times: a replay keeps its scale
    const unit = highest >= 5000 ? 1000 : 1;
    const room = 120; // for the names and values
    const at = axes({ ...paint, width: paint.width - room }, {
      x: [0, Math.max(0.05, data.time[count - 1] ?? 0)],
      y: [0, (highest * 1.08) / unit],
      xlabel: "seconds since the run began",
      ylabel: `${unit > 1 ? "thousand " : ""}${data.unit}/s`,
      top: writeNote(paint, data.note, 10),
    });
    const { context } = paint;
    const ends = [];
    for (const line of data.lines) {
      const all = line.rank < 0;
      const style = { colour: all ? paint.text : COLOURS[line.rank % COLOURS.length], width: all ? 2.5 : 1.6 };
      style.dashes = all ? [] : [[], [7, 4], [2, 3], [8, 3, 2, 3]][line.rank % 4]; // ranks that keep step lie on each other
      let last = null;
      context.strokeStyle = style.colour;
      context.lineWidth = style.width;
      context.setLineDash(style.dashes);
      inside(paint, at.box, () => {
        context.beginPath();
        for (let point = 0; point < count; point++) {
          if (Number.isNaN(line.rates[point])) continue;
          last = line.rates[point];
          context.lineTo(at.x(data.time[point]), at.y(last / unit));
        }
        context.stroke();
      });
      if (last !== null) ends.push({ ...style, name: line.name, value: last, y: at.y(last / unit) });
    }
    context.setLineDash([]);
    this.label(paint, at.box, ends);
  },

  // Beside the end of each line its name and value, moved apart where they would lie on each other.
  label(paint, box, ends) {
    const { context } = paint;
    const gap = Math.min(15, (box.bottom - box.top) / Math.max(1, ends.length - 1));
    if (gap < 14) context.font = "10px system-ui, sans-serif";
    ends.sort((a, b) => Math.round(a.y / gap) - Math.round(b.y / gap)); // those that keep step stay in their order
    ends.forEach((end, place) => { end.at = Math.max(end.y, place ? ends[place - 1].at + gap : box.top + 4); });
    let lowest = box.bottom;
    for (const end of [...ends].reverse()) { end.at = Math.min(end.at, lowest); lowest = end.at - gap; }
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const end of ends) {
      context.strokeStyle = end.colour;
      context.lineWidth = end.width;
      context.setLineDash(end.dashes);
      context.beginPath();
      context.moveTo(box.right + 5, end.at);
      context.lineTo(box.right + 25, end.at);
      context.stroke();
      context.fillStyle = paint.text;
      context.fillText(`${end.name}: ${this.amount(end.value)}`, box.right + 29, end.at);
    }
    context.setLineDash([]);
  },

  amount: (value) => (value >= 1e4 ? `${(value / 1000).toFixed(1)} k` : String(Number(value.toPrecision(3)))),
};
