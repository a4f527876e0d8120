"""The widget that shows views while they change: the kernel sends frames, the browser draws the latest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from dlab.views.page import PagePart, pack, scripts, styles


class Screen(anywidget.AnyWidget):
    """`show(parts)` sends one binary message to every page that has it; a page that opens later waits for the next.

    What it is made with is in the widget itself: a page has it at once, and the panel its height from the start.
    """

    _esm = f"{scripts()}\nexport default {{ initialize, render }};"
    _css = styles()
    first = traitlets.Dict().tag(sync=True)

    def __init__(self, parts: Sequence[PagePart] = ()) -> None:
        text, buffers = pack(parts)
        super().__init__(first={"text": text, "buffers": buffers})
        self._pages: list[str] = []  # that have told their name, in this order
        self._seen = threading.Event()  # the first of them has got the last frame
        self.on_msg(self._on_message)

    def show(self, parts: Sequence[PagePart], last: bool = False) -> None:
        """Replace what is on the screen; nothing comes after the last one."""
        text, buffers = pack(parts)
        self.send({"text": text, "pages": self._pages, "last": last}, buffers)

    def is_at_home(self, seconds: float) -> bool:
        """After the last frame: is it in the page where it was at first, and in no other one?

        A page answers to the last frame; so many seconds are waited for that. Where there was no page, none.
        """
        return not self._pages or (len(self._pages) == 1 and self._seen.wait(seconds))

    def _on_message(self, _: Any, content: dict[str, Any], __: Any) -> None:
        page = content["page"]
        if page not in self._pages:
            self._pages = [*self._pages, page]
        if content["last"] and page == self._pages[0]:
            self._seen.set()
