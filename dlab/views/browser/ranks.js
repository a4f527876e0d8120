// The ranks at a glance: a box per rank with its state in words.

views.ranks = {
  clock: "none",
  height: (data, width) => 24 * Math.ceil(data.ranks.length / (width > 700 ? 2 : 1)) + 4,

  draw(paint, data) {
    const { context, width, picture } = paint;
    const columns = width > 700 ? 2 : 1;
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
    picture.box.dataset.states = data.ranks.map((rank) => rank.state).join(" ");
  },
};
