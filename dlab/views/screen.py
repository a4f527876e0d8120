"""The widget that shows views while they change: the kernel sends frames, the browser draws the latest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anywidget

from dlab.views.page import Part, pack, scripts, styles


class Screen(anywidget.AnyWidget):
    """`show(parts)` sends one binary message; a page that opens later asks for what is `latest`."""

    _esm = f"{scripts()}\nexport default {{ render }};"
    _css = styles()

    def __init__(self, latest: Callable[[], Sequence[Part]]) -> None:
        super().__init__()
        self._latest = latest
        self.opened = 0  # how often a page has shown it
        self.on_msg(self._on_message)

    def show(self, parts: Sequence[Part]) -> None:
        """Replace what is on the screen."""
        text, buffers = pack(parts)
        self.send({"text": text}, buffers)

    def _on_message(self, _: Any, content: dict[str, Any], __: Any) -> None:
        if content.get("kind") == "ready":
            self.opened += 1
            self.show(self._latest())
