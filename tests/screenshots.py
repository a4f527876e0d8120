"""The picture of the README: `make screenshots` takes it again, in a real JupyterLab, into `notebooks/images/`."""

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
    """Take it, and say how large it is."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            with open_browser(server) as chromium:
                take_panel(server, chromium)
        finally:
            server.close()
    for image in sorted(IMAGES.iterdir()):
        print(f"{image.relative_to(NOTEBOOKS.parent)}: {image.stat().st_size / 1000:.0f} kB, {Image.open(image).size}")


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


def wait_for_step(panel: Locator, step: int) -> None:
    """Wait until the workers of a panel are so far."""
    ranks = panel.locator("figure[data-view=ranks] canvas")
    steps = re.compile(r"step (\d+)")
    eventually(lambda: min(map(int, steps.findall(ranks.get_attribute("aria-label") or "")), default=0) >= step, 120)


def save(screenshot: bytes, name: str) -> None:
    """As a PNG with a palette; an octree keeps the colours of thin lines, too."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main()
