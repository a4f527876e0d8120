"""The base of all views. It turns events into a figure, a text, a description for screen readers and a web page."""

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

# Okabe and Ito's colours, which colour-blind readers can tell apart, with grey and olive instead of black and yellow,
# which are invisible on some backgrounds. A rank has the colour of its number in all views, also in the browser.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#B8A800")
_CORNER = 9  # pixels by which the corners of a still picture are rounded
_named: dict[str, int] = {}  # index in COLOURS of each name, fixed by the first picture that showed it


def places_of(names: Iterable[str]) -> list[int]:
    """Return the colours of compared runs as indices into COLOURS. A name keeps its colour in this process."""
    found: list[int] = []
    for name in names:
        known = _named.get(name)
        if known is None or known in found:  # no colour twice in one picture, while there are others
            free = [place for place in range(len(COLOURS)) if place not in found]
            unused = [place for place in free if place not in _named.values()]
            known = (unused or free or [len(found) % len(COLOURS)])[0]
            _named.setdefault(name, known)
        found.append(known)
    return found


class StillPicture(NamedTuple):
    """A picture as HTML with its alt text, and the same picture as base64 of a PNG."""

    image: str
    png: str


class View(ABC):
    """A picture of events. A subclass reads them (`add`), draws (`figure`), prints (`text`), describes (`sentence`).

    `data` returns what the browser draws, with the script of the same name in `browser/`. Events that cannot be drawn
    are left out, and the picture says how many and why.
    """

    script = ""  # the name of the script; a view without one is a still picture everywhere
    title = ""
    awaited = False  # does a live panel reserve its place until its first events arrive?
    reads: tuple[str, ...] = ()  # kinds of events, and names of logged values

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.left_out = Counter[str]()  # number of events by reason
        self.add(events)

    @abstractmethod
    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events; may be called at any time with any number of them."""

    def take(self, events: Iterable[Event] | Arrivals) -> Arrivals:
        """Return the events that can be used, and count the others."""
        arrived = Arrivals.of(events)
        for (what, why), count in arrived.left_out.items():
            if not what or what in self.reads:
                self.left_out[why] += count
        return arrived

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether the events contain nothing that this view can show."""

    @abstractmethod
    def figure(self) -> Figure:
        """Draw the current picture, with labels and units on every axis."""

    @abstractmethod
    def sentence(self) -> str:
        """Describe the picture in one sentence."""

    @abstractmethod
    def text(self) -> str:
        """Return the content of the picture as text for a terminal."""

    @property
    def remark(self) -> str:
        """A sentence that stands above the picture; may be empty."""
        return ""

    @property
    def missing(self) -> str:
        """Say how many events were left out and why: `3 events left out: their loss is not a number`; may be empty."""
        return "; ".join(
            f"{count} event{'s' * (count > 1)} left out: {why if count > 1 else why.replace('their', 'its', 1)}"
            for why, count in self.left_out.items()
        )

    @property
    def alt(self) -> str:
        """The alt text: what the picture shows, and which events it leaves out."""
        return f"{self.sentence()} {self.missing}." if self.missing else self.sentence()

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.text(), self.missing]))

    def data(self) -> dict[str, Any]:
        """Return what the browser's script draws: numbers, strings, lists, and numpy arrays for long columns."""
        raise NotImplementedError(f"{type(self).__name__} is a still picture")

    @property
    def parts(self) -> list[PagePart]:
        """The pictures of a page; a single view has one."""
        title = ": ".join(filter(None, [self.title, self.remark, self.missing]))
        return [PagePart(self.script, title, self.alt, self.data())]

    def save_html(self, path: str | Path) -> None:
        """Write one self-contained page that replays the view, for a lecture or a web site; it needs no server."""
        Path(path).write_text(write_page(self.parts, self.title), encoding="utf-8")

    def bundle(self) -> dict[str, Any]:
        """Return what a notebook stores: a still picture with alt text, and a replay for pages that may run scripts."""
        still = self.still()
        replay = frame(self.parts, self.title) if self.script and not self.empty else ""
        return {"text/html": f"<div>{still.image}</div>{replay}", "image/png": still.png, "text/plain": str(self)}

    def still(self) -> StillPicture:
        """Draw the current picture for a page without scripts."""
        file, figure = io.BytesIO(), self.figure()
        _lay_on_card(figure)
        for each in figure.findobj(Text):
            each.set_parse_math(False)  # dollar signs in a name do not make a formula
        FigureCanvasAgg(figure).print_png(file)
        png = base64.b64encode(file.getvalue()).decode()
        missing = f"<div>{html.escape(self.missing)}</div>" if self.missing else ""
        return StillPicture(f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{png}">{missing}', png)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return str(self)


def _lay_on_card(figure: Figure) -> None:
    """Put the picture on a white card with round corners, so that dark ink never lies on the dark page of a theme."""
    (width, height), corner = figure.bbox.size, _CORNER
    figure.patch.set_visible(False)
    style = f"round,pad={corner},rounding_size={corner}"
    inner = ((corner, corner), width - 2 * corner, height - 2 * corner)
    card = FancyBboxPatch(*inner, style, transform=IdentityTransform(), color="white", linewidth=0, zorder=-10)
    card.set_in_layout(False)
    figure.add_artist(card)
    if isinstance(layout := figure.get_layout_engine(), ConstrainedLayoutEngine):
        layout.set(w_pad=0.1, h_pad=0.08)
