// What all views share in the browser: unpacking data, a canvas that is drawn when something has changed, axes, replay.
// A view is an entry in `views`: draw(paint, data, until) draws what had happened up to `until`, and extent(data) gives
// the [first, last] of it, in the unit that its replay runs through.

const views = {};
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#B8A800"];

const TYPES = { float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array };

function unpack(text, buffers) {
  return JSON.parse(text, (_, value) => {
    if (value === null || typeof value !== "object" || value.buffer === undefined) return value;
    const bytes = buffers[value.buffer];
    const copy = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength); // typed arrays want alignment
    return new TYPES[value.type](copy);
  });
}

// Text, lines and background as JupyterLab has them now, light or dark; on a page of our own as the system wants them.
function theme(element) {
  const outside = window.frameElement ?? element;
  const style = getComputedStyle(outside);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const pick = (name, light, night) => style.getPropertyValue(name).trim() || (dark ? night : light);
  return {
    text: pick("--jp-ui-font-color1", "#202020", "#e8e8e8"),
    faint: pick("--jp-ui-font-color3", "#8a8a8a", "#8a8a8a"),
    line: pick("--jp-border-color2", "#d8d8d8", "#444444"),
    ground: pick("--jp-layout-color0", "#ffffff", "#181818"),
  };
}

function make(tag, parent, properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  parent?.append(element);
  return element;
}

// One view on one canvas.
class Picture {
  constructor(parent, name) {
    this.view = views[name];
    this.box = make("figure", parent, { className: "dlab-view" });
    this.box.dataset.view = name;
    this.title = make("figcaption", this.box);
    this.canvas = make("canvas", this.box);
    this.canvas.setAttribute("role", "img");
    this.until = Infinity;
    this.drawn = 0;
    this.options = {};
    if (this.view.controls) this.view.controls(this, make("div", this.box, { className: "dlab-options" }));
    // Drawn at once when it gets its width, before anybody sees a picture of the wrong height. What is observed has no
    // height, so that drawing does not change it.
    new ResizeObserver(() => this.data && this.draw()).observe(make("div", this.box, { className: "dlab-width" }));
  }

  set(part) {
    this.data = part.data;
    this.title.textContent = part.title;
    this.canvas.setAttribute("aria-label", part.alt);
    if (this.drawn) this.ask();
    else this.draw(); // at once: an empty canvas would have another height
    if (!this.drawn) this.ask(); // not on the screen yet
  }

  ask() { // many changes, one drawing
    if (this.asked || !this.data) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return; // not on the screen
    const height = this.view.height?.(this.data, width) ?? (width > 600 ? 240 : 190);
    const scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    this.view.draw({ context, width, height, picture: this, ...theme(this.box) }, this.data, this.until);
    this.box.dataset.drawn = ++this.drawn;
  }
}

// All views of a panel, each made when it first has something to show.
class Board {
  constructor(parent) {
    this.root = make("div", parent, { className: "dlab-board" });
    this.pictures = new Map();
  }

  set(parts) {
    const fresh = parts.filter((part) => !this.pictures.has(part.name));
    for (const part of fresh) this.pictures.set(part.name, new Picture(this.root, part.name));
    if (fresh.length) this.root.append(...parts.map((part) => this.pictures.get(part.name).box)); // always in one order
    for (const part of parts) this.pictures.get(part.name).set(part);
    this.root.dataset.sets = Number(this.root.dataset.sets ?? 0) + 1;
  }
}

