"""The base of all views: events in; a figure, a text, words for those who cannot see, and a page for a browser out."""

from __future__ import annotations

import base64
import html
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dlab.events import Event
from dlab.views.columns import Arrivals
from dlab.views.page import Part, frame, write_page

# Okabe and Ito's colours: told apart by colour-blind readers too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


class Still(NamedTuple):
    """A picture as HTML, with its alt text, and the same as base64 of a PNG."""

    image: str
    png: str


class View(ABC):
    """A picture of events. A subclass takes them in (`add`), draws (`figure`), tells (`__str__`) and describes (`alt`).

    For a browser it gives what is to be drawn (`data`); the script of the same name in `browser/` draws it.
    """

    script = ""  # the name of the script; a view without one is a still picture everywhere
    title = ""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.add(events)

    @abstractmethod
    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Take in more events, in any number and at any time."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Was there nothing among the events that this view could show?"""

    @abstractmethod
    def figure(self) -> Figure:
        """The picture as it is now, with labels and units on every axis."""

    @property
    @abstractmethod
    def alt(self) -> str:
        """One sentence that says what the picture shows."""

    def data(self) -> dict[str, Any]:
        """What the browser's script draws: numbers, strings, lists, and numpy arrays for what is long."""
        raise NotImplementedError(f"{type(self).__name__} is a still picture")

    @property
    def parts(self) -> list[Part]:
        """The pictures of a page: this one."""
        return [Part(self.script, self.title, self.alt, self.data())]

    def save_html(self, path: str | Path) -> None:
        """Write one self-contained page that replays what is shown, for a lecture or a web page; no server needed."""
        Path(path).write_text(write_page(self.parts, self.title), encoding="utf-8")

    def bundle(self) -> dict[str, Any]:
        """What a notebook stores: the still with alt text, and, where scripts may run, the replay in its place."""
        still = self.still()
        replay = frame(self.parts, self.title) if self.script and not self.empty else ""
        return {"text/html": f"<div>{still.image}</div>{replay}", "image/png": still.png, "text/plain": str(self)}

    def still(self) -> Still:
        """The picture as it is now, for a page without scripts."""
        file = io.BytesIO()
        FigureCanvasAgg(self.figure()).print_png(file)
        png = base64.b64encode(file.getvalue()).decode()
        return Still(f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{png}">', png)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return str(self)
