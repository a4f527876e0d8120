"""Messages between ranks: one small interface, and the transports that implement it."""

from dlab.transports.base import Group, SendRequest, Transport
from dlab.transports.distributed import TorchTransport
from dlab.transports.recorder import Emit, Recorder
from dlab.transports.shared import SharedTransport, connect, share_memory
from dlab.transports.store import StoreTransport
from dlab.transports.threads import Deadlock

__all__ = [
    "Deadlock",
    "Emit",
    "Group",
    "Recorder",
    "SendRequest",
    "SharedTransport",
    "StoreTransport",
    "TorchTransport",
    "Transport",
    "connect",
    "share_memory",
]
