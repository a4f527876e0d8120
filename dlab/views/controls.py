"""The controls of a run, shown beside its views: pause, stop, delay, kill, and sliders for knobs.

The controls follow the run, whoever changed it: they are refreshed ten times a second. The panel's thread carries out
what the user asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as widgets

from dlab.views.inputs import Do, LinearScale, LogScale, Switch, ValueField, control, is_number, number

_ROW = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "0 12px", "overflow": "visible"}
_OVER = {"returned", "stopped", "failed", "dead"}  # states of a rank that no longer runs
LONGEST_DELAY = 1.0  # seconds on the slider; the text field accepts any number


class RunControls:
    """Buttons to pause and stop the run, to delay or kill one rank at a time, and a control for each knob."""

    def __init__(self, run: Any, do: Do) -> None:
        self.run, self._do = run, do
        self._pause = self._button("pause", "freeze every rank, or let all go on", self._pause_or_resume)
        self._stop = self._button("stop", "end it on every rank", lambda _: run.stop())
        names = [f"rank {rank}" for rank in range(run.ranks)] + [f"server {each}" for each in range(run.servers)]
        self._rank = 0  # the chosen rank; changed by a request, so that earlier requests keep the earlier rank
        self._whom = widgets.Dropdown(options=list(zip(names, range(len(names)), strict=True)))
        self._whom.layout.width = "100px"
        self._whom.observe(lambda change: do(lambda: self._choose(change["new"])), "value")
        self._delay = ValueField(
            "delay (s)",
            do,
            lambda seconds: run.delay(self._rank, seconds),
            lambda typed: number(typed, lambda: ValueError(f"{typed!r} is not a delay: give seconds, such as 0.1")),
            scale=LinearScale(0, 20, LONGEST_DELAY / 20),
            tooltip="so long this rank sleeps in each step",
        )
        self._knobs: dict[str, ValueField | Switch] = {}
        self.knobs = widgets.HBox(layout=_ROW)
        self.buttons = widgets.HBox(self._make_buttons(), layout=_ROW)
        self.mirror({})

    def _make_buttons(self) -> list[widgets.Widget]:
        kill = self._button("kill", "kill this rank's process, as a crash would", lambda _: self._kill(self._rank))
        return [self._pause, self._stop, self._whom, self._delay.widget, kill]

    def mirror(self, knobs: dict[str, Any]) -> None:
        """Show the current values; `knobs` are those that the run has declared, with their defaults."""
        self._pause.description = "resume" if self.run.paused else "pause"
        self._delay.show(self.run.delays.get(self._rank, 0.0))
        self._delay.disable(self._rank >= self.run.ranks)  # a server has no steps to delay
        for name, declared in knobs.items():
            if name not in self._knobs:
                self._knobs[name] = self._make_knob(name, declared)
            self._show_knob(name, declared)
        if len(self.knobs.children) < len(self._knobs):
            self.knobs.children = [knob.widget for knob in self._knobs.values()]

    def disable(self) -> None:
        """Disable all controls, since the run has ended."""
        for each in (self._delay, *self._knobs.values()):
            each.disable()
        for widget in self.buttons.children:
            if isinstance(widget, widgets.Button | widgets.Dropdown):
                widget.disabled = True

    # --- knobs

    def _make_knob(self, name: str, default: Any) -> ValueField | Switch:
        return control(name, default, self._do, lambda value: self.run.set(name, value))

    def _show_knob(self, name: str, default: Any) -> None:
        self._knobs[name].show(self.run.value(name, default))

    # --- buttons

    def _button(self, name: str, tooltip: str, press: Callable[[str], object]) -> widgets.Button:
        """Make a button; `press` gets its label. It cannot be pressed again until `press` has returned."""
        button = widgets.Button(description=name, tooltip=tooltip, layout={"width": "80px"})

        def carry_out(pressed: str) -> None:
            try:
                press(pressed)
            finally:
                button.disabled = False

        def on_click(_: widgets.Button) -> None:
            pressed, button.disabled = button.description, True
            self._do(lambda: carry_out(pressed))

        button.on_click(on_click)
        return button

    def _pause_or_resume(self, pressed: str) -> None:
        (self.run.resume if pressed == "resume" else self.run.pause)()

    def _choose(self, rank: int) -> None:
        self._rank = rank

    def _kill(self, rank: int) -> None:
        last = next((event.data for event in reversed(self.run.states) if event.rank == rank), {"state": "running"})
        if last["state"] in _OVER:
            raise ValueError(f"{last.get('name', f'rank {rank}')} is no longer running: there is nothing to kill")
        self.run.kill(rank)


class RaceControls(RunControls):
    """Controls of a race: pause, stop and delay for all runs; a slider multiplies each run's own value of a knob."""

    def __init__(self, race: Any, do: Do) -> None:
        self._values: dict[str, widgets.Label] = {}
        super().__init__(race, do)

    def _make_buttons(self) -> list[widgets.Widget]:
        return [self._pause, self._stop, self._whom, self._delay.widget]

    def _make_knob(self, name: str, defaults: dict[str, Any]) -> ValueField | Switch:
        """Make a control for a knob; `defaults` are its values by run."""
        if not any(is_number(value) for value in defaults.values()):
            first = next(iter(defaults.values()))
            return control(name, first, self._do, lambda value: self.run.set(name, value, to=list(defaults)))

        def read(typed: str) -> float:
            problem = ValueError(f"{typed!r} is not a factor for {name}: give a number above 0, such as ×2")
            factor = number(re.sub(r"^\s*[×x*]", "", typed), lambda: problem)
            if factor <= 0:
                raise problem
            return factor

        made = ValueField(
            name,
            self._do,
            lambda factor: self.run.scale(name, factor, to=list(defaults)),
            read,
            lambda factor: f"×{factor:.12g}",
            LogScale(1.0),
            tooltip="multiplies what each run has",
        )
        self._values[name] = widgets.Label()
        made.widget.children = (*made.widget.children, self._values[name])
        return made

    def _show_knob(self, name: str, defaults: dict[str, Any]) -> None:
        """Show the factor of the runs that are active."""
        now = {run: on.value(name, defaults[run]) for run, on in self.run.going.items() if run in defaults}
        if name in self._values:
            self._knobs[name].show(self.run.factors.get(name, 1.0))
            self._values[name].value = ", ".join(f"{run} {value!r}" for run, value in now.items())
        elif now:
            self._knobs[name].show(next(iter(now.values())))


def close_all(closing: Iterable[widgets.Widget]) -> None:
    """Close widgets and everything inside them, because ipywidgets keeps a widget until it is closed."""
    for widget in closing:
        close_all(getattr(widget, "children", ()))
        for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
            if isinstance(part, widgets.Widget):
                part.close()
        widget.close()
