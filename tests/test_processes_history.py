"""A run's history: nothing is lost and nothing comes twice, for those who look once and for those who look often."""

import random
import threading

from dlab.events import Event, EventRing, Records
from dlab.processes.parent.history import EventHistory


def told(rank, numbers):
    ring = EventRing(memoryview(bytearray(64 + 4096)))
    for number in numbers:
        ring.push("log", {"number": number})
    return ring.take(rank)


def seen(events):
    return [(event.rank, event.data["number"]) for event in events]


def test_events_are_all_that_was_added_and_stay_the_same_objects():
    random.seed(0)
    history, plain = EventHistory(), []
    for number in range(0, 300, 3):
        rank = random.randrange(4)
        history.add(told(rank, range(number, number + 3)))
        plain += [(rank, each) for each in range(number, number + 3)]
        if random.random() < 0.3:
            assert seen(history.events) == plain
    first, second = history.events, history.events
    assert seen(first) == plain and all(isinstance(event, Event) for event in first)
    assert all(one is other for one, other in zip(first, second, strict=True))
    first.clear()
    assert seen(history.events) == plain, "the list is the caller's own"


def test_everyone_who_looks_again_and_again_sees_each_record_once():
    history, places, views = EventHistory(), [0, 0], [[], []]
    for number in range(50):
        history.add(told(0, [number]))
        for who in range(2):
            if number % (who + 2) == 0:
                records, places[who] = history.since(places[who])
                views[who] += [event for each in records for event in each.events]
    for who in range(2):
        records, places[who] = history.since(places[who])
        views[who] += [event for each in records for event in each.events]
        assert history.since(places[who]) == ([], places[who])
    assert seen(views[0]) == seen(views[1]) == seen(history.events) == [(0, number) for number in range(50)]


def test_several_may_ask_while_it_grows():
    history, counts = EventHistory(), []

    def ask():
        counts.append([len(history.events) for _ in range(200)])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(500):
        history.add(told(1, [number, number]))
    for thread in threads:
        thread.join()
    assert all(some == sorted(some) for some in counts)
    assert seen(history.events) == [(1, number) for number in range(500) for _ in range(2)]


def test_records_of_one_rank_are_read_as_they_were_written():
    records = told(2, [5, 5, 5])  # equal data, and perhaps at the same time
    assert isinstance(records, Records) and records.rank == 2
    assert seen(records.events) == [(2, 5)] * 3
    assert list(records.read().values()) == [{"number": 5}] * 3
