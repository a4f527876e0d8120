"""What collectives without messages come to: how often, how many bytes, how long. Nobody sees them step by step."""

from __future__ import annotations

import numpy as np

from dlab.kinds import CollectiveData, Within


class CollectiveTotals:
    """Adds up events of kind `collective`, by what they are and by rank.

    >>> totals.lines()
    ['all-reduce (shared memory): 50 times, 25.6 MiB, 12 ms on each rank']
    """

    def __init__(self) -> None:
        self._by_rank: dict[tuple[str, str, str], dict[int, np.ndarray]] = {}

    def add(self, rank: int, data: CollectiveData) -> None:
        """Add the count, bytes and seconds of one event to those of its collective."""
        ranks = self._by_rank.setdefault((data["name"], data["algorithm"], name_group(data)), {})
        ranks[rank] = ranks.get(rank, 0) + np.array([data["count"], data["bytes"], data["seconds"]])

    def lines(self) -> list[str]:
        """A line for each sort, with the mean of the ranks that have told of it."""
        lines = []
        for (name, algorithm, group), ranks in self._by_rank.items():
            count, nbytes, seconds = np.mean(list(ranks.values()), axis=0)
            times = "once" if round(count) == 1 else f"{count:.0f} times"
            where = f" within {group}" if group else ""
            took = f"{write_size(round(nbytes))}, {write_time(seconds)} on each rank"
            lines.append(f"{name}{where} ({algorithm}): {times}, {took}")
        return lines


def name_group(data: Within) -> str:
    """`tp`, the axis of a mesh; for a group without a name its ranks, `0, 2`; nothing if it is all ranks."""
    return data.get("axis") or ", ".join(map(str, data.get("group", ())))


def write_time(seconds: float) -> str:
    """`0.24 ms`, `12 ms`, `1.9 s`."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{float(f'{value:.2g}'):g} {unit}"


def write_size(count: int) -> str:
    """`16 B`, `1.5 KiB`, `20 MiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{round(count / 1024**power, 1):g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
