"""Roles of processes of a cluster besides workers; packages register them, and `processes` knows none by name.

A role is pickled by reference with the seat of each process: unpickling it there imports the package that defines it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class SharedFile(Protocol):
    """Memory that the processes of a role share with the workers."""

    file: int

    def clear(self) -> None:
        """Set all bytes to zero; call it only while no function runs."""

    def map(self) -> memoryview:
        """Map the memory into this process."""

    def end(self) -> None:
        """Let the processes of this role return, since no worker is left."""


@dataclass(frozen=True)
class Role:
    """What the processes of a role do.

    `share(workers, others, file)` allocates the memory of the role, or maps that of a file. `play(function, args,
    kwargs)` runs in its processes while workers call the function. `module` is the file in which they wait for
    requests, in a function `serve`, and answer them, in `_answer`.
    """

    share: Callable[[int, int, int | None], SharedFile]
    play: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    module: str


_roles: dict[str, Role] = {}
_offers: dict[str, Callable[[], object]] = {}


def register(name: str, role: Role) -> None:
    """Register a role; the package that defines it calls this when it is imported."""
    _roles[name] = role


def offer(name: str, load: Callable[[], object]) -> None:
    """Register a function that imports the package that defines a role, when it is needed; called by `dlab` itself."""
    _offers[name] = load


def find(name: str) -> Role:
    """Return the role of this name, after importing its package if necessary."""
    if name not in _roles and name in _offers:
        _offers[name]()
    if name not in _roles:
        raise LookupError(f"there is no role {name!r}: import the package that defines it first")
    return _roles[name]


def modules() -> set[str]:
    """Return the files in which the processes of all roles wait for requests."""
    return {role.module for role in _roles.values()}
