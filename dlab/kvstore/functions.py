"""Find the functions that a server may run: those that the parent has sent, identified by name and digest."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any


def digest_of(function: Callable[..., Any]) -> str:
    """Return a digest of a function's code, which is the same for copies of it in other processes."""
    return _digest(function.__code__)


def _digest(code: types.CodeType) -> str:
    constants = [_digest(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    content = repr((code.co_code, constants, code.co_names, code.co_varnames))
    return hashlib.sha256(content.encode()).hexdigest()


def find_function(name: str, digest: str, given: list[Any]) -> Callable[..., object]:
    """Find a function among those that the parent has sent: arguments, or functions that these refer to."""
    for function in _reachable(given):
        if function.__name__ == name and digest_of(function) == digest:
            return function
    raise LookupError(
        f"the server knows no function {name!r}: it runs only what the notebook has sent. Define {name!r} where the "
        "workers' function can name it, without variables of that function, or pass it as an argument to cluster.run"
    )


def _reachable(given: list[Any]) -> Iterator[types.FunctionType]:
    """Yield the functions among these values, and those that they refer to by name or closure, or define inside."""
    seen: set[int] = set()
    waiting = list(given)
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        names = {name for code in _codes(value.__code__) for name in code.co_names}
        waiting += [value.__globals__[name] for name in names if name in value.__globals__]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        for code in _codes(value.__code__):
            if code is not value.__code__ and not code.co_freevars:
                waiting.append(types.FunctionType(code, value.__globals__, code.co_name))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)
