"""Runs to draw, made up: events of ranks that train, alone and in a crowd, that are delayed, fail, or explode."""

from __future__ import annotations

import math
import random

import dlab

LONG = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x784 and 320x50): the first layer expects 320 numbers "
    "of each image, and the images have 784 of them; see the traceback above"
)


def state(rank, name, why="", time=99.9):
    return dlab.Event(time, rank, "state", {"state": name, "why": why})


def trained(ranks=4, steps=40, seconds=0.05, delayed=None):
    """Everybody meets after each step. The delayed one slept, and the others waited."""
    dice, events = random.Random(0), [state(rank, "running") for rank in range(ranks)]
    for step in range(steps):
        for rank in range(ranks):
            late = delayed is not None and step > 0
            data = {"step": step, "loss": 2.3 * math.exp(-step / 20) * (1 + 0.2 * dice.random()), "samples": 32}
            data |= {"compute": 0.6 * seconds, "wait": 0.4 * seconds, "staleness": [dice.randrange(5)]}
            if late and rank == delayed:
                data |= {"delay": 0.5 * seconds, "wait": 0.0}
            events.append(dlab.Event(100 + step * seconds + rank * 1e-4, rank, "log", data))
            at = 100 + step * seconds
            message = {"source": rank, "destination": (rank + 1) % ranks, "bytes": 64, "start": at, "end": at + 0.01}
            events.append(dlab.Event(at + 0.01, rank, "message", {**message, "phase": "ring", "step": 0}))
    return sorted(events, key=lambda event: event.time)


def apart(slow=2, ranks=4, steps=20):
    """Nobody waits: all but one are done after a tenth of a second, and that one sleeps 0.1 s in each step."""
    events = [state(rank, "running") for rank in range(ranks)]
    for rank in range(ranks):
        pace = 0.105 if rank == slow else 0.005
        for step in range(steps):
            data = {"step": step, "loss": 2.3 - 0.1 * step, "samples": 32, "wait": 0.0, "compute": pace}
            data |= {"delay": 0.1} if rank == slow and step else {}
            data |= {"compute": 0.005} if step == 0 else {}
            events.append(dlab.Event(100 + pace * step, rank, "log", data))
    events += [state(rank, "returned", time=103.0) for rank in range(ranks)]
    return sorted(events, key=lambda event: event.time)


def exploded(ranks=4, steps=60):
    """From 2.3 down to 0.6 in forty steps, then up to more than 1e8, then not a number."""
    events = []
    for step in range(steps):
        for rank in range(ranks):
            loss = 2.3 * math.exp(-step / 30) if step <= 40 else 2.0 * math.exp(1.1 * (step - 40))
            loss = [loss, math.inf, math.nan][0 if step < 58 else 1 + rank % 2]
            data = {"step": step, "loss": loss, "samples": 32, "compute": 0.03, "wait": 0.02}
            events.append(dlab.Event(100 + 0.05 * step, rank, "log", data))
    return events


def failed():
    states = [
        (0, "running", ""),
        (1, "failed", LONG),
        (2, "dead", "was killed by signal 9 (SIGKILL)"),
        (3, "stopped", ""),
    ]
    return [*trained(), *(state(rank, name, why, 110.0) for rank, name, why in states)]


def pipelined(schedule, steps=3, unit=0.001, late=0.1, slow=None):
    """Ranks that carry out a schedule. A message takes up to `late` units, and one rank is slow."""
    dice, events = (
        random.Random(0),
        [dlab.Event(99.0, r, "schedule", schedule.planned(r)) for r in range(schedule.ranks)],
    )
    for step in range(steps):
        free, ends = [0.0] * schedule.ranks, {}
        for rank, action, start, end in schedule.slots():
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            needs = {"F": [f"{stage - 1}F"], "W": [f"{stage}I"]}.get(
                kind, [f"{stage}F", f"{stage + 1}B", f"{stage + 1}I"]
            )
            ready = max([0.0, *(ends.get(f"{need}{microbatch}", 0.0) for need in needs)])
            begun = max(free[rank], ready + late * unit * dice.random())
            free[rank] = ends[action] = begun + (end - start) * unit * (1 + dice.random() / 10) * (
                3 if rank == slow else 1
            )
            data = {"action": str(action), "stage": stage, "microbatch": microbatch, "step": step}
            data |= {"start": 100 + step + begun, "end": 100 + step + free[rank]}
            events.append(dlab.Event(100.5 + step, rank, "action", data))
    return events


def logged(rank=0, **columns):
    """An event for each place in the columns."""
    count = len(next(iter(columns.values())))
    return [
        dlab.Event(100.0 + place, rank, "log", {name: values[place] for name, values in columns.items()})
        for place in range(count)
    ]


def named(name):
    """Every kind of event, with this for a name."""
    message = {"source": 0, "destination": 1, "bytes": 4, "start": 1.0, "end": 2.0, "phase": name, "step": 0}
    collective = {"name": name, "algorithm": name, "count": 1, "bytes": 4, "seconds": 1.0, "start": 1.0, "end": 2.0}
    gradient = {"step": 0, "layer": name, "stage": "computed"}
    return [
        dlab.Event(1.0, 0, "state", {"state": "failed", "why": name}),
        dlab.Event(1.0, 1, "state", {"state": "running", "why": "", "name": name}),
        dlab.Event(1.0, 0, "message", message),
        dlab.Event(1.0, 0, "message", message | {"group": [0, 1], "axis": name}),
        dlab.Event(1.0, 0, "collective", collective),
        dlab.Event(1.0, 0, "gradients", {"step": 0, "norms": {name: 1.0}}),
        dlab.Event(1.0, 0, "gradient", gradient),
        dlab.Event(1.0, 0, "shard", {"name": name, "samples": 3, "histogram": [1, 2], "labels": [name, 1]}),
        dlab.Event(1.0, 0, "schedule", {"name": name, "actions": ["0F0"], "starts": [0.0], "ends": [1.0]}),
        dlab.Event(1.0, 0, "slice", {"tensor": name, "shape": [4], "slice": [[0, 4]]}),
        *logged(0, step=[name, 1, 2], loss=[1.0, 2.0, 3.0], samples=[1, 1, 1], compute=[0.1] * 3, staleness=[[0]] * 3),
    ]
