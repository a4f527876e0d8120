"""The panel that a run shows as the last line of a cell: live views, and controls that work while it trains.

The cell returns at once. One thread reads events, sends frames and carries out what the controls ask for; when the run
has ended it replaces the widgets by a still picture and leaves no thread behind.
"""

from __future__ import annotations

import html
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import ipywidgets as widgets
from IPython.display import DisplayHandle

from dlab.events import Event, Records
from dlab.kinds import KNOB
from dlab.views.base import View
from dlab.views.columns import Arrivals
from dlab.views.controls import RaceControls, RunControls, close_all
from dlab.views.curves import LossCurves
from dlab.views.gradients import GradientFlow
from dlab.views.messages import Messages
from dlab.views.page import PagePart, frame
from dlab.views.pipeline import PipelineChart
from dlab.views.ranks import Ranks
from dlab.views.shards import ShardView
from dlab.views.staleness import Staleness
from dlab.views.throughput import Throughput
from dlab.views.timeline import Timeline
from dlab.views.widget import ViewWidget

PERIOD = 0.1  # seconds between two frames
# the share of a core for reading and drawing, since workers may need all cores: a slow frame delays the next one …
MOST = min(0.1, 0.015 * len(os.sched_getaffinity(0)))
LONGEST = 1.0  # … by at most this many seconds
ANSWER = 2.0  # seconds within which a page answers that it still exists


