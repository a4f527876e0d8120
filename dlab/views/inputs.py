"""Controls for one value, which show it as it is and change it only when a hand has moved them.

A browser may round what it is given and send that back, and that must not be taken for a wish. So the value stays in
Python. The browser gets a position on a scale of whole numbers, which nothing can round, and the value as text with all
its digits. Taught in `00_tour.ipynb`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets as widgets

Do = Callable[[Callable[[], object]], None]  # has a wish carried out, one after another, in the panel's thread
Write = Callable[[Any], object]

UNCUT = {"description_width": "initial"}  # a label takes the room that it needs
_TENTHS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)  # a tenth of the way to ten, each


class Input:
    """A widget that code shows a value in and that a hand can change; it tells the one from the other.

    Whatever the widget has and code has not shown in it, a hand has put there: `act` then gets it.
    """

    def __init__(self, widget: Any, do: Do, act: Write) -> None:
        self.widget, self._shown = widget, widget.value
        self._do, self._act = do, act
        self._asked = self._done = 0  # wishes; each is counted in one thread only
        widget.observe(self._on_change, "value")

    @property
    def busy(self) -> bool:
        """Is a wish still to be carried out?"""
        return self._asked != self._done

    def show(self, value: Any) -> None:
        """Show a value that somebody else has set; nothing is written back."""
        if value != self._shown:
            self._shown = value  # first: the widget tells of its change at once
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
    """Values for the positions of a slider, from `low` to `high`, and the position nearest to a value."""

    low: int
    high: int

    def value(self, position: int) -> Any: ...
    def position(self, value: Any) -> int: ...


class LinearScale:
    """Evenly spaced, in steps of one size."""

    def __init__(self, low: int, high: int, size: float = 1) -> None:
        self.low, self.high, self._size = low, high, size

    def value(self, position: int) -> Any:
        """The value after so many steps from the lowest."""
        return position if self._size == 1 else _short(position * self._size)

    def position(self, value: Any) -> int:
        """The step that is nearest to a value."""
        return round(max(self.low, min(self.high, value / self._size)))


class LogScale:
    """From a hundredth to a hundred times a value, which itself, to the last bit, is in the middle."""

    low, high = -20, 20

    def __init__(self, middle: float) -> None:
        self._middle = middle

    def value(self, position: int) -> float:
        """The middle times 1.25, 1.6, 2, 2.5 …"""
        tens, tenth = divmod(position, 10)
        return _short(self._middle * _TENTHS[tenth] * 10.0**tens) if position else self._middle

    def position(self, value: Any) -> int:
        """The step that is nearest to a value."""
        ratio = value / self._middle
        return round(max(self.low, min(self.high, 10 * math.log10(ratio)))) if ratio > 0 else self.low


class Field:
    """A text with all digits of a value, which takes what is typed as it is; and a slider, if there is a scale."""

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
        """What the value is now, unless a hand has just asked for another one."""
        if any(each.busy for each in self._inputs):
            return
        if self._slider is not None and self._scale is not None and is_number(value):
            self._slider.show(self._scale.position(value))
        text = self._tell(value)
        self._text.show(text)
        self._text.widget.layout.width = f"calc({min(40, max(5, len(text))) + len(self._name)}ch + 40px)"

    def disable(self, disabled: bool = True) -> None:
        """A hand can do nothing."""
        for each in self._inputs:
            each.widget.disabled = disabled


class Switch:
    """For True and False."""

    def __init__(self, name: str, do: Do, write: Write) -> None:
        layout = {"width": "auto"}
        self.widget = widgets.Checkbox(False, description=name, indent=False, style=UNCUT, layout=layout)
        self._input = Input(self.widget, do, write)

    def show(self, value: Any) -> None:
        """Show the value as it is now; nothing is written back."""
        if not self._input.busy:
            self._input.show(bool(value))

    def disable(self, disabled: bool = True) -> None:
        """A hand can do nothing."""
        self.widget.disabled = disabled


def control(name: str, value: Any, do: Do, write: Write) -> Field | Switch:
    """A control that suits a knob's value. It is shown nothing yet."""

    def refuse(typed: str, instead: str) -> ValueError:
        return ValueError(f"{typed!r} is no value for {name}: give {instead}")

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
        return Field(name, do, write, read_whole, scale=steps)
    if isinstance(value, float):
        factors = LogScale(value) if 1e-100 < abs(value) < 1e100 else None
        return Field(name, do, write, read_number, scale=factors)
    if isinstance(value, str):
        return Field(name, do, write, str, tell=str)
    return Field(name, do, write, read_list if isinstance(value, list) else _literal)


def number(typed: str, problem: Callable[[], Exception]) -> float:
    """What was typed, if it is a number and not `nan` or `inf`."""
    try:
        found = float(typed)
    except ValueError:
        raise problem() from None
    if not math.isfinite(found):
        raise problem()
    return found


def _literal(typed: str) -> Any:
    """A number, a list, None …, as Python writes it; else the text itself."""
    try:
        return ast.literal_eval(typed.strip())
    except (ValueError, SyntaxError):
        return typed


def is_number(value: Any) -> bool:
    """And neither True nor False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> float:
    """Without the last digits, which products of round numbers have: 0.08, not 0.08000000000000002."""
    return float(f"{value:.12g}")
