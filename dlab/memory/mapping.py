"""Memory that several processes map: an anonymous file, which is freed with the last process that holds it."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os

LINE = 64  # bytes of a cache line, which numbers with different writers must not share
PAGE = 4096


def new_file(name: str, nbytes: int) -> int:
    """Make a file of so many zeros in memory; pages that were never touched cost nothing."""
    file = os.memfd_create(name)
    os.truncate(file, nbytes)
    return file


def map_file(file: int, nbytes: int) -> memoryview:
    """Map a file, whose bytes all processes that map it share; it may be closed afterwards."""
    return memoryview(mmap.mmap(file, nbytes))


def give_back(address: int, nbytes: int) -> None:
    """Tell the system that pages of a mapped file on disk are not needed now; they can be read from the file again."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    first = address // PAGE * PAGE
    if advice is not None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), advice)


def host() -> str:
    """Return a name that is the same exactly for processes that can see each other's ids in /proc."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        here = f"{file.read()} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(here.encode()).hexdigest()


def lines(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def pages(nbytes: int) -> int:
    """Round up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE
