"""Messages between ranks: one small protocol, and what carries it."""

from dlab.transports.base import Group, Transport
from dlab.transports.recorder import Recorder
from dlab.transports.threads import Deadlock

__all__ = ["Deadlock", "Group", "Recorder", "Transport"]
