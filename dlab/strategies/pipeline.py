"""Pipeline parallelism in the training loop: a network in stages on several ranks, and copies of those ranks.

It is a `Hybrid` on a mesh with the axes dp and pp: the ranks of a line along pp hold one network together and get the
same samples; each of these lines has its own samples, and gradients are averaged along dp. Taught in
`08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlab.pipeline import Schedule
from dlab.pipeline.splitting import split as split_by_parameters
from dlab.strategies.hybrid.plan import Split
from dlab.strategies.hybrid.strategy import Hybrid
from dlab.transports import Transport


class PipelineSGD(Hybrid):
    """Splits the network into stages on `stages` neighbouring ranks; more workers than that are data parallel.

    `schedule` is a name (see `dlab.schedule`), a `dlab.Schedule` or its rows; `virtual` says how many stages a rank has
    in the schedules "interleaved" and "zb1p". `split(model, n)` returns the n stages, by default `dlab.split`. Each
    rank holds the weights, the gradients and the optimizer's state of its stages. A step averages gradients as
    `AllReduceSGD` does, along dp only, after its last action: while the first stages still compute, the last ones
    already send. With `accumulate`, the whole schedule runs several times in a step.

    Gradients are those of one process, except that a batch norm sees one micro-batch at a time.

    >>> dlab.train(dlab.MLP, strategy=dlab.PipelineSGD(stages=2, microbatches=8), workers=4)
    """

    def __init__(
        self,
        stages: int = 2,
        schedule: str | Schedule | Sequence[Sequence[str]] = "1f1b",
        microbatches: int = 8,
        virtual: int = 1,
        recompute: bool = False,
        split: Split = split_by_parameters,
        bucket_mb: float = 1.0,
    ) -> None:
        if type(stages) is not int or stages < 1:
            raise ValueError(f"stages={stages!r}: give the number of ranks that hold one network, 1 or more")
        super().__init__(
            {"pp": stages}, schedule, microbatches, 0, virtual, recompute, split=split, bucket_mb=bucket_mb
        )
        self.stages = stages

    def data_group(self, transport: Transport) -> Transport:
        """Return the ranks that hold the same stages as this one."""
        if transport.size % self.stages:
            raise ValueError(
                f"{transport.size} workers cannot hold networks in stages on {self.stages} ranks each: use a multiple "
                f"of {self.stages} workers"
            )
        self.axes = {"dp": transport.size // self.stages, "pp": self.stages}
        return super().data_group(transport)
