"""Semaphores: a process that waits never misses a wake-up, whenever it comes."""

import mmap
import os

from dlab.memory.semaphore import Semaphore


def a_semaphore():
    return Semaphore(memoryview(mmap.mmap(-1, 4096)))


def test_a_ring_before_the_sleep_is_heard():
    semaphore = a_semaphore()
    semaphore.hang()
    assert semaphore.sleep(10)  # somebody may have rung before it hung there
    semaphore.post()
    assert semaphore.sleep(10)


def test_many_rings_are_heard_once():
    semaphore = a_semaphore()
    semaphore.hang()
    for _ in range(5):
        semaphore.post()
    assert semaphore.sleep(10)
    assert not semaphore.sleep(0.01)


def test_two_processes_wake_each_other_a_thousand_times():
    memory = memoryview(mmap.mmap(-1, 4096))
    mine, other = Semaphore(memory), Semaphore(memory[64:])
    count = memory[128:136].cast("Q")
    for semaphore in (mine, other):
        semaphore.hang()
        semaphore.sleep(0)
    child = os.fork()
    if not child:
        for _ in range(1000):
            other.sleep(10)
            count[0] += 1
            mine.post()
        os._exit(0)
    heard = 0
    for _ in range(1000):
        other.post()
        heard += mine.sleep(10)
    assert os.waitpid(child, 0)[1] == 0
    assert (heard, count[0]) == (1000, 1000)
