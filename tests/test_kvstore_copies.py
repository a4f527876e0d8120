"""Copies of weights: what a worker was lent stays as it is until it pulls again, and no more are made than needed."""

import random

import pytest
import torch

from dlab.kvstore.copies import Copies


def copies_of(readers):
    return Copies(readers, [0] * (1 + readers), lambda number: torch.zeros(3))


def update(copies, version):
    number = copies.next()
    copies[number].fill_(version)
    copies.turn_to(number)
    return number


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_who_reads_is_not_disturbed(readers):
    copies, dice = copies_of(readers), random.Random(readers)
    version, lent, used = 0, {}, {0}
    for _ in range(500):
        reader = dice.randrange(readers)
        action = dice.choice(["pull", "update", "update", "die"])
        if action == "pull":
            lent[reader] = (copies.lend(reader), version)
        elif action == "update":
            version += 1
            used.add(update(copies, version))
        else:
            copies.forget(reader)
            lent.pop(reader, None)
        for number, seen in lent.values():
            assert (copies[number] == seen).all()
        assert (copies[copies.newest] == version).all()
    assert used == set(range(readers + 1))


def test_nothing_is_copied_if_nobody_reads():
    copies = copies_of(3)
    assert {update(copies, version) for version in range(3)} == {0}


def test_an_update_that_does_not_end_is_seen_by_nobody():
    copies = copies_of(2)
    copies.lend(0)
    copies[copies.next()].fill_(7)
    assert (copies[copies.lend(1)] == 0).all()
