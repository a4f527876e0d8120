"""How good a model is, found by all ranks together: each scores a part of the data, and all get the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlab.collectives.ring import pass_chunks, ring_allreduce
from dlab.data.batches import Samples, take
from dlab.data.table import Bars, Table
from dlab.processes.parent.waiting import uninterrupted
from dlab.transports.base import Transport
from dlab.transports.threads import ThreadTransport, ThreadWorld

if TYPE_CHECKING:  # imported when something is drawn
    from matplotlib.figure import Figure

_MOST_NUMBERS = 25  # classes; the numbers of a larger matrix would be too small to read


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation:
    """What a model got right and wrong. It shows itself as a table; `figure()` draws the confusion matrix.

    `confusion[t, p]` counts the samples of class t that were taken for p (int64). `average_precision` (float64, by
    class) says how far the samples of a class come first when all are ranked by the probability that the model gives
    to it: 1 if they are ahead of all others. `loss` is the mean cross entropy. What would be 0/0 is nan.

    >>> evaluate(model, dlab.mnist(train=False))
    class  samples  precision  recall  average precision
        0      980  0.9919     0.9959  0.9999
        ...
    accuracy 0.9891, mean average precision 0.9994, loss 0.0334, 10,000 samples
    """

    confusion: Tensor  # (classes, classes)
    average_precision: Tensor  # (classes,)
    loss: float

    @property
    def samples(self) -> int:
        """How many samples there were, of all classes."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of all samples whose class was found."""
        return int(self.confusion.trace()) / self.samples if self.samples else float("nan")

    @property
    def precision(self) -> Tensor:
        """By class: of those taken for it, the share that belongs to it; nan if nothing was taken for it."""
        return self.confusion.diagonal().double() / self.confusion.sum(0)

    @property
    def recall(self) -> Tensor:
        """By class: of those that belong to it, the share that was found; nan if it has no samples."""
        return self.confusion.diagonal().double() / self.confusion.sum(1)

    @property
    def mean_average_precision(self) -> float:
        """The mean of the average precisions of those classes that have samples."""
        return float(self.average_precision.nanmean())

    def figure(self) -> Figure:
        """The confusion matrix with its counts, coloured by the share of each true label's samples."""
        with uninterrupted():
            from matplotlib.colors import PowerNorm
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator

        counts, classes = self.confusion.numpy(), len(self.confusion)
        shares = counts / counts.sum(1, keepdims=True).clip(min=1)
        side = 2.0 + 0.4 * min(classes, _MOST_NUMBERS)
        figure = Figure(figsize=(side + 1, side), layout="constrained")
        axes = figure.add_subplot(xlabel="predicted label", ylabel="true label")
        # cividis looks alike to colour-blind readers; by its root a share of one in a hundred still shows
        norm = PowerNorm(0.5, 0, 1)
        image = axes.imshow(shares, cmap="cividis", norm=norm, interpolation="nearest")
        figure.colorbar(image, label="share of the true label's samples")
        if classes > _MOST_NUMBERS:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            return figure
        axes.set_xticks(range(classes))
        axes.set_yticks(range(classes))
        for (true, predicted), count in np.ndenumerate(counts):
            colour = "white" if norm(shares[true, predicted]) < 0.5 else "black"
            axes.text(predicted, true, str(count), ha="center", va="center", fontsize=8, color=colour)
        return figure

    def __repr__(self) -> str:
        return f"{_ClassTable(self)}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return f"{_ClassTable(self)._repr_html_()}<p>{escape(self._summary())}</p>"

    def _summary(self) -> str:
        return (
            f"accuracy {self.accuracy:.4f}, mean average precision {self.mean_average_precision:.4f}, "
            f"loss {self.loss:.4f}, {self.samples:,} sample{'s' if self.samples != 1 else ''}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Evaluation):
            return NotImplemented
        pairs: list[tuple[Any, Any]] = [
            (self.confusion, other.confusion),
            (self.average_precision, other.average_precision),
            (self.loss, other.loss),
        ]
        return all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in pairs)


class _ClassTable(Table):
    """A row per class."""

    def __init__(self, of: Evaluation) -> None:
        samples, precision, recall = of.confusion.sum(1).tolist(), of.precision.tolist(), of.recall.tolist()
        self.rows = list(
            zip(range(len(samples)), samples, precision, recall, of.average_precision.tolist(), strict=True)
        )

    def heading(self) -> list[str]:
        return ["class", "samples", "precision", "recall", "average precision"]

    def cells(self, row: Any) -> list[int | str | Bars]:
        label, samples, *shares = row
        return [label, samples, *(f"{share:.4f}" for share in shares)]

    def between(self, hidden: Sequence[Any]) -> str:
        plural = "es" if len(hidden) > 1 else ""
        return f"… {len(hidden)} more class{plural}, {sum(row[1] for row in hidden):,} samples together"


