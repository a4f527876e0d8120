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
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import IdentityTransform

from dlab.events import Event
from dlab.views.columns import Arrivals
from dlab.views.page import Part, frame, write_page

# Okabe and Ito's colours, told apart by colour-blind readers too; but grey and olive in the places of black and yellow,
# which cannot be seen on every ground. A rank has the colour of its number in all views, the browser's too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#B8A800")
_CORNER = 9  # pixels by which the card of a still is rounded
_named: dict[str, int] = {}  # the place in COLOURS that a name has got in the first picture that showed it


def places_of(names: Iterable[str]) -> list[int]:
    """The places in COLOURS of runs that are compared. A name keeps its colour in later pictures of this process."""
    found: list[int] = []
    for name in names:
        known = _named.get(name)
        if known is None or known in found:  # never two of the same in one picture, while there are others
            free = [place for place in range(len(COLOURS)) if place not in found]
            unused = [place for place in free if place not in _named.values()]
            known = (unused or free or [len(found) % len(COLOURS)])[0]
            _named.setdefault(name, known)
        found.append(known)
    return found


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
    awaited = False  # is its place kept in a live panel until its first events come?

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
        file, figure = io.BytesIO(), self.figure()
        _lay_on_card(figure)
        FigureCanvasAgg(figure).print_png(file)
        png = base64.b64encode(file.getvalue()).decode()
        return Still(f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{png}">', png)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return str(self)


def _lay_on_card(figure: Figure) -> None:
    """White with round corners: a still does not know its page, and dark ink must never lie on a dark ground."""
    (width, height), corner = figure.bbox.size, _CORNER
    figure.patch.set_visible(False)
    style = f"round,pad={corner},rounding_size={corner}"
    inner = ((corner, corner), width - 2 * corner, height - 2 * corner)
    card = FancyBboxPatch(*inner, style, transform=IdentityTransform(), color="white", linewidth=0, zorder=-10)
    card.set_in_layout(False)
    figure.add_artist(card)
    if isinstance(layout := figure.get_layout_engine(), ConstrainedLayoutEngine):
        layout.set(w_pad=0.1, h_pad=0.08)
