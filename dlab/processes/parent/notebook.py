"""The notebook of a run: the cell that started it, and the variable that holds it."""

from __future__ import annotations

import sys
from typing import Any


def find_shell() -> Any:
    """Return the shell of this Jupyter kernel; None in a script or a terminal."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return shell if hasattr(shell, "kernel") else None


class Cell:
    """The cell (or the terminal) in which a run was started, where its workers' output appears."""

    def __init__(self) -> None:
        self._shell = find_shell()
        self._parent: dict[str, Any] = {} if self._shell is None else self._shell.get_parent()
        # a front end that sends no cell ids still sends the text of a cell
        identity = self._parent.get("metadata", {}).get("cellId") or self._parent.get("content", {}).get("code")
        self._identity: str | None = identity
        self._line: Any = None  # the display that is rewritten
        self._execution: str | None = self._parent.get("header", {}).get("msg_id")

    def claim_thread(self) -> None:
        """Send what the calling thread prints to this cell."""
        if hasattr(self._shell, "set_thread_parent"):
            self._shell.set_thread_parent(self._parent)

    def rewrite(self, text: str, changed: bool) -> None:
        """Replace the line that was shown before; a terminal gets the line only if it has changed."""
        if self._shell is None:
            if changed:
                print(text, file=sys.stderr, flush=True)
        elif self._line is None:
            from IPython.display import DisplayHandle

            self._line = DisplayHandle()
            self._line.display({"text/plain": text}, raw=True)
        else:
            self._line.update({"text/plain": text}, raw=True)

    def is_run_again_by(self, later: Cell) -> bool:
        """Return whether `later` is the same cell, executed once more."""
        return self._identity is not None and self._identity == later._identity and self._execution != later._execution


def variable_of(thing: object) -> str | None:
    """Return the variable that holds a thing in the notebook, as in `run = …`, or that of its output, as in `_12`."""
    shell = find_shell()
    names = [] if shell is None else [name for name, value in list(shell.user_ns.items()) if value is thing]
    lasting = [name for name in names if name.strip("_")]  # `_` will soon be another output
    return min(lasting, key=lambda name: name.startswith("_"), default=None)
