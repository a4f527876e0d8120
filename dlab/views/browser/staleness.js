// Staleness: a row of bars per rank, the shares of its updates, and a line at their mean.

const MEANING = "staleness: updates that the gradient's weights did not have";

views.staleness = {
  clock: "none",

  height(data, width) {
    const more = data.ranks > data.rows.filter((row) => row.rank >= 0).length;
    return 46 + 48 * Math.max(1, data.rows.length) + 14 * (fold(MEANING, width - 4).length - (more ? 0 : 1));
  },

  draw(paint, data) {
    if (!data.rows.length) return writeNothing(paint);
    const { context } = paint;
    const [left, right, tall] = [60, paint.width - 120, 38];
    const bars = data.rows[0]?.shares.length ?? 1;
    const x = (staleness) => left + ((staleness + 0.5) / (bars * data.width)) * (right - left); // the middle of its bar
    const highest = Math.max(1e-9, ...data.rows.flatMap((row) => Array.from(row.shares)));
    context.textBaseline = "middle";
    data.rows.forEach((row, place) => {
      const base = 46 + 48 * place;
      context.fillStyle = paint.text;
      context.textAlign = "left";
      context.fillText(row.name, 2, base - tall / 2);
      context.fillText(`${row.updates} updates`, right + 8, base - tall / 2 - 7);
      context.fillText(`mean ${row.mean.toFixed(1)}`, right + 8, base - tall / 2 + 7);
      context.fillStyle = paint.line;
      context.fillRect(left, base, right - left, 1);
      context.fillStyle = row.rank < 0 ? paint.faint : COLOURS[row.rank % COLOURS.length];
      const step = (right - left) / bars;
      row.shares.forEach((share, bar) => {
        const height = (tall * share) / highest;
        context.fillRect(left + step * (bar + 0.05), base - height, step * 0.9, height);
      });
      context.fillStyle = paint.text;
      context.fillRect(x(row.mean) - 1, base - tall, 2, tall);
    });
    const under = 46 + 48 * (data.rows.length - 1) + 10;
    context.fillStyle = paint.text;
    context.textAlign = "center";
    for (const tick of ticks(0, bars * data.width - 1, 8)) {
      if (Number.isInteger(tick)) context.fillText(tick, x(tick), under);
    }
    write(paint, MEANING, (left + right) / 2, under + 17);
    context.textAlign = "left";
    context.fillText(`tallest bar: ${Math.round(100 * highest)} %`, right + 8, under);
    const shown = data.rows.filter((row) => row.rank >= 0).length;
    if (data.ranks > shown) context.fillText(`${shown} of ${data.ranks} ranks`, right + 8, under + 17 + 14 * fold(MEANING, paint.width - 4).length);
  },
};
