"""Messages through a torch.distributed Store: slow, but the only way before ranks are connected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlab.memory.waits import waiting
from dlab.transports.base import TensorAndRank, Transport
from dlab.transports.checked import compare, header

_NAP = 0.01  # seconds


class StoreTransport(Transport):
    """Stores a key per message. `send` never waits; `recv` waits as long as the store does, or until `check` raises."""

    def __init__(self, store: dist.Store, rank: int, size: int, check: Callable[[], object] | None = None) -> None:
        self._store, self.rank, self.size, self._check = store, rank, size, check
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Store the header and the bytes as text, under a key with a number that both ends count."""
        if outgoing is not None:
            tensor, destination = outgoing
            content = tensor.detach().view(-1).view(torch.uint8).tolist()
            text = ",".join(map(str, (*header(tensor), *content)))
            self._store.set(f"{self.rank}-{destination}-{self._sent[destination]}", text)
            self._sent[destination] += 1
        if incoming is not None:
            tensor, source = incoming
            key = f"{source}-{self.rank}-{self._received[source]}"
            with waiting("to be connected with the others"):
                while self._check is not None and not self._store.check([key]):
                    self._check()
                    time.sleep(_NAP)
                found = self._store.get(key)
            count, dtype, *content = map(int, found.decode().split(","))
            self._received[source] += 1
            self._store.delete_key(key)
            compare((count, dtype), tensor, source, self.rank)
            tensor.view(-1).view(torch.uint8).copy_(torch.tensor(content, dtype=torch.uint8))
