// The ranks at a glance: a box per rank with its state in words.

views.ranks = {
  clock: "none",
  columns: (data, width) => (width > 700 && !data.hang ? 2 : 1), // what each waits for needs the whole width
  height: (data, width) => 24 * Math.ceil(data.ranks.length / views.ranks.columns(data, width)) + (data.hang ? 28 : 4),

  draw(paint, data) {
    const { context, width, picture } = paint;
    const columns = views.ranks.columns(data, width);
    context.textBaseline = "middle";
    data.ranks.forEach((rank, index) => {
      const x = (index % columns) * (width / columns);
      const y = 24 * Math.floor(index / columns) + 12;
      context.fillStyle = rank.colour;
      context.beginPath();
      context.roundRect(x + 2, y - 9, 58, 18, 4);
      context.fill();
      context.fillStyle = "#ffffff";
      context.textAlign = "center";
      context.fillText(rank.name, x + 31, y);
      context.fillStyle = paint.text;
      context.textAlign = "left";
      context.fillText(`${rank.sign} ${rank.words}`, x + 68, y, width / columns - 72);
    });
    if (data.hang) {
      context.fillStyle = "#D55E00";
      context.fillText(data.hang, 2, 24 * data.ranks.length + 12, width - 4);
    }
    picture.box.dataset.hang = data.hang || "";
    picture.box.dataset.states = data.ranks.map((rank) => rank.state).join(" ");
  },
};
