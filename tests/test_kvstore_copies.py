"""Copies of weights: what a worker was lent stays as it is until it pulls again, and no more are made than needed."""

import random

import pytest
import torch

from dlab.kvstore.copies import Copies


class Memory:
    """Where each copy is: its number."""

    def __init__(self):
        self.tensors = []

    def room(self):
        self.tensors.append(torch.zeros(3))
        return self.tensors[-1], len(self.tensors) - 1


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_who_reads_is_not_disturbed(workers):
    memory, dice = Memory(), random.Random(workers)
    copies = Copies(memory.room)
    version, lent = 0, {}
    for _ in range(500):
        worker = dice.randrange(workers)
        action = dice.choice(["pull", "update", "update", "die"])
        if action == "pull":
            lent[worker] = (copies.lend(worker), version)
        elif action == "update":
            before = copies.current
            assert (before == version).all()
            version += 1
            copies.next().fill_(version)
        else:
            copies.forget(worker)
            lent.pop(worker, None)
        for where, seen in lent.values():
            assert (memory.tensors[where] == seen).all()
        assert (copies.current == version).all()
    assert len(memory.tensors) == workers + 1


def test_nothing_is_copied_if_nobody_reads():
    memory = Memory()
    copies = Copies(memory.room)
    for _ in range(3):
        assert copies.next() is memory.tensors[0]
    assert len(memory.tensors) == 1
