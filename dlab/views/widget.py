"""The widget that shows views while they change: the kernel sends frames, the browser draws the latest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from dlab.views.page import PagePart, pack, scripts, styles


class ViewWidget(anywidget.AnyWidget):
    """`show(parts)` sends one binary message to every open page; a page that opens later waits for the next message.

    The initial parts are stored in the widget itself, so that a page has them at once and the panel does not change
    height.
    """

    _esm = f"{scripts()}\nexport default {{ initialize, render }};"
    _css = styles()
    first = traitlets.Dict().tag(sync=True)

    def __init__(self, parts: Sequence[PagePart] = ()) -> None:
        text, buffers = pack(parts)
        super().__init__(first={"text": text, "buffers": buffers})
        self._pages: list[str] = []  # names of the pages that have reported, in order
        self._seen = threading.Event()  # set when the first page has received the last frame
        self.on_msg(self._on_message)

    def show(self, parts: Sequence[PagePart], last: bool = False) -> None:
        """Replace what is shown; no frame may follow the last one."""
        text, buffers = pack(parts)
        self.send({"text": text, "pages": self._pages, "last": last}, buffers)

    def is_at_home(self, seconds: float) -> bool:
        """Return, after the last frame, whether the widget is still in its first page and in no other.

        Waits up to this many seconds for a page to answer; it returns at once if there never was a page.
        """
        return not self._pages or (len(self._pages) == 1 and self._seen.wait(seconds))

    def _on_message(self, _: Any, content: dict[str, Any], __: Any) -> None:
        page = content["page"]
        if page not in self._pages:
            self._pages = [*self._pages, page]
        if content["last"] and page == self._pages[0]:
            self._seen.set()
