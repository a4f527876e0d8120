"""Call a learner's function once, and return its result or a sentence that says why there is none."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from dlab.exercises.own import explain_own, noticing
from dlab.exercises.sandbox import attempt

LIMIT = 10.0  # seconds for one call; a correct answer takes less than one
_DLAB = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (_DLAB, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))


class Unfinished(Exception):
    """The call produced no result. The message says why, in words that can follow "with 3 ranks,"."""


def call(function: Callable[..., Any], *arguments: Any, own: tuple[Callable[..., Any], ...], instead: str) -> Any:
    """Return `function(*arguments)`; raise `Unfinished` if it fails, does not end, or returns nothing to look at.

    The function must not call dlab's own solutions, listed in `own`; if it does, the error advises to do `instead`.
    """
    called: list[str] = []

    def work(_: Any) -> Any:
        with noticing(*own) as noticed:
            try:
                return function(*arguments)
            finally:
                called.extend(noticed)

    made = attempt(work, 1, LIMIT)
    if called:
        raise Unfinished(explain_own(called, instead))
    if made.failed:
        raise Unfinished(f"it ended in {describe_error(made.failed[0])}") from made.failed[0]
    if made.rehearsal is None:
        raise Unfinished(describe_unreturned("it", bool(made.stuck), LIMIT))
    if isinstance(made.rehearsal[0], Iterator):
        kind = type(made.rehearsal[0]).__name__
        raise Unfinished(
            f"it gave a {kind}, which has done nothing yet: use return, not yield, or put list(…) around it"
        )
    return made.rehearsal[0]


def describe_error(error: BaseException) -> str:
    """Describe an error with the innermost line that the learner wrote: `KeyError: 'w', in the line …`."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if frame.line and not frame.filename.startswith(_LIBRARIES)]
    where = f", in the line `{lines[-1]}`" if lines else ""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' * bool(said)}{said}{where}"


def describe_unreturned(who: str, stuck: bool, limit: float) -> str:
    """Describe a call that did not return: it is still running, or it ended its own thread."""
    if stuck:
        return f"{who} had not returned after {limit:g} s: look for a loop that does not end"
    return f"{who} called exit(), which ends a whole program: use return"


def shorten(thing: Any) -> str:
    """Return how Python writes a thing, in one line of at most 60 characters."""
    words = " ".join(repr(thing).split())
    return words if len(words) <= 60 else f"{words[:57]}..."
