"""What is said to a call of torch that dlab cannot cut: its name, what is wrong with it, and what to write instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def name_of(func: Any) -> str:
    """Return the name of a function of torch, or of the attribute that it reads."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def not_known(func: Any, known: Sequence[str]) -> NotImplementedError:
    """Return the error for a function without a rule, with those of the known ones that have a similar name."""
    name = name_of(func)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or ["matmul", "linear", "relu", "reshape"]
    return NotImplementedError(
        f"dlab does not know how to cut {name!r}: let the network return the tensor and call it on the whole result, "
        f"or write it with functions that dlab can cut, such as {', '.join(near)} (dlab.ops.functions() has all)"
    )


def check_arguments(func: Any, rule: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise an error that says which arguments a function is cut with, if these are others."""
    takes = inspect.signature(rule)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as problem:
        names = ", ".join(str(each.replace(annotation=each.empty)) for each in takes.parameters.values())
        name = name_of(func)
        raise TypeError(f"dlab cuts {name!r} as {name}({names}), which this call does not fit: {problem}") from None
