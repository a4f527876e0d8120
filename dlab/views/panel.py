"""What a run shows as the last line of a cell: its views while they change, and controls that work while it trains.

The cell returns at once. One thread takes in events, sends frames, and carries out what the controls ask for; when the
run has ended it leaves a still picture in the place of the widgets, and no thread and no widget.
"""

from __future__ import annotations

import html
import math
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import ipywidgets as widgets
from IPython.display import DisplayHandle

from dlab.events import Event, Records
from dlab.views.columns import Arrivals
from dlab.views.curves import LossCurves
from dlab.views.gradients import GradientFlow
from dlab.views.messages import Messages
from dlab.views.page import Part, frame
from dlab.views.ranks import Ranks
from dlab.views.screen import Screen
from dlab.views.shards import ShardTable
from dlab.views.staleness import Staleness
from dlab.views.still import View
from dlab.views.throughput import Throughput
from dlab.views.timeline import Timeline

PERIOD = 0.1  # seconds between two frames
# of a core for taking in and drawing, which workers on all cores would miss: what took long delays the next frame …
MOST = min(0.1, 0.015 * len(os.sched_getaffinity(0)))
LONGEST = 1.0  # … by not more than so many seconds
ANSWER = 2.0  # seconds in which a page says that it is still there

Do = Callable[[Callable[[], object]], None]  # what carries out a wish
Controls = Callable[[Any, Do], list[widgets.Widget]]


