"""Versions of weights: what a worker was lent stays as it is until it pulls again, and no more are made than needed."""

import random

import pytest
import torch

from dlab.memory.versions import Versions


def copies_of(readers):
    return Versions(readers, [0] * (1 + readers), lambda number: torch.zeros(3))


def update(versions, version):
    number = versions.next()
    versions[number].fill_(version)
    versions.turn_to(number)
    return number


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_who_reads_is_not_disturbed(readers):
    versions, dice = copies_of(readers), random.Random(readers)
    version, lent, used = 0, {}, {0}
    for _ in range(500):
        reader = dice.randrange(readers)
        action = dice.choice(["pull", "update", "update", "die"])
        if action == "pull":
            lent[reader] = (versions.lend(reader), version)
        elif action == "update":
            version += 1
            used.add(update(versions, version))
        else:
            versions.forget(reader)
            lent.pop(reader, None)
        for number, seen in lent.values():
            assert (versions[number] == seen).all()
        assert (versions[versions.newest] == version).all()
    assert used == set(range(readers + 1))


def test_nothing_is_copied_if_nobody_reads():
    versions = copies_of(3)
    assert {update(versions, version) for version in range(3)} == {0}


def test_an_update_that_does_not_end_is_seen_by_nobody():
    versions = copies_of(2)
    versions.lend(0)
    versions[versions.next()].fill_(7)
    assert (versions[versions.lend(1)] == 0).all()