// Below one picture or several that share a clock: play, a slider over what has happened, and speed.
function addReplay(parent, pictures, seconds = 8) {
  const bar = make("div", parent, { className: "dlab-replay" });
  const play = make("button", bar, { type: "button", textContent: "▶" });
  const [{ view }] = pictures;
  const unit = view.unit ?? (view.clock === "own" ? "steps" : "time");
  const label = make("label", bar, { textContent: `replay, position in ${unit} ` });
  const slider = make("input", label, { type: "range", min: 0, max: 1000, value: 1000 });
  const place = make("output", bar);
  const speed = make("select", make("label", bar, { textContent: "speed " }));
  for (const factor of [0.25, 0.5, 1, 2, 4]) make("option", speed, { value: factor, textContent: `${factor}×` });
  speed.value = 1;
  play.setAttribute("aria-label", "play");
  slider.setAttribute("aria-label", `position in ${unit}`);
  let last = null;
  const move = () => {
    const share = slider.value / slider.max;
    for (const picture of pictures) {
      const [first, end] = picture.view.extent(picture.data);
      picture.until = share >= 1 ? Infinity : first + share * (end - first);
      picture.box.dataset.until = picture.until;
      picture.ask();
    }
    tell();
  };
  const tell = () => { // how far it is, of how much
    const ends = pictures.map((picture) => picture.view.extent(picture.data)[1]);
    const now = (Math.max(...ends) * slider.value) / slider.max;
    const plain = (value) => (unit === "time" ? `${value.toFixed(2)} s` : Math.ceil(value));
    const digits = (value) => view.digits?.(value, pictures[0].data) ?? plain(value);
    place.textContent = `${digits(now)} of ${digits(Math.max(...ends))}`;
  };
  const tick = (now) => {
    if (last === null) return;
    slider.value = Number(slider.value) + ((now - last) / 1000 / seconds) * speed.value * slider.max;
    last = now;
    move();
    if (slider.value < Number(slider.max)) requestAnimationFrame(tick);
    else stop();
  };
  const stop = () => { last = null; play.textContent = "▶"; play.setAttribute("aria-label", "play"); };
  play.onclick = () => {
    if (last !== null) return stop();
    if (slider.value >= Number(slider.max)) slider.value = 0;
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "pause");
    requestAnimationFrame((now) => { last = now; tick(now); });
  };
  slider.oninput = () => { stop(); move(); };
  slider.step = "any";
  tell();
  return bar;
}

// Round numbers for an axis from low to high, at least so far apart.
function ticks(low, high, count = 5, least = 0) {
  const raw = Math.max((high - low) / count || 1, least);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) found.push(tick);
  return found;
}

const short = (value) => Number(value.toPrecision(3)).toLocaleString("en", { notation: "compact", maximumFractionDigits: 6 });

// Text is measured here before there is a canvas to draw it on.
const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text, font = "12px system-ui, sans-serif") {
  ruler.font = font;
  return ruler.measureText(text).width;
}

// Text in lines that are not wider than this, as many as are wanted; what is too much ends in an ellipsis.
function fold(text, width, most = Infinity, font = undefined) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines[lines.length - 1] ? `${lines[lines.length - 1]} ${word}` : word;
    if (textWidth(longer, font) <= width || !lines[lines.length - 1]) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  if (lines.length > most) {
    lines.length = most;
    lines[most - 1] += " …";
  }
  return lines.map((line) => {
    while (line.length > 1 && textWidth(line, font) > width) line = `${line.slice(0, -2).trimEnd()}…`;
    return line;
  });
}

// Text around this place, moved to the side as far as it must be to stay on the picture, and folded if it is too long.
function write(paint, text, middle, y, most = 2) {
  const { context, width } = paint;
  context.textAlign = "center";
  fold(text, width - 4, most).forEach((line, place) => {
    const half = textWidth(line, context.font) / 2;
    context.fillText(line, Math.max(half + 2, Math.min(middle, width - half - 2)), y + 14 * place);
  });
}

// In the place of a picture for which nothing has come yet.
function writeNothing(paint, words = paint.picture.canvas.getAttribute("aria-label")) {
  paint.context.fillStyle = paint.faint;
  paint.context.textBaseline = "middle";
  write(paint, words, paint.width / 2, paint.height / 2, 3);
}

// An empty chart with labelled axes; gives the functions that turn values into pixels.
function axes(paint, { x, y, xlabel, ylabel, top = 10, whole = false }) {
  const { context, width, height } = paint;
  const box = { left: 52, right: width - 10, top, bottom: height - 36 };
  const place = (value, [low, high], from, to) => from + ((value - low) / (high - low || 1)) * (to - from);
  const at = { x: (value) => place(value, x, box.left, box.right), y: (value) => place(value, y, box.bottom, box.top), box };
  context.strokeStyle = paint.line;
  context.fillStyle = paint.text;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of ticks(...y)) {
    context.beginPath();
    context.moveTo(box.left, at.y(tick));
    context.lineTo(box.right, at.y(tick));
    context.stroke();
    context.fillText(short(tick), box.left - 5, at.y(tick));
  }
  context.textBaseline = "top";
  for (const tick of ticks(...x, 5, whole ? 1 : 0)) write(paint, short(tick), at.x(tick), box.bottom + 5, 1);
  write(paint, xlabel, (box.left + box.right) / 2, box.bottom + 20, 1);
  context.save();
  context.translate(11, (box.top + box.bottom) / 2);
  context.rotate(-Math.PI / 2);
  context.textBaseline = "middle";
  context.fillText(ylabel, 0, 0);
  context.restore();
  return at;
}

