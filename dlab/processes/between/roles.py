"""What a process of a cluster can be besides a worker: packages register such roles; `processes` knows none by name.

A role travels with the seat of each process, by reference: to unpickle it there is to import the package that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class SharedFile(Protocol):
    """Memory that the processes of a role share with the workers."""

    file: int

    def clear(self) -> None:
        """All zeros again; while no function runs."""

    def map(self) -> memoryview:
        """As this process sees it."""

    def end(self) -> None:
        """Let the processes of this role return: there is no worker left."""


@dataclass(frozen=True)
class Role:
    """`share(workers, others, file)` makes the memory of the role, or maps that of a file; `play(function, args,
    kwargs)` is what its processes do while workers call the function. `module` is the file in which they look for
    something to do, in its function `serve`, and do it, in `_answer`.
    """

    share: Callable[[int, int, int | None], SharedFile]
    play: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    module: str


_roles: dict[str, Role] = {}
_offers: dict[str, Callable[[], object]] = {}


def register(name: str, role: Role) -> None:
    """For the package that has a role, when it is imported."""
    _roles[name] = role


def offer(name: str, load: Callable[[], object]) -> None:
    """For `dlab` itself, which joins everything: `load` imports the package that has this role, when it is needed."""
    _offers[name] = load


def find(name: str) -> Role:
    """The role of this name."""
    if name not in _roles and name in _offers:
        _offers[name]()
    if name not in _roles:
        raise LookupError(f"nobody has registered the role {name!r}: import the package that has it first")
    return _roles[name]


def modules() -> set[str]:
    """The files in which the processes of all roles look for something to do."""
    return {role.module for role in _roles.values()}
