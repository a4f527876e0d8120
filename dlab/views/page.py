"""What goes to a browser: numbers packed as bytes, and pages that carry their scripts and data with them."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BROWSER = Path(__file__).with_name("browser")


class PagePart(NamedTuple):
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
    """The stylesheet of all views."""
    return (BROWSER / "style.css").read_text(encoding="utf-8")


def pack(parts: Sequence[PagePart]) -> tuple[str, list[bytes]]:
    """As JSON, with every numpy array replaced by the number and type of a buffer.

    What is not finite becomes null: in JSON, as a browser reads it, there is no NaN and no Infinity.
    """
    buffers: list[bytes] = []

    def place(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            buffers.append(value.tobytes())
            return {"buffer": len(buffers) - 1, "type": str(value.dtype)}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a view cannot send a {type(value).__name__} to the browser")

    told = [part._asdict() for part in parts]
    try:
        return json.dumps(told, default=place, allow_nan=False), buffers
    except ValueError:  # seldom: it is not looked for in every frame
        buffers.clear()
        return json.dumps(_finite(told), default=place, allow_nan=False), buffers


def _finite(value: Any) -> Any:
    """The same without numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float | np.floating) and not np.isfinite(value) else value


def in_script(value: Any) -> str:
    """JSON that can stand in a script of a page: nothing in it can end the script or begin a comment.

    Letters beyond ASCII, and with them the ends of lines that JavaScript has and JSON has not, json itself escapes.
    """
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value))


def frame(parts: Sequence[PagePart], title: str) -> str:
    """The page inside another one, such as a notebook's output. It hides the element before it, which is the still."""
    page = html.escape(write_page(parts, title))
    style = "width: 100%; height: 340px; border: 0"  # the page itself corrects the height
    return f'<iframe title="{html.escape(title)}" srcdoc="{page}" style="{style}"></iframe>'


def write_page(parts: Sequence[PagePart], title: str) -> str:
    """A whole HTML page that shows the parts and replays them."""
    text, buffers = pack(parts)
    coded = in_script([base64.b64encode(buffer).decode() for buffer in buffers])
    used = scripts(*sorted({part.name for part in parts}))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>body {{ margin: 4px }}\n{styles()}</style></head><body>"
        f'<div id="dlab" class="dlab"></div><script type="module">\n{used}\n'
        f'openPage(document.getElementById("dlab"), {in_script(text)}, {coded});\n</script></body></html>'
    )
