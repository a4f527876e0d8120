"""Loss curves: what every rank's loss did, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.figure import Figure

from dlab.events import Event
from dlab.views.still import COLOURS, View

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30  # characters of a curve in the terminal
_SMOOTH = 20  # steps in the running mean that is drawn over the raw loss


class LossCurves(View):
    """The losses that ranks have logged (`dlab.log(step=…, loss=…)`), a line per rank.

    >>> LossCurves(run.events)
    rank 0   59 steps   2.301 → 0.412  █▇▆▅▃▂▂▁
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.losses: dict[int, list[tuple[float, float]]] = {}  # by rank: (step, loss)
        for event in events:
            if event.kind == "log" and "loss" in event.data:
                curve = self.losses.setdefault(event.rank, [])
                curve.append((event.data.get("step", len(curve)), event.data["loss"]))

    def figure(self) -> Figure:
        """Each rank's own loss, faint, and its running mean, strong: after an all-reduce only the batches differ."""
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss of the rank's own batch")
        for rank, curve in sorted(self.losses.items()):
            steps, losses = zip(*curve, strict=True)
            colour = COLOURS[rank % len(COLOURS)]
            axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, _running_mean(losses), color=colour, linewidth=1.6, label=f"rank {rank}")
        if self.losses:
            axes.legend(ncols=2, frameon=False)
            axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        return figure

    @property
    def alt(self) -> str:
        """What the picture shows."""
        if not self.losses:
            return "Loss curves: no rank has logged a loss yet."
        ends = ", ".join(f"rank {rank} {curve[-1][1]:.2f}" for rank, curve in sorted(self.losses.items())[:8])
        return f"Loss by step of {len(self.losses)} ranks; the last losses are {ends}."

    def __str__(self) -> str:
        if not self.losses:
            return "no rank has logged a loss yet"
        return "\n".join(
            f"rank {rank:<3} {len(curve):>5} steps   {curve[0][1]:.3f} → {curve[-1][1]:.3f}  {_spark(curve)}"
            for rank, curve in sorted(self.losses.items())
        )


def _running_mean(values: tuple[float, ...]) -> list[float]:
    """The mean of the last `_SMOOTH` values at each point."""
    means, total = [], 0.0
    for position, value in enumerate(values):
        total += value - (values[position - _SMOOTH] if position >= _SMOOTH else 0.0)
        means.append(total / min(position + 1, _SMOOTH))
    return means


def _spark(curve: list[tuple[float, float]]) -> str:
    """A curve in block characters."""
    count = min(_WIDTH, len(curve))
    picked = [curve[index * len(curve) // count][1] for index in range(count)]
    low, high = min(picked), max(picked)
    return "".join(_BARS[int((value - low) / (high - low or 1.0) * (len(_BARS) - 1))] for value in picked)
