"""The base of all views: events in; a figure, a text, words for those who cannot see, and a page for a browser out."""

from __future__ import annotations

import base64
import html
import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from matplotlib.transforms import IdentityTransform

from dlab.events import Event
from dlab.views.columns import Arrivals
from dlab.views.page import PagePart, frame, write_page

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
    """A picture of events. A subclass takes them in (`add`), draws (`figure`), tells (`text`), describes (`sentence`).

    For a browser it gives what is to be drawn (`data`); the script of the same name in `browser/` draws it. Events that
    cannot be drawn are left out, and the picture says how many and why.
    """

    script = ""  # the name of the script; a view without one is a still picture everywhere
    title = ""
    awaited = False  # is its place kept in a live panel until its first events come?
    reads: tuple[str, ...] = ()  # kinds of events, and names of what is logged

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.left_out = Counter[str]()  # events, by the reason
        self.add(events)

    @abstractmethod
    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Take in more events, in any number and at any time."""

    def take(self, events: Iterable[Event] | Arrivals) -> Arrivals:
        """What can be used of them; the others are counted."""
        arrived = Arrivals.of(events)
        for (what, why), count in arrived.left_out.items():
            if not what or what in self.reads:
                self.left_out[why] += count
        return arrived

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Was there nothing among the events that this view could show?"""

    @abstractmethod
    def figure(self) -> Figure:
        """The picture as it is now, with labels and units on every axis."""

    @abstractmethod
    def sentence(self) -> str:
        """One sentence that says what the picture shows."""

    @abstractmethod
    def text(self) -> str:
        """The same as the picture, for a terminal."""

    @property
    def remark(self) -> str:
        """What is to be said above the picture, if anything."""
        return ""

    @property
    def missing(self) -> str:
        """`3 events left out: their loss is no number`, or nothing."""
        return "; ".join(
            f"{count} event{'s' * (count > 1)} left out: {why if count > 1 else why.replace('their', 'its', 1)}"
            for why, count in self.left_out.items()
        )

    @property
    def alt(self) -> str:
        """What the picture shows, and what it leaves out."""
        return f"{self.sentence()} {self.missing}." if self.missing else self.sentence()

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.text(), self.missing]))

    def data(self) -> dict[str, Any]:
        """What the browser's script draws: numbers, strings, lists, and numpy arrays for what is long."""
        raise NotImplementedError(f"{type(self).__name__} is a still picture")

    @property
    def parts(self) -> list[PagePart]:
        """The pictures of a page: this one."""
        title = ": ".join(filter(None, [self.title, self.remark, self.missing]))
        return [PagePart(self.script, title, self.alt, self.data())]

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
        for each in figure.findobj(Text):
            each.set_parse_math(False)  # a name with dollars in it is no formula
        FigureCanvasAgg(figure).print_png(file)
        png = base64.b64encode(file.getvalue()).decode()
        missing = f"<div>{html.escape(self.missing)}</div>" if self.missing else ""
        return Still(f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{png}">{missing}', png)

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
