"""The fence: whoever sees what a process wrote after it also sees what that process wrote before it.

Every structure of this package publishes the same way: write the content, `fence()`, then write the number that says
that it is there. Who reads looks at the number, `fence()`, then reads the content. On x86-64 the fence does nothing,
because the processor keeps the order of its stores, and that of its loads. Others, such as ARM, keep neither.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache, partial

Fence = Callable[[], object]

_ORDERED = ("x86_64", "AMD64")
_SEQUENTIALLY_CONSISTENT = 5  # memory_order_seq_cst of C
_MEMBARRIER = {"aarch64": 283, "riscv64": 283, "x86_64": 324}  # the number of the system call
# Of its commands: this one is a full fence for the process that calls it, also if it has one thread only.
_QUERY, _GLOBAL_EXPEDITED = 0, 2


def do_nothing() -> None:
    """The fence of a processor that keeps the order by itself."""


def from_libatomic(library: str = "libatomic.so.1") -> Fence | None:
    """`atomic_thread_fence`; None where the library is not installed. A call costs about 0.2 us."""
    try:
        call = ctypes.PyDLL(library).atomic_thread_fence
    except (OSError, AttributeError):
        return None
    call.argtypes, call.restype = (ctypes.c_int,), None
    return partial(call, _SEQUENTIALLY_CONSISTENT)


def from_membarrier(machine: str) -> Fence | None:
    """The system call membarrier; None where Linux is older than 4.16, or a container forbids it. About 1 us."""
    if machine not in _MEMBARRIER:
        return None
    call = ctypes.PyDLL(None).syscall
    call.argtypes, call.restype = (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int), ctypes.c_long
    commands = call(_MEMBARRIER[machine], _QUERY, 0, 0)
    if commands < 0 or not commands & _GLOBAL_EXPEDITED:
        return None
    return partial(call, _MEMBARRIER[machine], _GLOBAL_EXPEDITED, 0, 0)


def choose(machine: str) -> Fence | None:
    """The cheapest fence that a machine of this name needs and has; None if it needs one and there is none."""
    return do_nothing if machine in _ORDERED else from_libatomic() or from_membarrier(machine)


_chosen = choose(platform.machine())
fence: Fence = _chosen or do_nothing
WEAK = fence is not do_nothing  # the hottest paths look here first, and save the 20 ns of a call that does nothing


def has_fence() -> bool:
    """May processes of this machine rely on the structures of this package? If not, it says so, once."""
    if _chosen is None:
        _say_that_there_is_none()
    return _chosen is not None


@cache
def _say_that_there_is_none() -> None:
    print(
        f"dlab: this machine ({platform.machine()}) has neither libatomic nor the system call membarrier, so its ranks "
        "share no memory: they send through torch.distributed, which is slower. To change that, install libatomic1",
        file=sys.stderr,
    )
