"""Show the source of a function in a notebook, instead of repeating it there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Source:
    """The source text of a function; a notebook shows it with syntax colours."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def show_source(thing: Callable[..., Any] | type) -> Source:
    """Return the source of a function or class of the package: `dlab.show_source(dlab.DataPartitioner)`."""
    return Source(inspect.getsource(thing).rstrip())
