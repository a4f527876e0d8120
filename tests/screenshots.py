"""The pictures of the README: `make screenshots` takes them anew, in a real JupyterLab, into `notebooks/images/`."""

from __future__ import annotations

import io
import re
import tempfile
import time
from pathlib import Path

from browser import NOTEBOOKS, Chromium, Server, open_browser
from kernels import eventually
from PIL import Image
from playwright.sync_api import Locator

IMAGES = NOTEBOOKS / "images"
SCALE = 1.5  # pixels of a picture for one of the page: text stays sharp
FRAMES = 60  # of the animation
TRAINING = (
    """
import torch.distributed as dist
import dlab
from dlab.demo import train

cluster = dlab.cluster(4)


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dlab.world_size()
""".strip(),
    "run = cluster.start(train, average_gradients, steps=10_000)\nrun",
)


def main() -> None:
    """Take all of them, and say how large they are."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            with open_browser(server) as chromium:
                take_tour(chromium)
                take_panel(server, chromium)
                take_messages(chromium)
        finally:
            server.close()
    for image in sorted(IMAGES.iterdir()):
        print(f"{image.relative_to(NOTEBOOKS.parent)}: {image.stat().st_size / 1000:.0f} kB, {Image.open(image).size}")


def take_tour(chromium: Chromium) -> None:
    """The window of JupyterLab with the tour, while its four workers train."""
    with chromium.notebook("00_tour.ipynb", height=900, scale=SCALE) as tour:
        tour.page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
        panel = tour.output(tour.run_until("cluster.start(train, average_gradients"))
        wait_for_step(panel, 100)
        tour.page.mouse.move(0, 0)
        save(tour.page.screenshot(), "tour.png")
        panel.locator("iframe").wait_for()


def take_panel(server: Server, chromium: Chromium) -> None:
    """The panel while rank 2 is made slow: the others wait for it."""
    name = server.write("training.ipynb", *TRAINING)
    with chromium.notebook(name, height=1500, scale=SCALE) as notebook:
        notebook.page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
        notebook.run_cell(0)
        notebook.run_cell(1)
        panel = notebook.output(1)
        wait_for_step(panel, 60)
        notebook.choose(panel, "rank 2")
        notebook.drag(panel, "delay (s)", 0.2)
        notebook.page.mouse.move(0, 0)
        time.sleep(3)
        save(panel.locator(".jp-OutputArea-output").first.screenshot(), "panel.png")
        notebook.ask("run.stop()")


def take_messages(chromium: Chromium) -> None:
    """The ring of the second lesson, message by message: a picture, and the whole way round."""
    with chromium.notebook("02_allreduce.ipynb", scale=SCALE) as lesson:
        lesson.page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
        output = lesson.output(lesson.run_until("ring = record(ring_allreduce)"))
        output.locator("iframe").wait_for()
        page = output.frame_locator("iframe")
        picture = page.locator("figure[data-view=messages]")
        picture.and_(page.locator("[data-drawn]")).wait_for()
        position = page.get_by_role("slider", name="position")
        save(shoot(picture, position, 0.4), "messages.png")
        shares = [number / FRAMES for number in range(FRAMES + 1)]
        animate([shoot(picture.locator("canvas"), position, share) for share in shares], "replay.gif")


def wait_for_step(panel: Locator, step: int) -> None:
    """Wait until the workers of a panel are so far."""
    ranks = panel.locator("figure[data-view=ranks] canvas")
    steps = re.compile(r"step (\d+)")
    eventually(lambda: min(map(int, steps.findall(ranks.get_attribute("aria-label") or "")), default=0) >= step, 120)


def shoot(picture: Locator, position: Locator, share: float) -> bytes:
    """The picture at this share of its replay."""
    box = picture.locator("xpath=ancestor-or-self::figure")
    drawn = int(box.get_attribute("data-drawn") or 0)
    position.evaluate("(input, share) => { input.value = share * input.max; input.oninput(); }", share)
    eventually(lambda: int(box.get_attribute("data-drawn") or 0) > drawn)
    return picture.screenshot()


def save(screenshot: bytes, name: str) -> None:
    """As a PNG with a palette; an octree keeps the colours of thin lines, too."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


def animate(screenshots: list[bytes], name: str, seconds: float = 9.0) -> None:
    """As a GIF that goes round and round and rests at the end."""
    frames = []
    for screenshot in screenshots:
        image = Image.open(io.BytesIO(screenshot)).convert("RGB")
        image = image.crop((0, 0, image.width, image.height - 4))  # without the edge of the buttons below
        frames.append(image.resize((720, round(720 * image.height / image.width)), Image.Resampling.LANCZOS))
    palette = frames[-len(frames) // 3].quantize(64, Image.Quantize.FASTOCTREE)  # a late one: it has all the colours
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(1000 * seconds / len(frames))] * len(others) + [2000]
    first.save(IMAGES / name, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    main()
