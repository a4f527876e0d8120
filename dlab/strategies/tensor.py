"""Tensor parallelism in the training loop: `AutoParallel` cuts the network over some ranks; other ranks have copies.

It is a `Hybrid` on a mesh with the axes dp and tp: the ranks of a line along tp hold one network together and get the
same samples; each of these lines has its own samples, and gradients are averaged along dp. Taught in
`07_operator_parallel.ipynb`.
"""

from __future__ import annotations

from dlab.strategies.hybrid.plan import MakeLayouts
from dlab.strategies.hybrid.strategy import Hybrid
from dlab.transports import Transport


class TensorParallel(Hybrid):
    """Cuts the network over `ranks` neighbouring ranks; any further `ranks` workers train a copy on other samples.

    `layouts(model, layout)` returns the layouts of parameters and modules by name, as `AutoParallel` takes them, on a
    layout with the axis "tp"; by default it is `dlab.megatron_layouts`, which cuts pairs of linear layers. A parameter
    that it does not name stays whole. Each rank holds its part of the weights, the gradients and the optimizer's state.
    A step averages gradients as `AllReduceSGD` does, along dp only; the collectives of the cut layers go along tp.

    >>> dlab.train(dlab.RowTransformer, strategy=dlab.TensorParallel(ranks=2), workers=4)
    """

    def __init__(
        self, ranks: int = 2, layouts: MakeLayouts | None = None, bucket_mb: float = 1.0, overlap: bool = True
    ) -> None:
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: give the number of ranks that hold one network, 1 or more")
        super().__init__({"tp": ranks}, layouts=layouts, bucket_mb=bucket_mb, overlap=overlap)
        self.ranks = ranks

    def data_group(self, transport: Transport) -> Transport:
        """Return the ranks that hold the same part of the network as this one."""
        if transport.size % self.ranks:
            raise ValueError(
                f"{transport.size} workers cannot hold networks that are cut over {self.ranks} ranks each: use a "
                f"multiple of {self.ranks} workers"
            )
        self.axes = {"dp": transport.size // self.ranks, "tp": self.ranks}
        return super().data_group(transport)
