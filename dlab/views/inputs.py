"""Controls for one value, which show it exactly and change it only when the user has moved them.

A browser may round a value and send the rounded one back, which must not count as a change. So the value stays in
Python. The browser gets a position on a scale of whole numbers, which cannot be rounded, and the value as text with
all its digits. Taught in `00_tour.ipynb`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets as widgets

Do = Callable[[Callable[[], object]], None]  # queues a request, which the panel's thread carries out
Write = Callable[[Any], object]

UNCUT = {"description_width": "initial"}  # a label is as wide as its text
_TENTHS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)  # ten steps of equal ratio from 1 to 10


class Input:
    """A widget in which code shows a value and which the user can change; it tells the two apart.

    A value of the widget that code has not shown must come from the user, and is passed to `act`.
    """

    def __init__(self, widget: Any, do: Do, act: Write) -> None:
        self.widget, self._shown = widget, widget.value
        self._do, self._act = do, act
        self._asked = self._done = 0  # requests; each counter is changed in one thread only
        widget.observe(self._on_change, "value")

    @property
    def busy(self) -> bool:
        """Whether a request has not been carried out yet."""
        return self._asked != self._done

    def show(self, value: Any) -> None:
        """Show a value that was set elsewhere, without writing it back."""
        if value != self._shown:
            self._shown = value  # before the assignment, because the widget reports its change at once
            self.widget.value = value

    def _on_change(self, change: Any) -> None:
        value = change["new"]
        if value != self._shown:
            self._shown = value
            self._asked += 1
            self._do(lambda: self._carry_out(value))

    def _carry_out(self, value: Any) -> None:
        try:
            self._act(value)
        finally:
            self._done += 1


class Scale(Protocol):
    """Maps the positions of a slider to values from `low` to `high`, and a value to the nearest position."""

    low: int
    high: int

    def value(self, position: int) -> Any: ...
    def position(self, value: Any) -> int: ...


class LinearScale:
    """Values that are evenly spaced."""

    def __init__(self, low: int, high: int, size: float = 1) -> None:
        self.low, self.high, self._size = low, high, size

    def value(self, position: int) -> Any:
        """Return the value this many steps above the lowest."""
        return position if self._size == 1 else _short(position * self._size)

    def position(self, value: Any) -> int:
        """Return the step nearest to a value."""
        return round(max(self.low, min(self.high, value / self._size)))


class LogScale:
    """Values from a hundredth to a hundred times a given value, which is itself exactly in the middle."""

    low, high = -20, 20

    def __init__(self, middle: float) -> None:
        self._middle = middle

    def value(self, position: int) -> float:
        """Return the middle times 1.25, 1.6, 2, 2.5 …"""
        tens, tenth = divmod(position, 10)
        return _short(self._middle * _TENTHS[tenth] * 10.0**tens) if position else self._middle

    def position(self, value: Any) -> int:
        """Return the step nearest to a value."""
        ratio = value / self._middle
        return round(max(self.low, min(self.high, 10 * math.log10(ratio)))) if ratio > 0 else self.low


class ValueField:
    """A text field with all digits of a value, which accepts any typed value, and a slider if there is a scale."""

    def __init__(
        self,
        name: str,
        do: Do,
        write: Write,
        read: Callable[[str], Any],
        tell: Callable[[Any], str] = repr,
        scale: Scale | None = None,
        tooltip: str = "",
    ) -> None:
        self._tell, self._scale = tell, scale
        label = {"description": name, "style": UNCUT, "tooltip": tooltip or name}
        text = widgets.Text(continuous_update=False, **(label if scale is None else {"tooltip": label["tooltip"]}))
        self._name = name if scale is None else ""
        self._text = Input(text, do, lambda typed: write(read(typed)))
        self._slider = None
        if scale is not None:
            slider = widgets.IntSlider(scale.low, scale.low, scale.high, readout=False, **label)
            slider.layout.width = f"calc({len(name)}ch + 150px)"
            self._slider = Input(slider, do, lambda position: write(scale.value(position)))
        self.widget = widgets.HBox([each.widget for each in self._inputs], layout={"align_items": "center"})

    @property
    def _inputs(self) -> list[Input]:
        return [each for each in (self._slider, self._text) if each is not None]

    def show(self, value: Any) -> None:
        """Show the current value, unless the user has just asked for another one."""
        if any(each.busy for each in self._inputs):
            return
        if self._slider is not None and self._scale is not None and is_number(value):
            self._slider.show(self._scale.position(value))
        text = self._tell(value)
        self._text.show(text)
        self._text.widget.layout.width = f"calc({min(40, max(5, len(text))) + len(self._name)}ch + 40px)"

    def disable(self, disabled: bool = True) -> None:
        """Disable or enable the field and its slider."""
        for each in self._inputs:
            each.widget.disabled = disabled


class Switch:
    """A check box for True and False."""

    def __init__(self, name: str, do: Do, write: Write) -> None:
        layout = {"width": "auto"}
        self.widget = widgets.Checkbox(False, description=name, indent=False, style=UNCUT, layout=layout)
        self._input = Input(self.widget, do, write)

    def show(self, value: Any) -> None:
        """Show the current value without writing it back."""
        if not self._input.busy:
            self._input.show(bool(value))

    def disable(self, disabled: bool = True) -> None:
        """Disable or enable the check box."""
        self.widget.disabled = disabled


def control(name: str, value: Any, do: Do, write: Write) -> ValueField | Switch:
    """Make a control that suits the type of a knob's value; it shows no value yet."""

    def refuse(typed: str, instead: str) -> ValueError:
        return ValueError(f"{typed!r} is not a value for {name}: give {instead}")

    def read_whole(typed: str) -> int:
        try:
            return int(typed)
        except ValueError:
            raise refuse(typed, "a whole number, such as 4") from None

    def read_list(typed: str) -> list[Any]:
        found = _literal(typed)
        if not isinstance(found, list | tuple):
            raise refuse(typed, "a list, such as [1, 2]")
        return list(found)

    def read_number(typed: str) -> float:
        return number(typed, lambda: refuse(typed, "a number, such as 0.05"))

    if isinstance(value, bool):
        return Switch(name, do, write)
    if isinstance(value, int):
        steps = LinearScale(min(0, 4 * value), max(10, 4 * value)) if abs(value) <= 10_000 else None
        return ValueField(name, do, write, read_whole, scale=steps)
    if isinstance(value, float):
        factors = LogScale(value) if 1e-100 < abs(value) < 1e100 else None
        return ValueField(name, do, write, read_number, scale=factors)
    if isinstance(value, str):
        return ValueField(name, do, write, str, tell=str)
    return ValueField(name, do, write, read_list if isinstance(value, list) else _literal)


def number(typed: str, problem: Callable[[], Exception]) -> float:
    """Return the typed number; raise `problem()` if it is none, or `nan` or `inf`."""
    try:
        found = float(typed)
    except ValueError:
        raise problem() from None
    if not math.isfinite(found):
        raise problem()
    return found


def _literal(typed: str) -> Any:
    """Read a number, a list, None … in Python's notation; anything else stays a text."""
    try:
        return ast.literal_eval(typed.strip())
    except (ValueError, SyntaxError):
        return typed


def is_number(value: Any) -> bool:
    """Return whether a value is a number other than True and False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> float:
    """Round away the last digits that products of round numbers have: 0.08, not 0.08000000000000002."""
    return float(f"{value:.12g}")
