// Who holds what: a row of bars per rank for the labels of its samples; tensors as rectangles, cut into their slices.

views.shards = {
  extent: (data) => [0, Math.max(0.001, data.end)],

  heights(data, width) {
    const across = width > 520 ? 2 : 1; // tensors side by side
    const rows = [];
    for (let place = 0; place < data.tensors.length; place += across) {
      const row = data.tensors.slice(place, place + across);
      rows.push({ row, height: row.some((tensor) => tensor.sides[0] !== null) ? 190 : 100 });
    }
    return { across, rows, sets: data.sets.map((set) => 54 + 34 * set.rows.length) };
  },

  height(data, width) {
    const { rows, sets } = this.heights(data, width);
    return Math.max(60, [...sets, ...rows.map((row) => row.height)].reduce((sum, height) => sum + height, 8));
  },

  draw(paint, data, until) {
    if (!data.sets.length && !data.tensors.length) return writeNothing(paint);
    const { across, rows, sets } = this.heights(data, paint.width);
    let top = 0;
    data.sets.forEach((set, number) => {
      this.bars(paint, set, top, until);
      top += sets[number];
    });
    for (const { row, height } of rows) {
      row.forEach((tensor, place) => {
        this.tensor(paint, tensor, { left: (paint.width * place) / across, top, width: paint.width / across, height }, until);
      });
      top += height;
    }
  },

  bars(paint, set, top, until) {
    const { context } = paint;
    const highest = Math.max(1, ...set.rows.flatMap((row) => row.histogram));
    const labels = set.rows.map((row) => row.labels).sort((a, b) => b.length - a.length)[0] ?? [];
    const [left, right] = [60, paint.width - 110];
    const step = (right - left) / Math.max(1, labels.length);
    context.textBaseline = "middle";
    context.fillStyle = paint.text;
    set.rows.forEach((row, place) => {
      const base = top + 30 + 34 * place;
      context.fillStyle = paint.text;
      context.textAlign = "left";
      context.fillText(`rank ${row.rank}`, 2, base - 10);
      context.fillStyle = paint.line;
      context.fillRect(left, base, right - left, 1);
      if (row.time > until) return; // not told yet
      context.fillStyle = paint.text;
      context.fillText(`${row.samples} samples`, right + 8, base - 10);
      context.fillStyle = COLOURS[row.rank % COLOURS.length];
      row.histogram.forEach((count, label) => {
        const tall = (26 * count) / highest;
        context.fillRect(left + step * (label + 0.1), base - tall, step * 0.8, tall);
      });
    });
    const under = top + 30 + 34 * (set.rows.length - 1) + 11;
    context.fillStyle = paint.text;
    context.textAlign = "center";
    const every = Math.ceil((labels.length * 24) / (right - left)) || 1;
    labels.forEach((label, place) => {
      if (place % every === 0) context.fillText(label, left + step * (place + 0.5), under);
    });
    context.textAlign = "left";
    context.fillText(labels.length ? `labels of ${set.name}` : set.name, right + 8, under);
    if (labels.length) context.fillText(`tallest bar: ${highest}`, right + 8, under + 15);
  },

  tensor(paint, tensor, place, until) {
    const { context } = paint;
    const flat = tensor.sides[0] === null;
    const box = { left: place.left + (flat ? 10 : 52), right: place.left + place.width - 16, top: place.top + 24, bottom: place.top + place.height - 34 };
    const x = (index) => box.left + (index / tensor.sizes[1]) * (box.right - box.left);
    const y = (index) => box.top + (index / tensor.sizes[0]) * (box.bottom - box.top);
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = paint.text;
    context.fillText(`${tensor.name}: ranks`, box.left, place.top + 12);
    tensor.parts.forEach((part) => {
      if (part.time > until) return;
      const [[a, b], [c, d]] = [part.columns, part.rows];
      context.globalAlpha = 0.45;
      context.fillStyle = COLOURS[part.ranks[0] % COLOURS.length];
      context.fillRect(x(a) + 1, y(c) + 1, x(b) - x(a) - 2, y(d) - y(c) - 2);
      context.globalAlpha = 1;
      context.fillStyle = paint.text;
      context.textAlign = "center";
      context.fillText(fold(part.words, x(b) - x(a) - 4, 1)[0], (x(a) + x(b)) / 2, (y(c) + y(d)) / 2);
    });
    context.strokeStyle = paint.faint;
    context.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    context.textAlign = "center";
    if (tensor.sides[1] === null) return; // a single number
    this.edges(tensor.parts.map((part) => part.columns), 28 / (box.right - box.left), tensor.sizes[1])
      .forEach((edge) => context.fillText(edge, x(edge), box.bottom + 10));
    context.fillText(`index in dimension ${tensor.sides[1]}`, (box.left + box.right) / 2, box.bottom + 25);
    if (flat) return;
    context.textAlign = "right";
    this.edges(tensor.parts.map((part) => part.rows), 15 / (box.bottom - box.top), tensor.sizes[0])
      .forEach((edge) => context.fillText(edge, box.left - 5, y(edge)));
    context.save();
    context.translate(place.left + 10, (box.top + box.bottom) / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(`index in dimension ${tensor.sides[0]}`, 0, 0);
    context.restore();
  },

  // Where a side is cut, without the cuts that are too close for their numbers. `gap` is a share of the side.
  edges(spans, gap, size) {
    const kept = [0];
    for (const edge of [...new Set(spans.flat())].sort((a, b) => a - b)) {
      if ((edge - kept[kept.length - 1]) / size >= gap && (edge === size || (size - edge) / size >= gap)) kept.push(edge);
    }
    return kept;
  },
};
