// The ranks at a glance: a box per rank with its state in words. Who has much to say gets a row of its own.

const [LINE, BOX, ROOM] = [22, 68, 230]; // of a row, of the box with the name, and of a rank that says little

// Where each rank stands, its words in lines; and how high all of it is.
function arrange(ranks, width) {
  const across = Math.max(1, Math.min(4, Math.floor(width / ROOM)));
  let [column, y] = [0, 2];
  const cells = ranks.map((rank) => {
    const words = `${rank.sign} ${rank.words}`;
    const long = textWidth(words) > width / across - BOX - 4;
    if (long && column) [column, y] = [0, y + LINE];
    const cell = { rank, x: (column * width) / across, y, lines: long ? fold(words, width - BOX - 4, 4) : [words] };
    column = long ? 0 : (column + 1) % across;
    if (!column) y += LINE + 15 * (cell.lines.length - 1);
    return cell;
  });
  return { cells, height: y + (column ? LINE : 0) + 2 };
}

views.ranks = {
  clock: "none",
  height: (data, width) => arrange(data.ranks, width).height + (data.hang ? 24 : 0),

  draw(paint, data) {
    const { context, width, picture } = paint;
    const { cells, height } = arrange(data.ranks, width);
    context.textBaseline = "middle";
    for (const { rank, x, y, lines } of cells) {
      context.fillStyle = rank.colour;
      context.beginPath();
      context.roundRect(x + 2, y, 58, 18, 4);
      context.fill();
      context.fillStyle = "#ffffff";
      context.textAlign = "center";
      context.fillText(rank.name, x + 31, y + 9);
      context.fillStyle = paint.text;
      context.textAlign = "left";
      lines.forEach((line, place) => context.fillText(line, x + BOX, y + 9 + 15 * place));
    }
    if (data.hang) {
      context.fillStyle = "#D55E00";
      context.fillText(data.hang, 2, height + 10, width - 4);
    }
    picture.box.dataset.hang = data.hang || "";
    picture.box.dataset.states = data.ranks.map((rank) => rank.state).join(" ");
  },
};
