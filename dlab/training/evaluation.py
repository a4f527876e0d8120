"""Evaluate a model on all ranks together: each scores a part of the data, and all get the same numbers."""

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
    """What a model got right and wrong; displayed as a table, while `figure()` draws the confusion matrix.

    `confusion[t, p]` counts the samples of class t that were predicted as p (int64). `average_precision` (float64, by
    class) says how well the model's probability for a class ranks its samples ahead of the others: 1 if all of them
    come first. `loss` is the mean cross-entropy. A value that would be 0/0 is nan.

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
        """The number of samples of all classes."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of all samples that were classified correctly."""
        return int(self.confusion.trace()) / self.samples if self.samples else float("nan")

    @property
    def precision(self) -> Tensor:
        """By class: the share of the samples predicted as it that belong to it; nan if there are none."""
        return self.confusion.diagonal().double() / self.confusion.sum(0)

    @property
    def recall(self) -> Tensor:
        """By class: the share of its samples that were predicted as it; nan if it has no samples."""
        return self.confusion.diagonal().double() / self.confusion.sum(1)

    @property
    def mean_average_precision(self) -> float:
        """The mean of the average precisions over the classes that have samples."""
        return float(self.average_precision.nanmean())

    def figure(self) -> Figure:
        """Draw the confusion matrix with its counts, coloured by the share of each true label's samples."""
        with uninterrupted():
            from matplotlib.colors import PowerNorm
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator

        counts, classes = self.confusion.numpy(), len(self.confusion)
        shares = counts / counts.sum(1, keepdims=True).clip(min=1)
        side = 2.0 + 0.4 * min(classes, _MOST_NUMBERS)
        figure = Figure(figsize=(side + 1, side), layout="constrained")
        axes = figure.add_subplot(xlabel="predicted label", ylabel="true label")
        # cividis looks the same to colour-blind readers; with a square root a share of 1 % is still visible
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
    """The table that an evaluation displays, with a row per class."""

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

    Every rank must call it, with the same model and the same data. Rank r scores part r of `tensor_split`, so each of
    the n ranks does 1/n of the work. Then each sends 2(n-1)/n of the counts (8 bytes for each pair of classes), and,
    since an average precision needs all samples in one ranking, (n-1)/n of all scores and labels, which are 480 KB for
    10,000 samples, 10 classes and float32. Each rank then sorts all scores itself.

    `device` is the model's device, by default that of its parameters; tensors are sent from there too. A different
    batch size may change the last digit of a score, as everywhere in torch; otherwise n ranks give the same bits as
    one. If a score is nan, so are the loss and the average precisions.

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
    _check_labels(all_labels, classes=scores.shape[1])  # every rank checks all labels, so that all raise the same error
    confusion = count_pairs(labels, scores.argmax(1), classes=scores.shape[1])
    ring_allreduce(confusion, transport)

    all_scores, all_labels = all_scores.cpu().double(), all_labels.cpu()
    losses = F.cross_entropy(all_scores, all_labels, reduction="none")
    # In float64, because in float32 all confident predictions would have probability 1 and could not be ranked.
    columns = all_scores.softmax(1).unbind(1)
    precisions = [average_precision(column, all_labels == label) for label, column in enumerate(columns)]
    return Evaluation(confusion.cpu(), torch.tensor(precisions, dtype=torch.float64), _total(losses) / len(data))


def count_pairs(true: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Count how often each pair of labels occurs, with a row per true label and a column per predicted one.

    >>> count_pairs(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), classes=2)
    tensor([[1, 0],
            [1, 1]])
    """
    return torch.bincount(true * classes + predicted, minlength=classes**2).view(classes, classes)


def average_precision(scores: Tensor, hits: Tensor) -> float:
    """Sum (R_k - R_k-1) P_k down the ranking of the scores, where R_k and P_k are recall and precision of the first k.

    Samples of equal score are counted together, since the ranking does not order them. Costs one sort.

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
    """Give every rank all `count` rows, of which rank r has part r of `tensor_split`; each rank sends (n-1)/n of them.

    Each part is received at its final place, so nothing has to be concatenated afterwards.
    """
    rows = mine.new_empty(count, *mine.shape[1:])
    parts = rows.tensor_split(transport.size)
    parts[transport.rank].copy_(mine)
    pass_chunks(parts, transport)
    return rows


@contextmanager
def _evaluation_mode(model: nn.Module, transport: Transport) -> Iterator[None]:
    """Turn off dropout and freeze batch norms; afterwards every module gets back the mode that it had.

    The ranks of a rehearsal share one model: none may change it before all have noted its mode, and none may change it
    back before all have their scores, which they have once the scores are gathered.
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
    """Return the scores (samples, classes) and labels (samples,) of the samples at these positions."""
    scores, labels = [], []
    # A rank without samples still scores one, to know the number of classes and the type of the scores.
    for batch in positions.split(batch_size) if len(positions) else [torch.tensor([0])]:
        inputs, truth = take(data, batch)
        scores.append(_checked_scores(model(inputs.to(device)), len(batch)))
        labels.append(_checked_truth(truth, len(batch)).to(device))
    return torch.cat(scores)[: len(positions)], torch.cat(labels)[: len(positions)]


def _checked_scores(scores: Any, batch: int) -> Tensor:
    if isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == batch and scores.shape[1]:
        return scores
    found = f"a tensor {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    raise ValueError(f"the model returned {found} for a batch of {batch}: it must return scores (batch, classes)")


def _checked_truth(labels: Any, batch: int) -> Tensor:
    whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if whole and labels.shape == (batch,):
        return labels.long()
    found = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
    raise ValueError(f"the labels of a batch of {batch} are {found}: each label must be one whole number")


def _check_labels(labels: Tensor, classes: int) -> None:
    for sample in ((labels < 0) | (labels >= classes)).nonzero()[:1].flatten().tolist():
        raise ValueError(
            f"sample {sample} has the label {int(labels[sample])}, but the model scores the classes 0 to {classes - 1}"
        )


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _total(values: Tensor) -> float:
    """Sum with numpy, because torch's order of summation depends on its number of threads, which differs in workers."""
    return float(values.numpy().sum())
