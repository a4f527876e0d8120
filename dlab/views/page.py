"""Data for a browser: numbers packed as bytes, and pages that contain their scripts and data."""

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
    """Return the base script and those of the named views, each in its own block; without names, of all views."""
    chosen = names or sorted(file.stem for file in BROWSER.glob("*.js") if file.stem != "base")
    texts = {name: (BROWSER / f"{name}.js").read_text(encoding="utf-8") for name in ("base", *chosen)}
    return "\n".join([texts.pop("base"), *(f"{{\n{text}}}" for text in texts.values())])


@cache
def styles() -> str:
    """Return the stylesheet of all views."""
    return (BROWSER / "style.css").read_text(encoding="utf-8")


def pack(parts: Sequence[PagePart]) -> tuple[str, list[bytes]]:
    """Return the parts as JSON, with every numpy array replaced by the index and type of a buffer.

    Numbers that are not finite become null, because a browser's JSON has neither NaN nor Infinity.
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
    except ValueError:  # rare, so frames are not searched for it
        buffers.clear()
        return json.dumps(_finite(told), default=place, allow_nan=False), buffers


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float | np.floating) and not np.isfinite(value) else value


def in_script(value: Any) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the script or begin a comment.

    json escapes everything beyond ASCII, including the two line separators that JavaScript has and JSON has not.
    """
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value))


def frame(parts: Sequence[PagePart], title: str) -> str:
    """Return the page in a frame for a notebook's output. It hides the still picture before it."""
    page = html.escape(write_page(parts, title))
    style = "width: 100%; height: 340px; border: 0"  # the page itself corrects the height
    return f'<iframe title="{html.escape(title)}" srcdoc="{page}" style="{style}"></iframe>'


def write_page(parts: Sequence[PagePart], title: str) -> str:
    """Return a whole HTML page that shows the parts and replays them."""
    text, buffers = pack(parts)
    coded = in_script([base64.b64encode(buffer).decode() for buffer in buffers])
    used = scripts(*sorted({part.name for part in parts}))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>body {{ margin: 4px }}\n{styles()}</style></head><body>"
        f'<div id="dlab" class="dlab"></div><script type="module">\n{used}\n'
        f'openPage(document.getElementById("dlab"), {in_script(text)}, {coded});\n</script></body></html>'
    )
