"""What goes to a browser: numbers packed as bytes, and pages that carry their scripts and data with them."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BROWSER = Path(__file__).with_name("browser")


class Part(NamedTuple):
    """One picture of a page or panel: the script that draws it, its title, alt text and data."""

    name: str
    title: str
    alt: str
    data: dict[str, Any]


@cache
def scripts(*names: str) -> str:
    """The base, and the scripts of these views, each in a block of its own; without names, of all."""
    chosen = names or sorted(file.stem for file in BROWSER.glob("*.js") if file.stem != "base")
    texts = {name: (BROWSER / f"{name}.js").read_text(encoding="utf-8") for name in ("base", *chosen)}
    return "\n".join([texts.pop("base"), *(f"{{\n{text}}}" for text in texts.values())])


@cache
def styles() -> str:
    """The stylesheet."""
    return (BROWSER / "style.css").read_text(encoding="utf-8")


def pack(parts: Sequence[Part]) -> tuple[str, list[bytes]]:
    """As JSON, with every numpy array replaced by the number and type of a buffer."""
    buffers: list[bytes] = []

    def place(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            buffers.append(value.tobytes())
            return {"buffer": len(buffers) - 1, "type": str(value.dtype)}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a view cannot send a {type(value).__name__} to the browser")

    return json.dumps([part._asdict() for part in parts], default=place), buffers


def frame(parts: Sequence[Part], title: str) -> str:
    """The page inside another one, such as a notebook's output. It hides the element before it, which is the still."""
    page = html.escape(write_page(parts, title))
    style = "width: 100%; height: 340px; border: 0"  # the page itself corrects the height
    return f'<iframe title="{html.escape(title)}" srcdoc="{page}" style="{style}"></iframe>'


def write_page(parts: Sequence[Part], title: str) -> str:
    """A whole HTML page that shows the parts and replays them."""
    text, buffers = pack(parts)
    coded = json.dumps([base64.b64encode(buffer).decode() for buffer in buffers])
    used = scripts(*sorted({part.name for part in parts}))
    data = json.dumps(text).replace("</", "<\\/")  # nothing in it may end the script
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>body {{ margin: 4px }}\n{styles()}</style></head><body>"
        f'<div id="dlab" class="dlab"></div><script type="module">\n{used}\n'
        f'openPage(document.getElementById("dlab"), {data}, {coded});\n</script></body></html>'
    )
