"""The package is the source: a notebook shows a function of dlab instead of repeating it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Source:
    """The text of a function; coloured in a notebook."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def show_source(thing: Callable[..., Any] | type) -> Source:
    """The source of a function or class, as it is in the package: `dlab.show_source(dlab.DataPartitioner)`."""
    return Source(inspect.getsource(thing).rstrip())
