"""Bells: nobody sleeps through a ring, whenever it comes."""

import mmap
import os

from dlab.transports.bells import Bell


def a_bell():
    return Bell(memoryview(mmap.mmap(-1, 4096)))


def test_a_ring_before_the_sleep_is_heard():
    bell = a_bell()
    bell.hang()
    assert bell.sleep(10)  # somebody may have rung before it hung there
    bell.ring()
    assert bell.sleep(10)


def test_many_rings_are_heard_once():
    bell = a_bell()
    bell.hang()
    for _ in range(5):
        bell.ring()
    assert bell.sleep(10)
    assert not bell.sleep(0.01)


def test_two_processes_wake_each_other_a_thousand_times():
    memory = memoryview(mmap.mmap(-1, 4096))
    mine, other = Bell(memory), Bell(memory[64:])
    count = memory[128:136].cast("Q")
    for bell in (mine, other):
        bell.hang()
        bell.sleep(0)
    child = os.fork()
    if not child:
        for _ in range(1000):
            other.sleep(10)
            count[0] += 1
            mine.ring()
        os._exit(0)
    heard = 0
    for _ in range(1000):
        other.ring()
        heard += mine.sleep(10)
    assert os.waitpid(child, 0)[1] == 0
    assert (heard, count[0]) == (1000, 1000)