def evaluate(
    model: nn.Module,
    data: Samples,
    transport: Transport | None = None,
    batch_size: int = 1000,
    device: torch.device | str | None = None,
) -> Evaluation:
    """Evaluate a model on (input, label) samples; with a transport, every rank does a part and all get the same result.

    Every rank must call it, with the same model and the same data. Rank r scores part r of `tensor_split`, so the work
    is divided by the n ranks. Then each sends 2(n-1)/n of the counts (8 bytes for each pair of classes), and, since an
    average precision needs all samples in one ranking, (n-1)/n of all scores and labels: of 480 KB for 10,000 samples,
    10 classes and float32. Each rank ranks all of them itself.

    `device` is where the model is, found by its parameters if not given; what is sent lies there too. Batches of
    another size may change a score in its last digit, as everywhere in torch; otherwise n ranks equal one bit for bit.
    If a score is not a number, neither are the loss and the average precisions.

    >>> evaluate(model, data).accuracy
    0.9891
    >>> cluster.run(lambda: evaluate(model, data, dlab.transport()).accuracy)
    [0.9891, 0.9891, 0.9891, 0.9891]
    """
    if not len(data):
        raise ValueError("there is nothing to evaluate: the data are empty")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: a batch needs at least one sample")
    transport = transport or ThreadTransport(ThreadWorld(1), 0)  # one rank alone
    positions = torch.arange(len(data)).tensor_split(transport.size)[transport.rank]
    with _evaluation_mode(model, transport):
        scores, labels = _score(model, data, positions, batch_size, device or _device(model))
        all_scores, all_labels = gather_rows(scores, len(data), transport), gather_rows(labels, len(data), transport)
    _check_labels(all_labels, classes=scores.shape[1])  # all of them on every rank, so that all raise alike
    confusion = count_pairs(labels, scores.argmax(1), classes=scores.shape[1])
    ring_allreduce(confusion, transport)

    all_scores, all_labels = all_scores.cpu().double(), all_labels.cpu()
    losses = F.cross_entropy(all_scores, all_labels, reduction="none")
    # In float64: in float32 all that a model is very sure of would have the probability 1, and no ranking.
    columns = all_scores.softmax(1).unbind(1)
    precisions = [average_precision(column, all_labels == label) for label, column in enumerate(columns)]
    return Evaluation(confusion.cpu(), torch.tensor(precisions, dtype=torch.float64), _total(losses) / len(data))


def count_pairs(true: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """How often each pair of labels occurs: a row for each true one, a column for each predicted one.

    >>> count_pairs(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), classes=2)
    tensor([[1, 0],
            [1, 1]])
    """
    return torch.bincount(true * classes + predicted, minlength=classes**2).view(classes, classes)


def average_precision(scores: Tensor, hits: Tensor) -> float:
    """Sum of (R_k - R_k-1) P_k down the ranking of the scores, R_k and P_k being recall and precision of the first k.

    Samples of equal score are taken together: the ranking does not say which of them comes first. One sort.

    >>> average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]))
    0.8333333333333333
    """
    if scores.isnan().any():
        return float("nan")
    ranked, order = scores.sort(descending=True)
    ends = torch.cat([ranked[1:] != ranked[:-1], torch.tensor([True])])  # the last of each equal score
    found = hits[order].cumsum(0)[ends].double()
    precision = found / torch.arange(1, len(scores) + 1)[ends]
    gained = found.diff(prepend=torch.zeros(1)) / found[-1]  # 0/0 = nan without any hit
    return _total(gained * precision)


def gather_rows(mine: Tensor, count: int, transport: Transport) -> Tensor:
    """Everyone gets all `count` rows, of which rank r has part r of `tensor_split`; (n-1)/n of them sent per rank.

    They arrive where they belong, so nothing is joined afterwards.
    """
    rows = mine.new_empty(count, *mine.shape[1:])
    parts = rows.tensor_split(transport.size)
    parts[transport.rank].copy_(mine)
    pass_chunks(parts, transport)
    return rows


@contextmanager
def _evaluation_mode(model: nn.Module, transport: Transport) -> Iterator[None]:
    """Without dropout and with fixed batch norms; afterwards every module is as it was.

    The ranks of a rehearsal share one model: none may change it before all have noted how it was, and none may change
    it back before all have their scores, which is so when all the scores have been gathered.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        transport.barrier()
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@torch.inference_mode()
def _score(
    model: nn.Module, data: Samples, positions: Tensor, batch_size: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Scores (samples, classes) and labels (samples,) of the samples at these positions."""
    scores, labels = [], []
    # A rank without samples looks at one all the same, to know the number of classes and the type of the scores.
    for batch in positions.split(batch_size) if len(positions) else [torch.tensor([0])]:
        inputs, truth = take(data, batch)
        scores.append(_checked_scores(model(inputs.to(device)), len(batch)))
        labels.append(_checked_truth(truth, len(batch)).to(device))
    return torch.cat(scores)[: len(positions)], torch.cat(labels)[: len(positions)]


def _checked_scores(scores: Any, batch: int) -> Tensor:
    if isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == batch and scores.shape[1]:
        return scores
    found = f"a tensor {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    raise ValueError(f"the model gave {found} for a batch of {batch}: it must give scores (batch, classes)")


def _checked_truth(labels: Any, batch: int) -> Tensor:
    whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if whole and labels.shape == (batch,):
        return labels.long()
    found = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
    raise ValueError(f"the labels of a batch of {batch} came as {found}: a label must be one whole number")


def _check_labels(labels: Tensor, classes: int) -> None:
    for sample in ((labels < 0) | (labels >= classes)).nonzero()[:1].flatten().tolist():
        raise ValueError(
            f"sample {sample} has the label {int(labels[sample])}, but the model scores the classes 0 to {classes - 1}"
        )


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _total(values: Tensor) -> float:
    """By numpy: torch sums a long tensor in as many parts as it has threads, and workers have fewer than notebooks."""
    return float(values.numpy().sum())
