"""Gradient flow: the size of every layer's gradient on every rank, and the path of one gradient from loss to weight."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite, log10, nan
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dlab.events import Event
from dlab.kinds import GRADIENT, GRADIENTS
from dlab.views.base import View
from dlab.views.columns import Arrivals
from dlab.views.usable import LARGEST

# the stages of a gradient, in order, each with a colour and a marker
STAGES = {
    "computed": ("#0072B2", "o"),
    "bucketed": ("#CC79A7", "s"),
    "sent": ("#E69F00", ">"),
    "reduced": ("#009E73", "D"),
    "applied": ("#D55E00", "*"),
}
_BROKEN = "#D55E00"  # a norm that is infinite or not a number
_ROWS = 24  # layers with a row of full height; more than these share the space
_COLUMNS = 8  # ranks shown in the terminal
_VALUES = 40_000  # norms and times sent to the browser with a frame …
_MOST, _LEAST = 120, 20  # … for at most and at least this many steps

GrowingTable = np.ndarray[Any, np.dtype[np.floating[Any]]]


class GradientFlow(View):
    """The events of `dlab.watch(model)`: gradient norms by layer and rank over the steps, and the path of one gradient.

    `layer` and `step` choose whose path is shown; the default is the first layer in the last step that was watched.

    >>> GradientFlow(run.events)
    gradient norm after step 30
    layer   rank 0   rank 1
    conv1    0.412    0.398
    fc1     0.0731    0.069
    conv1 in step 30, milliseconds since the first gradient was computed
    rank 0  computed 2.10  sent 2.25  reduced 2.81  applied 4.02
    rank 1  computed 2.31  sent 2.44  reduced 2.79  applied 3.95
    """

    script, title = "gradients", "Gradient flow"
    reads = (GRADIENTS, GRADIENT)

    def __init__(self, events: Iterable[Event] = (), layer: str | None = None, step: int | None = None) -> None:
        self.layers: list[str] = []  # in the order of the model
        self.norms: dict[int, dict[int, dict[str, float]]] = {}  # by step, rank and layer
        self._layer, self._step = layer, step
        self._begun: float | None = None
        self._told: dict[tuple[int, int], float] = {}  # when the norms of a (step, rank) were reported, in seconds
        self._latest: dict[int, tuple[int, dict[str, float]]] = {}  # by rank: its last step and the norms
        self._moments: dict[tuple[int, str], dict[int, dict[str, float]]] = {}  # of a (step, layer), by rank and stage
        self._starts: dict[int, float] = {}  # when the first gradient of a step was computed
        self._blocks: dict[int, GrowingTable] = {}  # by step: the cached result of `_block`
        super().__init__(events)
        if self.layers and layer is not None and layer not in self.layers:
            raise ValueError(f"there is no layer {layer!r}: the watched ones are {', '.join(self.layers)}")
        if self.norms and step is not None and step not in self.norms:
            raise ValueError(f"step {step} was not watched: {', '.join(map(str, sorted(self.norms)))} were")

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more norms and stages of watched gradients."""
        if not (arrived := self.take(events)):
            return
        if self._begun is None:
            self._begun = arrived.first
        for event in arrived.others:
            moment, data = event.time - self._begun, event.data
            if event.kind in (GRADIENTS, GRADIENT):
                self._blocks.pop(data["step"], None)
            if event.kind == GRADIENTS:
                self.layers += [layer for layer in data["norms"] if layer not in self.layers]
                self.norms.setdefault(data["step"], {})[event.rank] = data["norms"]
                self._told[data["step"], event.rank] = max(0.0, moment)
                self._latest[event.rank] = (data["step"], data["norms"])
            elif event.kind == GRADIENT and data["stage"] in STAGES:
                moments = self._moments.setdefault((data["step"], data["layer"]), {})
                moments.setdefault(event.rank, {})[data["stage"]] = moment
                if data["stage"] == "computed":
                    self._starts[data["step"]] = min(moment, self._starts.get(data["step"], inf))

    @property
    def empty(self) -> bool:
        """Whether no model was watched."""
        return not self.layers

    @property
    def ranks(self) -> list[int]:
        """The ranks that have reported a norm."""
        return sorted(self._latest)

    @property
    def layer(self) -> str:
        """The layer whose path is shown."""
        return self._layer or (self.layers[0] if self.layers else "")

    @property
    def step(self) -> int:
        """The step whose path is shown."""
        return self._step if self._step is not None else max(self.norms, default=0)

    def path(self) -> dict[int, dict[str, float]]:
        """Return by rank when the gradient reached each stage, in milliseconds after the first gradient of its step."""
        start, moments = self._starts.get(self.step, nan), self._moments.get((self.step, self.layer), {})
        return {
            rank: {stage: 1e3 * (stages[stage] - start) for stage in STAGES if stage in stages}
            for rank, stages in sorted(moments.items())
        }

    def table(self) -> GrowingTable:
        """Return the latest norms, a row per layer and a column per rank: nan if missing, inf if not finite."""
        norms = [self._latest[rank][1] for rank in self.ranks]
        return np.array([[_readable(each.get(layer)) for each in norms] for layer in self.layers], dtype=np.float32)

    def history(self, steps: list[int]) -> GrowingTable:
        """Return the norms in these steps: step x layer x rank."""
        return self._stack(steps)[..., 0].astype(np.float32)

    def _stack(self, steps: list[int]) -> GrowingTable:
        """Return an array of step x layer x rank x (norm, then the time in seconds of each stage)."""
        shape = (len(self.layers), len(self.ranks), 1 + len(STAGES))
        return np.stack([self._block(step, shape) for step in steps]) if steps else np.empty((0, *shape))

    def _block(self, step: int, shape: tuple[int, ...]) -> GrowingTable:
        """Return the rows of one step; they are made again only when more events of that step have arrived."""
        block = self._blocks.get(step)
        if block is None or block.shape != shape:
            block = self._blocks[step] = np.full(shape, nan)
            for column, rank in enumerate(self.ranks):
                norms = self.norms.get(step, {}).get(rank, {})
                for row, layer in enumerate(self.layers):
                    stages = self._moments.get((step, layer), {}).get(rank, {})
                    block[row, column] = [_readable(norms.get(layer)), *(stages.get(stage, nan) for stage in STAGES)]
        return block

    def figure(self) -> Figure:
        """Draw a row per layer with its norm on each rank and its history, and below it the path of one gradient."""
        rows, ranks = max(1, min(len(self.layers), _ROWS)), max(1, len(self.ranks))
        heights = (0.9 + 0.34 * rows, 0.9 + 0.26 * min(ranks, _ROWS))
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=heights, width_ratios=(1, 1.1))
        self._draw_heat(figure.add_subplot(grid[0, 0], xlabel="rank", ylabel="layer"))
        self._draw_lines(figure.add_subplot(grid[0, 1], xlabel="step"))
        label = f"milliseconds since the first gradient of step {self.step} was computed"
        self._draw_path(figure.add_subplot(grid[1, :], xlabel=label, ylabel="rank"))
        return figure

    def _draw_heat(self, axes: Axes) -> None:
        axes.set_title("now", fontsize=10)
        if self.empty:
            return
        table = self.table()
        low, high = _limits(table)
        colours = colormaps["cividis"].with_extremes(over=_BROKEN, bad="none")
        shown = np.where(table <= 0, low, np.minimum(table, 10 * high))  # a logarithm has no place for 0 and inf
        image = axes.imshow(shown, aspect="auto", cmap=colours, norm=LogNorm(low, high), interpolation="nearest")
        bar = axes.get_figure().colorbar(image, ax=axes, label="gradient norm")  # type: ignore[union-attr]
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.ax.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(self.ranks)), [str(rank) for rank in self.ranks])
        every = -(-len(self.layers) // _ROWS)
        axes.set_yticks(range(0, len(self.layers), every), self.layers[::every])
        if table.size <= 8 * _ROWS and len(self.ranks) <= 6:
            for (row, column), norm in np.ndenumerate(table):
                if not np.isnan(norm):
                    dark = norm <= 0 or log10(norm / low) < 0.55 * log10(high / low)
                    axes.text(column, row, _short(norm), ha="center", va="center", color="w" if dark else "k", size=8)

    def _draw_lines(self, axes: Axes) -> None:
        """Draw a small curve in each row, on its own scale, with the ends of the scale written beside it."""
        axes.set_title("mean and spread of the ranks", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.yaxis.tick_right()
        axes.tick_params(right=False)
        axes.set_yticks([])
        if self.empty:
            return
        steps = self._thinned()
        norms = self.history(steps)
        norms[~np.isfinite(norms) | (norms <= 0)] = nan
        ends = []
        for row, history in enumerate(np.moveaxis(norms, 1, 0)):  # step x rank
            told = ~np.isnan(history).all(axis=1)
            if not told.any():
                ends.append("–")
                continue
            low, high = float(np.nanmin(history)), float(np.nanmax(history))

            def place(values: GrowingTable, row: int = row, low: float = low, high: float = high) -> GrowingTable:
                return row + 0.38 - 0.76 * np.log(values / low) / (np.log(high / low) or 1.0)

            x, seen = np.array(steps)[told], history[told]
            axes.fill_between(
                x, place(np.nanmin(seen, 1)), place(np.nanmax(seen, 1)), color="#0072B2", alpha=0.25, lw=0
            )
            axes.plot(x, place(np.nanmean(seen, 1)), color="#0072B2", lw=1.3, marker="." if len(x) < 2 else "")
            ends.append(f"{_short(low)} – {_short(high)}")
        axes.set_ylim(len(self.layers) - 0.5, -0.5)
        for edge in range(1, len(self.layers)):
            axes.axhline(edge - 0.5, color="#D8D8D8", lw=0.6)
        every = -(-len(self.layers) // _ROWS)
        axes.set_yticks(range(0, len(self.layers), every), ends[::every], fontsize=8)
        axes.yaxis.set_label_position("right")
        axes.set_ylabel("lowest – highest norm")

    def _draw_path(self, axes: Axes) -> None:
        axes.set_title(f"the path of one gradient: {self.layer}, step {self.step}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        path = self.path()
        axes.set_yticks(range(len(path)), [str(rank) for rank in path])
        axes.set_ylim(len(path) - 0.4, -0.6)
        for row, stages in enumerate(path.values()):
            moments = list(stages.values())
            axes.plot([moments[0], moments[-1]], [row, row], color="#A0A0A0", lw=1, zorder=1)
            if "sent" in stages and "reduced" in stages:
                axes.plot([stages["sent"], stages["reduced"]], [row, row], color="#E69F00", lw=7, alpha=0.35, zorder=1)
        for stage, (colour, mark) in STAGES.items():
            found = np.array([(each[stage], row) for row, each in enumerate(path.values()) if stage in each])
            if found.size:
                size = 130 if mark == "*" else 45
                axes.scatter(found[:, 0], found[:, 1], color=colour, marker=mark, s=size, label=stage, zorder=2)
        if path:
            axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))

    def data(self) -> dict[str, Any]:
        """Return norms (step x layer x rank) and times (the same x stage) of as many steps as fit into a frame."""
        each = max(1, len(self.layers) * len(self.ranks) * (1 + len(STAGES)))
        steps = self._thinned(min(_MOST, max(_LEAST, _VALUES // each)))
        stack = self._stack(steps)
        starts = np.array([self._starts.get(step, nan) for step in steps])
        told = [[self._told.get((step, rank), nan) for rank in self.ranks] for step in steps]
        return {
            "layers": self.layers,
            "ranks": self.ranks,
            "stages": [{"name": stage, "colour": colour} for stage, (colour, _) in STAGES.items()],
            "layer": self.layers.index(self.layer) if self.layer in self.layers else 0,
            "step": steps.index(self.step) if self._step in steps else -1,
            "steps": np.array(steps, dtype=np.int32),
            "times": np.array(told, dtype=np.float32),
            "norms": stack[..., 0].astype(np.float32),
            "starts": starts,
            "moments": (1e3 * (stack[..., 1:] - starts.reshape(-1, 1, 1, 1))).astype(np.float32),
        }

    def _thinned(self, most: int = _MOST) -> list[int]:
        """Return at most this many of the watched steps, always including the last one and the chosen one."""
        steps = sorted(self.norms)
        return sorted({*steps[:: len(steps) // most + 1], *steps[-1:], *({self.step} & self.norms.keys())})

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Gradient flow: no model is watched yet."
        table = np.where(np.isnan(table := self.table()), -1, table)
        row, column = divmod(int(table.argmax()), len(self.ranks))
        last = max(step for step, _ in self._latest.values())
        words = [
            f"Gradient norms of {len(self.layers)} layers on {len(self.ranks)} ranks after step {last}; "
            + (
                f"the largest is {_short(table.max())},"
                if isfinite(table.max())
                else "one is not a finite number, that"
            )
            + f" of {self.layers[row]} on rank {self.ranks[column]}."
        ]
        if path := self.path():
            stages = [stage for stage in STAGES if any(stage in found for found in path.values())]
            took = max(max(found.values()) for found in path.values())
            words.append(f"That of {self.layer} in step {self.step} was {', '.join(stages)} within {took:.1f} ms.")
        return " ".join(words)

    def text(self) -> str:
        """Return the norms and the path as text for a terminal."""
        if self.empty:
            return "no model is watched yet: call dlab.watch(model) in the workers"
        width, last = max(map(len, ["layer", *self.layers])), max(step for step, _ in self._latest.values())
        shown = self.ranks[:_COLUMNS]
        more = f"   and {len(self.ranks) - _COLUMNS} more" if len(self.ranks) > _COLUMNS else ""
        lines = [
            f"gradient norm after step {last}",
            f"{'layer':<{width}}" + "".join(f"{f'rank {rank}':>9}" for rank in shown) + more,
        ]
        for layer, norms in zip(self.layers, self.table()[:, :_COLUMNS], strict=True):
            lines.append(f"{layer:<{width}}" + "".join(f"{_short(norm):>9}" for norm in norms))
        if path := self.path():
            lines.append(f"{self.layer} in step {self.step}, milliseconds since the first gradient was computed")
        for rank, stages in list(path.items())[:_COLUMNS]:
            moments = "  ".join(f"{stage} {moment:.2f}" for stage, moment in stages.items())
            lines.append(f"rank {rank}  {moments}")
        return "\n".join(lines)


def _readable(norm: float | None) -> float:
    """Return a norm as a table holds it: nan if there is none, inf if it is not finite."""
    if norm is None:
        return nan
    return norm if abs(norm) <= LARGEST else inf


def _limits(norms: GrowingTable) -> tuple[float, float]:
    """Return the ends of the colour scale, at least a factor of ten apart so that equal norms do not look different."""
    good = norms[np.isfinite(norms) & (norms > 0)]
    low, high = (float(good.min()), float(good.max())) if good.size else (0.1, 1.0)
    middle = (low * high) ** 0.5
    return min(low, middle / 10**0.5), max(high, middle * 10**0.5)


def _short(norm: float | np.floating[Any]) -> str:
    """Write a norm briefly: `0.0123`, `4.5`, `120`, `–` for none, `broken` for one that is not finite."""
    if np.isnan(norm):
        return "–"
    return f"{norm:.3g}" if isfinite(norm) else "broken"
