"""Send objects between the parent and a worker: small ones through a socket, large tensors through shared memory.

A message is pickled once, with cloudpickle, so that functions and classes written in a notebook cell can be sent too.
The memory of large tensors and arrays is left out of the pickle and copied once into an anonymous shared-memory file,
whose handle goes through the socket. The receiver maps it, without a second copy; nothing is left on disk.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import sys
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from dlab.processes.between.errors import is_readers

INLINE = 32 << 10  # longer messages go through shared memory, so that a socket write never blocks
ALIGNMENT = 64
_HEADER = struct.Struct("<BIQ")  # tag, number, size of the shared region (0: the pickle follows)


def _storage_of(memory: Any) -> torch.UntypedStorage:
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _typed_storage_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _new_type_of(storage: torch.UntypedStorage, *rest: Any) -> torch.Tensor:
    return torch._utils._rebuild_tensor_v3(_typed_storage_of(storage, torch.uint8), *rest)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that passes a tensor's memory on without a copy, instead of writing it into the pickle.

    Storages are pickled rather than tensors, so that two views of one buffer arrive as two views of one buffer.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return _typed_storage_of, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.Tensor):
            rebuild, arguments, *state = obj.__reduce_ex__(5)
            if rebuild is torch._utils._rebuild_tensor_v3:  # torch cannot unpickle its newer types: float8, uint16
                rebuild = _new_type_of
            return rebuild, arguments, *state
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            if not obj.nbytes():
                return torch.UntypedStorage, (0,)
            memory: Any = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
            return _storage_of, (pickle.PickleBuffer(memory),)
        if isinstance(obj, type | FunctionType | ModuleType):
            _send_by_value_what_is_only_here(obj)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            # such as torch.ops, which cloudpickle sends along with any function that names both `torch` and an `ops`
            return import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _send_by_value_what_is_only_here(obj: type | FunctionType | ModuleType) -> None:
    """Let cloudpickle send the content of a module, and not only its name, if a worker could not import it.

    Such a module was loaded from a file off the import path, was made by hand, or is the main script of a process that
    multiprocessing has spawned.
    """
    name = str(obj.__name__ if isinstance(obj, ModuleType) else obj.__module__)
    top = name.partition(".")[0]  # if this can be found, so can its submodules
    module = sys.modules.get(top) or sys.modules.get(name)
    if not isinstance(module, ModuleType) or module.__name__ == "__main__" or module.__name__ not in sys.modules:
        return
    if not _can_be_found(top, getattr(module.__spec__, "origin", None)):
        cloudpickle.register_pickle_by_value(module)


def _can_be_found(name: str, file: str | None) -> bool:
    if file is not None and not is_readers(file):
        return True  # a library can always be found
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    found = next((spec for spec in specs if spec is not None), None)
    if found is None or found.origin is None or file is None:
        return found is not None
    return os.path.realpath(found.origin) == os.path.realpath(file)


class Message:
    """A tagged, numbered message, packed once and sent to as many workers as needed."""

    def __init__(self, tag: int, number: int, value: Any) -> None:
        buffers: list[memoryview] = []

        def set_aside(buffer: pickle.PickleBuffer) -> bool:
            memory = buffer.raw()
            if memory.nbytes < INLINE:
                return True  # stays in the pickle
            buffers.append(memory)
            return False

        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=set_aside).dump(value)
        body = file.getbuffer()
        self._file: int | None = None
        if not buffers and len(body) <= INLINE:
            self._packet = _HEADER.pack(tag, number, 0) + body
            return
        parts = [body, *buffers]
        table = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(len(part) for part in parts))
        offsets, size = _layout([len(part) for part in parts], len(table))
        self._file = os.memfd_create("dlab-message")
        for part, offset in zip([table, *parts], [0, *offsets], strict=True):
            _write(self._file, part, offset)
        self._packet = _HEADER.pack(tag, number, size)

    def send(self, channel: socket.socket) -> None:
        """Send to one receiver."""
        if self._file is None:
            channel.sendall(self._packet)
        else:
            socket.send_fds(channel, [self._packet], [self._file])

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Received:
    """A message that has arrived; `load()` unpickles it, so that an error in that is raised to its caller."""

    def __init__(self, tag: int, number: int, body: bytes, file: int | None, size: int) -> None:
        self.tag, self.number = tag, number
        self._body, self._file, self._size = body, file, size

    def load(self, private: bool) -> Any:
        """Return the object that was sent; large tensors in it are views of the mapped region, and may be written to.

        With `private`, pages are copied when written, so that other receivers of the message do not see the changes.
        """
        if self._file is None:
            return pickle.loads(self._body)
        # Python's own mmap would hold the file open, and a kept result would cost a file handle
        mapped: Any = torch.from_file(
            f"/proc/self/fd/{self._file}", shared=not private, size=self._size, dtype=torch.uint8
        ).numpy()
        region = memoryview(mapped)
        self.close()
        (count,) = struct.unpack_from("<Q", region)
        lengths = struct.unpack_from(f"<{count}Q", region, 8)
        offsets, _ = _layout(list(lengths), 8 * (count + 1))
        body, *buffers = (region[offset : offset + size] for offset, size in zip(offsets, lengths, strict=True))
        return pickle.loads(body, buffers=buffers)

    def close(self) -> None:
        """Release the shared region without reading it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def receive(channel: socket.socket) -> Received | None:
    """Return the next message, or None when the other end is closed."""
    try:
        packet, files, _, _ = socket.recv_fds(channel, _HEADER.size + INLINE, 1)
    except ConnectionResetError:
        return None
    if not packet:
        return None
    tag, number, size = _HEADER.unpack_from(packet)
    return Received(tag, number, packet[_HEADER.size :], files[0] if files else None, size)


def _write(file: int, part: Any, offset: int) -> None:
    """Write a part to a file, which is twice as fast as copying into a fresh mapping with a fault on every page."""
    view = memoryview(part)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _layout(lengths: list[int], start: int) -> tuple[list[int], int]:
    """Return where parts of these lengths begin when each is aligned, and where the last one ends."""
    offsets, position = [], start
    for length in lengths:
        position = -(-position // ALIGNMENT) * ALIGNMENT
        offsets.append(position)
        position += length
    return offsets, position