class Watched(Protocol):
    """What a panel needs of a run."""

    name: str
    ranks: int
    servers: int
    states: list[Event]
    pictures: list[threading.Thread]

    def since(self, place: int) -> tuple[list[Records], int]: ...
    @property
    def done(self) -> bool: ...
    @property
    def state(self) -> str: ...
    def stop(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def kill(self, rank: int) -> None: ...
    def delay(self, rank: int, seconds: float) -> None: ...
    def set(self, name: str, value: Any) -> None: ...


class Panel:
    """The views that fit a run's events, and what one can do to it."""

    def __init__(self, run: Watched) -> None:
        self.run: Any = run
        timeline = Timeline()
        others = (Staleness(), GradientFlow(), Messages(), ShardTable())
        self.views: list[View] = [Ranks(timeline=timeline), LossCurves(), Throughput(), timeline, *others]
        self.knobs: dict[str, Any] = {}  # that the run has declared, with their defaults
        self._seen = self._states = 0
        self.take_in()

    def take_in(self) -> None:
        """Give the views what is new, in columns that are made once for all of them."""
        records, self._seen = self.run.since(self._seen)
        states = self.run.states[self._states :]
        self._states += len(states)
        arrived = Arrivals(states, records)
        for view in self.views:
            view.add(arrived)
        self._learn_knobs(arrived)

    def _learn_knobs(self, arrived: Arrivals) -> None:
        self.knobs.update(
            {event.data["name"]: event.data["default"] for event in arrived.others if event.kind == "knob"}
        )

    @property
    def shown(self) -> list[View]:
        """Views that have something to show."""
        return [view for view in self.views if not view.empty]

    @property
    def parts(self) -> list[Part]:
        """What the browser draws."""
        return [part for view in self.shown for part in view.parts]

    @property
    def live_parts(self) -> list[Part]:
        """The same while it goes on: views that nearly every run fills keep their place until their events come."""
        return [part for view in self.views if view.awaited or not view.empty for part in view.parts]

    @property
    def title(self) -> str:
        """`train: running`."""
        return f"{self.run.name}: {self.run.state}"

    def bundle(self) -> dict[str, Any]:
        """The still: a picture of each view, and where scripts may run, the replay of all of them in their place."""
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
    """The losses of several runs on one chart."""

    def __init__(self, race: Any) -> None:
        self.run, self._curves = race, LossCurves({}, by=race.by)
        self.views = [self._curves]
        self.knobs = {}
        self._read: dict[str, int] = {}
        self.take_in()

    def take_in(self) -> None:
        """By run."""
        for name, run in list(self.run.runs.items()):
            records, self._read[name] = run.since(self._read.get(name, 0))
            arrived = Arrivals(records=records)
            self._curves.add(arrived, name)
            self._learn_knobs(arrived)


def show_live(run: Watched) -> threading.Thread | None:
    """Show a run below the cell, with controls, and keep it up to date until it ends; the cell returns at once."""
    return _show(Panel(run), controls)


def show_race(race: Any) -> threading.Thread | None:
    """The same for a race; its controls are for the run that goes on and those to come."""
    return _show(RacePanel(race), race_controls)


def _show(panel: Panel, make_controls: Controls) -> threading.Thread | None:
    handle = DisplayHandle()
    if panel.run.done:
        handle.display(panel.bundle(), raw=True)
        return None
    live = Live(panel, handle, make_controls)
    handle.display(live.box)
    thread = threading.Thread(target=live.follow, name="dlab-panel", daemon=True)
    panel.run.pictures.append(thread)
    thread.start()
    return thread


def controls(run: Watched, do: Do) -> list[widgets.Widget]:
    """Pause, stop, and for one rank at a time: delay and kill. `do` gets what is to be done."""
    pause = widgets.ToggleButton(description="pause", tooltip="freeze every rank, and go on", layout={"width": "90px"})
    whom, delay = delays(run, do, run.servers)

    def kill() -> None:
        rank = whom.value
        do(lambda: run.kill(rank))

    pause.observe(lambda change: do(run.pause if change["new"] else run.resume), "value")
    stop = _button("stop", "end the run on every rank", lambda: do(run.stop))
    return [pause, stop, whom, delay, _button("kill", "kill this rank's process, as a crash would", kill)]


def race_controls(race: Any, do: Do) -> list[widgets.Widget]:
    """Stop, and delay of one rank at a time."""
    return [_button("stop", "end the race", lambda: do(race.stop)), *delays(race, do)]


def delays(run: Any, do: Do, servers: int = 0) -> tuple[widgets.Dropdown, widgets.FloatSlider]:
    """A rank to choose, and how long it sleeps in each step."""
    ranks = [(f"rank {rank}", rank) for rank in range(run.ranks)]
    ranks += [(f"server {server}", run.ranks + server) for server in range(servers)]
    whom = widgets.Dropdown(options=ranks, layout={"width": "90px"})
    delay = widgets.FloatSlider(description="delay (s)", max=1.0, step=0.05, layout={"width": "300px"})
    chosen: dict[int, float] = {}

    def set_delay(change: Any) -> None:
        rank, seconds = whom.value, change["new"]
        if chosen.get(rank, 0.0) != seconds:  # else the slider has only moved because another rank was chosen
            chosen[rank] = seconds
            do(lambda: run.delay(rank, seconds))

    def choose(change: Any) -> None:
        delay.value = chosen.get(change["new"], 0.0)
        delay.disabled = change["new"] >= run.ranks  # a server has no steps

    delay.observe(set_delay, "value")
    whom.observe(choose, "value")
    return whom, delay


def _button(name: str, tooltip: str, press: Callable[[], object]) -> widgets.Widget:
    button = widgets.Button(description=name, tooltip=tooltip, layout={"width": "90px"})
    button.on_click(lambda _: press())
    return button


class Live:
    """A panel while its run goes on: widgets, and the loop that serves them."""

    def __init__(self, panel: Panel, handle: DisplayHandle, make_controls: Controls) -> None:
        self.panel, self.handle, self._run = panel, handle, panel.run
        self._wishes: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._screen = Screen(panel.live_parts)
        self._title = widgets.Label(panel.title)
        row = {"flex_flow": "row wrap", "align_items": "center"}
        self._knobs = widgets.HBox(layout=row)
        self._known: set[str] = set()
        self._buttons = widgets.HBox(make_controls(panel.run, self._wishes.put), layout=row)
        self.box = widgets.VBox([self._title, self._buttons, self._knobs, self._screen])

    def _add_knobs(self) -> None:
        """A control for each knob that the run has declared since."""
        for name in self.panel.knobs.keys() - self._known:
            self._known.add(name)
            control = knob_control(name, self.panel.knobs[name])
            control.observe(lambda change, name=name: self._turn(name, change["new"]), "value")
            self._knobs.children = (*self._knobs.children, control)

    def _turn(self, name: str, value: Any) -> None:
        self._wishes.put(lambda: self._run.set(name, value))

    def follow(self) -> None:
        """Until the run has ended; whatever happens, the widgets go and a still stays."""
        try:
            self.keep_up()
        finally:
            try:
                self._leave_still()
            finally:
                self.close()

    def keep_up(self, until: float = float("inf")) -> None:
        """Send frames and carry out wishes until the run has ended, or until this moment of `time.monotonic`."""
        done, due, drawn = False, 0.0, time.thread_time()
        while not done and time.monotonic() < until:
            asked = self._obey(PERIOD)
            done = self._run.done  # asked before the events are taken in: the last picture must be complete
            if asked or done or time.monotonic() >= due:
                self.panel.take_in()
                self._add_knobs()
                self._title.value = self.panel.title
                self._screen.show(self.panel.live_parts, last=done)
                spent, drawn = time.thread_time() - drawn, time.thread_time()
                due = time.monotonic() + min(LONGEST, spent / MOST) - PERIOD / 2

    def _leave_still(self) -> None:
        still = self.panel.bundle()
        self.handle.update(still, raw=True)
        # a page that was loaded anew, or that will be, does not know the handle; it finds the box by its name
        if "text/html" in still and not self._screen.is_at_home(ANSWER):
            self.box.children = (widgets.HTML(still["text/html"]),)

    def close(self) -> None:
        """The widgets go, but for a box that has the still in it."""
        for widget in (self._title, self._buttons, self._knobs, self._screen):
            _close(widget)
        if self._title in self.box.children:
            self.box.children = ()
            _close(self.box)

    def _obey(self, wait: float) -> bool:
        """Do what was asked for, if anything was; the first wish ends the wait for the next frame."""
        asked = False
        while True:
            try:
                wish = self._wishes.get_nowait() if asked else self._wishes.get(timeout=wait)
            except Empty:
                return asked
            asked = True
            wish()


def knob_control(name: str, value: Any) -> widgets.Widget:
    """A control that suits a knob's value."""
    wide = {"width": "300px"}
    if isinstance(value, bool):
        return widgets.Checkbox(value, description=name)
    if isinstance(value, int):
        return widgets.IntSlider(value, min=0, max=max(10, 4 * value), description=name, layout=wide)
    if isinstance(value, float) and value > 0:
        power = round(math.log10(value))
        return widgets.FloatLogSlider(value, min=power - 2, max=power + 2, description=name, layout=wide)
    if isinstance(value, float):
        return widgets.FloatText(value, description=name)
    return widgets.Text(str(value), description=name, continuous_update=False)


def _close(widget: widgets.Widget) -> None:
    """With all its parts: a widget that nobody closes is kept for ever."""
    for child in getattr(widget, "children", ()):
        _close(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, widgets.Widget):
            part.close()
    widget.close()
