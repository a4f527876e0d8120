"""The memory fence: a process that sees what another wrote after its fence also sees what it wrote before it.

Every structure of this package publishes in the same way: write the content, `fence()`, then write the number that
says that it is complete. A reader reads the number, calls `fence()`, then reads the content. On x86-64 the fence does
nothing, because the processor keeps the order of its stores, and that of its loads. Others, such as ARM, keep neither.
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
# Among its commands, this one is a full fence for the calling process, even if it has only one thread.
_QUERY, _GLOBAL_EXPEDITED = 0, 2


def do_nothing() -> None:
    """Do nothing: the fence for a processor that keeps the order by itself."""


def from_libatomic(library: str = "libatomic.so.1") -> Fence | None:
    """Return `atomic_thread_fence`, a call of which costs about 0.2 us; None if the library is not installed."""
    try:
        call = ctypes.PyDLL(library).atomic_thread_fence
    except (OSError, AttributeError):
        return None
    call.argtypes, call.restype = (ctypes.c_int,), None
    return partial(call, _SEQUENTIALLY_CONSISTENT)


def from_membarrier(machine: str) -> Fence | None:
    """Return the system call membarrier (about 1 us); None if Linux is older than 4.16 or a container forbids it."""
    if machine not in _MEMBARRIER:
        return None
    call = ctypes.PyDLL(None).syscall
    call.argtypes, call.restype = (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int), ctypes.c_long
    commands = call(_MEMBARRIER[machine], _QUERY, 0, 0)
    if commands < 0 or not commands & _GLOBAL_EXPEDITED:
        return None
    return partial(call, _MEMBARRIER[machine], _GLOBAL_EXPEDITED, 0, 0)


def choose(machine: str) -> Fence | None:
    """Return the cheapest fence that such a machine needs and has; None if it needs one and has none."""
    return do_nothing if machine in _ORDERED else from_libatomic() or from_membarrier(machine)


_chosen = choose(platform.machine())
fence: Fence = _chosen or do_nothing
WEAK = fence is not do_nothing  # the hottest paths check this first, to save the 20 ns of a call that does nothing


def has_fence() -> bool:
    """Return whether this machine's processes can use the structures of this package; if not, print so once."""
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