class Watched(Protocol):
    """What a panel needs of a run."""

    name: str
    ranks: int
    servers: int
    states: list[Event]
    paused: bool
    delays: dict[int, float]
    pictures: list[threading.Thread]

    def since(self, place: int) -> tuple[list[Records], int]: ...
    @property
    def done(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def controls_wait(self) -> bool: ...
    def stop(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def kill(self, rank: int) -> None: ...
    def delay(self, rank: int, seconds: float) -> None: ...
    def set(self, name: str, value: Any) -> None: ...
    def value(self, name: str, default: Any) -> Any: ...


class Panel:
    """The views that suit a run's events, and the run's controls."""

    controls: type[RunControls] = RunControls

    def __init__(self, run: Watched) -> None:
        self.run: Any = run
        timeline = Timeline()
        others = (PipelineChart(), Staleness(), GradientFlow(), Messages(), ShardView())
        self.views: list[View] = [Ranks(timeline=timeline), LossCurves(), Throughput(), timeline, *others]
        self.knobs: dict[str, Any] = {}  # knobs that the run has declared, with their defaults
        self._seen = self._states = 0
        self.take_in()

    def take_in(self) -> None:
        """Give the views the new events, in columns that are made once for all views."""
        records, self._seen = self.run.since(self._seen)
        states = self.run.states[self._states :]
        self._states += len(states)
        arrived = Arrivals(states, records)
        for view in self.views:
            view.add(arrived)
        for name, default in _declared(arrived):
            self.knobs.setdefault(name, default)

    @property
    def shown(self) -> list[View]:
        """The views that have something to show or to say."""
        return [view for view in self.views if not view.empty or view.remark or view.left_out]

    @property
    def parts(self) -> list[PagePart]:
        """What the browser draws."""
        return [part for view in self.shown for part in view.parts]

    @property
    def live_parts(self) -> list[PagePart]:
        """What the browser draws during a run: views that most runs fill keep a place until their events arrive."""
        return [part for view in self.views if view.awaited or view in self.shown for part in view.parts]

    @property
    def title(self) -> str:
        """The title, as in `train: running`, with a note if the controls do not act at the moment."""
        waits = not self.run.done and self.run.controls_wait
        return f"{self.run.name}: {self.run.state}{'; its controls wait for the cell that runs' if waits else ''}"

    def bundle(self) -> dict[str, Any]:
        """Return a still picture of each view, and a replay of all of them for pages that may run scripts."""
        stills = [view.still() for view in self.shown]
        text = "\n\n".join([self.title, *(str(view) for view in self.shown)])
        if not stills:
            return {"text/plain": text}
        images = "".join(f"<div>{still.image}</div>" for still in stills)
        replay = frame(self.parts, self.title)
        return {
            "text/html": f"<div>{html.escape(self.title)}</div><div>{images}</div>{replay}",
            "image/png": stills[min(1, len(stills) - 1)].png,
            "text/plain": text,
        }


class RacePanel(Panel):
    """The losses of several runs in one chart; its controls act on the current run and on those that follow."""

    controls = RaceControls

    def __init__(self, race: Any) -> None:
        self.run, self._curves = race, LossCurves({}, by=race.by)
        self.views = [self._curves]
        self.knobs = {}
        self._read: dict[str, int] = {}
        self.take_in()

    def take_in(self) -> None:
        """Give each run's views the events that have arrived."""
        for name, run in list(self.run.runs.items()):
            records, self._read[name] = run.since(self._read.get(name, 0))
            arrived = Arrivals(records=records)
            self._curves.add(arrived, name)
            for knob, default in _declared(arrived):  # each run has its own default
                self.knobs.setdefault(knob, {}).setdefault(name, default)


def _declared(arrived: Arrivals) -> list[tuple[str, Any]]:
    """Return the declared knobs with their defaults."""
    told = [event.data for event in arrived.others if event.kind == KNOB]
    return [(data["name"], data["default"]) for data in told if "name" in data and "default" in data]


def show_live(run: Watched) -> threading.Thread | None:
    """Show a run below the cell, with controls, and keep it up to date until it ends; the cell returns at once."""
    return _show(Panel(run))


def show_race(race: Any) -> threading.Thread | None:
    """Show a race below the cell, with controls, and keep it up to date until it ends; the cell returns at once."""
    return _show(RacePanel(race))


def _show(panel: Panel) -> threading.Thread | None:
    handle = DisplayHandle()
    if panel.run.done:
        handle.display(panel.bundle(), raw=True)
        return None
    live = LivePanel(panel, handle)
    handle.display(live.box)
    thread = threading.Thread(target=live.follow, name="dlab-panel", daemon=True)
    panel.run.pictures.append(thread)
    thread.start()
    return thread


class LivePanel:
    """The widgets of a panel while its run is active, and the loop that updates them."""

    def __init__(self, panel: Panel, handle: DisplayHandle) -> None:
        self.panel, self.handle, self._run = panel, handle, panel.run
        self._wishes: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._screen = ViewWidget(panel.live_parts)
        self._title = widgets.Label(panel.title)
        self._controls = panel.controls(panel.run, self._wishes.put)
        self._sentence = widgets.Label(layout={"display": "none"}, style={"text_color": "var(--jp-error-color1, red)"})
        self._controls.buttons.children += (self._title,)  # at the end, so that nothing moves when it grows
        self.box = widgets.VBox([self._controls.buttons, self._controls.knobs, self._sentence, self._screen])

    def follow(self) -> None:
        """Update the widgets until the run has ended; then, even after an error, replace them by a still picture."""
        try:
            self.keep_up()
        finally:
            try:
                self._leave_still()
            finally:
                self.close()

    def keep_up(self, until: float = float("inf")) -> None:
        """Send frames and carry out requests until the run has ended, or until this moment of `time.monotonic`."""
        done, due, drawn = False, 0.0, time.thread_time()
        while not done and time.monotonic() < until:
            asked = self._obey(PERIOD)
            done = self._run.done  # asked before the events are read, so that the last picture is complete
            self._controls.mirror(self.panel.knobs)
            if asked or done or time.monotonic() >= due:
                self.panel.take_in()
                self._title.value = self.panel.title
                self._screen.show(self.panel.live_parts, last=done)
                spent, drawn = time.thread_time() - drawn, time.thread_time()
                due = time.monotonic() + min(LONGEST, spent / MOST) - PERIOD / 2

    def _leave_still(self) -> None:
        self._controls.disable()
        still = self.panel.bundle()
        self.handle.update(still, raw=True)
        # a page that was or will be reloaded does not know the handle, but finds the box by its name
        if "text/html" in still and not self._screen.is_at_home(ANSWER):
            self.box.children = (widgets.HTML(still["text/html"]),)

    def close(self) -> None:
        """Close all widgets except the box that holds the still picture."""
        shows_still = self._screen not in self.box.children
        close_all([self._controls.buttons, self._controls.knobs, self._sentence, self._screen])
        if not shows_still:
            self.box.children = ()
            close_all([self.box])

    def _obey(self, wait: float) -> bool:
        """Carry out the requests that have arrived; the first one ends the wait for the next frame."""
        asked = False
        while True:
            try:
                wish = self._wishes.get_nowait() if asked else self._wishes.get(timeout=wait)
            except Empty:
                return asked
            asked = True
            try:
                wish()
            except Exception as problem:  # whatever it is, the run and its panel continue
                self._say(str(problem) or type(problem).__name__)
            else:
                self._say("")

    def _say(self, sentence: str) -> None:
        self._sentence.value = sentence
        self._sentence.layout.display = None if sentence else "none"