// Draw only inside the axes: what is above them is cut off.
function inside(paint, { left, right, top, bottom }, draw) {
  paint.context.save();
  paint.context.beginPath();
  paint.context.rect(left, top, right - left, bottom - top + 2);
  paint.context.clip();
  draw();
  paint.context.restore();
}

// Names with their colours, in rows above the axes, where they hide nothing; gives where the axes may begin.
function legend(paint, names) {
  const { context } = paint;
  let [x, y] = [52, 9];
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const [name, colour] of names) {
    const [shown] = fold(name, paint.width - 100, 1);
    const wide = textWidth(shown) + 34;
    if (x > 52 && x + wide > paint.width) [x, y] = [52, y + 15];
    context.fillStyle = colour;
    context.fillRect(x, y - 1.5, 16, 3);
    context.fillStyle = paint.text;
    context.fillText(shown, x + 21, y);
    x += wide;
  }
  return y + 14;
}

// What the picture itself does not show, in rows of its own above the axes; gives where these may begin.
function writeNote(paint, text, top) {
  if (!text) return top;
  paint.context.fillStyle = paint.text;
  paint.context.textBaseline = "top";
  paint.context.textAlign = "left";
  const lines = fold(text, paint.width - 56, 4);
  lines.forEach((line, place) => paint.context.fillText(line, 52, top - 6 + 14 * place));
  return top + 14 * lines.length;
}

// In a notebook: a widget to which the kernel sends a frame several times a second. Only the latest is drawn.
function render({ model, el }) {
  const board = new Board(el);
  el.classList.add("dlab");
  const show = (message, buffers) => board.set(unpack(message.text, buffers));
  show(model.get("first"), model.get("first").buffers); // so that its place is taken before the next frame comes
  model.on("msg:custom", show);
  return () => model.off("msg:custom", show);
}

// Once in a page: it tells the kernel that it is there, and that it has got the last frame. The first messages of a page
// that is loaded anew may be lost, so it tells it again until the kernel knows, but not so often that they pile up.
function initialize({ model }) {
  const page = Math.random().toString(36).slice(2);
  let [next, pause] = [0, 250]; // milliseconds
  model.on("msg:custom", ({ pages, last }) => {
    if (!last && (pages.includes(page) || Date.now() < next)) return;
    model.send({ page, last });
    [next, pause] = [Date.now() + pause, 2 * pause];
  });
}

// A page that needs no kernel: everything is in it.
function openPage(parent, text, buffers) {
  const bytes = buffers.map((code) => Uint8Array.from(atob(code), (letter) => letter.charCodeAt(0)));
  const board = new Board(parent);
  board.set(unpack(text, bytes));
  const pictures = [...board.pictures.values()];
  const clocked = pictures.filter((picture) => picture.view.clock === undefined); // "own": not this one; "none": no replay
  if (clocked.length) addReplay(parent, clocked);
  for (const picture of pictures) if (picture.view.clock === "own") addReplay(picture.box, [picture], picture.view.seconds?.(picture.data));
  if (window.frameElement) { // the colours of the notebook around it
    const { text, ground } = theme(parent);
    Object.assign(document.body.style, { color: text, background: ground });
    document.documentElement.style.colorScheme = getComputedStyle(window.frameElement).colorScheme;
  } else document.documentElement.style.colorScheme = "light dark";
  const still = window.frameElement?.previousElementSibling;
  if (still) still.hidden = true; // the picture for those who cannot run this
  const fit = () => { if (window.frameElement) window.frameElement.style.height = `${parent.scrollHeight + 12}px`; };
  new ResizeObserver(fit).observe(parent);
}
