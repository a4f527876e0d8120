"""Controls for the arguments of a function, and below them what it returns: drawn anew when a control is moved.

What is drawn is an ordinary output, so that a stored notebook keeps it and shows it where no kernel runs. Taught in
`07_operator_parallel.ipynb`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

_ROW = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "0 12px", "overflow": "visible"}
Show = Callable[..., Any]


def explore(show: Show, buttons: Mapping[str, Show] | None = None, **options: Sequence[Any]) -> Explorer:
    """Show `show(**chosen)` below a control for each argument, and again whenever the reader moves one.

    An argument has a list of values, and begins with the first one: a slider for numbers, a drop-down list for others.
    `show` returns a text, a table, a picture, or a list of these; an error that it raises is shown in its place. A
    button calls its function with the chosen values. Above the rest stands its name while that takes, and then what it
    returns.

    >>> explore(lambda n, power: f"{n} ** {power} = {n**power}", n=[2, 3, 5], power=[1, 2, 3])
    """
    return Explorer(show, buttons or {}, options)


class Explorer:
    """The controls and what they show. Reading `text` gives the latter as text; `choose(n=3)` moves a control."""

    def __init__(self, show: Show, buttons: Mapping[str, Show], options: Mapping[str, Sequence[Any]]) -> None:
        for name, values in options.items():
            if not len(values):
                raise ValueError(f"{name} has no values to choose from: give a list with at least one")
        self._show, self._extra = show, list[Any]()
        self._handle, self._displayed = DisplayHandle(), False
        self._busy = threading.RLock()  # JupyterLab may answer two movements in two threads
        self._controls = {name: _control(name, values) for name, values in options.items()}
        self._buttons = [self._button(name, act) for name, act in buttons.items()]
        for control in self._controls.values():
            control.observe(self._moved, "value")
        self._content = self._call(show)

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the controls."""
        return {name: control.value for name, control in self._controls.items()}

    @property
    def text(self) -> str:
        """What is shown, as text."""
        return "\n".join(_written(each) for each in self._shown)

    def choose(self, **values: Any) -> None:
        """Move controls, as a hand does."""
        for name, value in values.items():
            self._controls[name].value = value

    def press(self, name: str) -> None:
        """Press a button, as a hand does."""
        next(button for button in self._buttons if button.description == name).click()

    @property
    def _shown(self) -> list[Any]:
        """What the controls say, what a button has shown, and the rest; a refusal by both is there only once."""
        said = [each for each in self._content if isinstance(each, str)]
        extra = [each for each in self._extra if not (isinstance(each, str) and each in said)]
        return [self._caption, *extra, *self._content]

    @property
    def _caption(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in self.chosen.items())

    def _button(self, name: str, act: Show) -> widgets.Button:
        button = widgets.Button(description=name, layout={"width": "auto"})

        def press(_: Any) -> None:
            with self._busy:
                button.disabled, self._extra = True, [f"{name} …"]
                self._update()
                try:
                    self._extra = self._call(act)
                finally:
                    button.disabled = False
                self._update()

        button.on_click(press)
        return button

    def _moved(self, _: Any) -> None:
        with self._busy:
            self._content, self._extra = self._call(self._show), []
            self._update()

    def _call(self, function: Show) -> list[Any]:
        try:
            found = function(**self.chosen)
        except Exception as problem:  # a choice that is not possible is a part of the lesson
            return [str(problem) or type(problem).__name__]
        return list(found) if type(found) in (list, tuple) else [found]

    def _bundle(self) -> dict[str, str]:
        inside = "".join(f"<div>{_html(each)}</div>" for each in self._shown)
        return {"text/html": f"<div>{inside}</div>", "text/plain": self.text}

    def _update(self) -> None:
        if self._displayed:
            self._handle.update(self._bundle(), raw=True)

    def _ipython_display_(self) -> None:
        # A program that executes a notebook cannot move a control, and would store one that nothing stands behind.
        if _has_reader():
            display(widgets.HBox([*self._controls.values(), *self._buttons], layout=_ROW))
        self._handle.display(self._bundle(), raw=True)
        self._displayed = True


def _has_reader() -> bool:
    """Return whether a person may answer: the page that runs this cell lets it ask for input, a program does not."""
    shell: Any = get_ipython()
    kernel = getattr(shell, "kernel", None)
    parent = kernel.get_parent("shell") if kernel is not None else None
    return bool(parent and parent.get("content", {}).get("allow_stdin"))


def _control(name: str, values: Sequence[Any]) -> Any:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    kind = widgets.SelectionSlider if numbers and len(values) > 1 else widgets.Dropdown
    style = {"description_width": "initial"}  # a label is as wide as its text
    return kind(options=list(values), value=values[0], description=name.replace("_", " "), style=style)


def _html(thing: Any) -> str:
    make = getattr(thing, "_repr_html_", None)
    return make() if make else f"<pre style='font-family:monospace'>{escape(_written(thing))}</pre>"


def _written(thing: Any) -> str:
    return thing if isinstance(thing, str) else repr(thing)
