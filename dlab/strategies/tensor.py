"""Tensor parallelism in the training loop: `AutoParallel` cuts the network over some ranks; other ranks have copies.

On a mesh with the axes dp and tp, the ranks of a line along tp hold one network together and get the same samples. Each
of these lines has its own samples; gradients are averaged along dp. Taught in `07_operator_parallel.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from dlab.layout import Layout, Placed, replicated
from dlab.mesh import Mesh
from dlab.sharding.megatron import megatron_layouts
from dlab.sharding.parallel import AutoParallel
from dlab.strategies.flat import AllReduceSGD
from dlab.strategies.objective import Batch, Objective
from dlab.transports import Transport

MakeLayouts = Callable[[nn.Module, Layout], dict[str, Placed]]
Bounds = list[list[int]]  # first and last index of a part, in each dimension


class TensorParallel(AllReduceSGD):
    """Cuts the network over `ranks` neighbouring ranks; any further `ranks` workers train a copy on other samples.

    `layouts(model, layout)` returns the layouts of parameters and modules by name, as `AutoParallel` takes them, on a
    layout with the axis "tp"; by default it is `dlab.megatron_layouts`, which cuts pairs of linear layers. A parameter
    that it does not name stays whole. Each rank holds its part of the weights, the gradients and the optimizer's state.
    A step averages gradients as `AllReduceSGD` does, along dp only; the collectives of the cut layers go along tp.

    >>> dlab.train(dlab.RowTransformer, strategy=dlab.TensorParallel(ranks=2), workers=4)
    """

    sharded = True

    def __init__(
        self, ranks: int = 2, layouts: MakeLayouts | None = None, bucket_mb: float = 1.0, overlap: bool = True
    ) -> None:
        super().__init__(bucket_mb, overlap)
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: give the number of ranks that hold one network, 1 or more")
        if layouts is not None and not callable(layouts):
            raise TypeError(f"layouts={layouts!r}: give a function layouts(model, layout), as dlab.megatron_layouts is")
        self.ranks, self.layouts = ranks, layouts

    @property
    def elastic(self) -> bool:
        """No: a rank that dies takes its part of the network with it."""
        return False

    def data_group(self, transport: Transport) -> Transport:
        """Return the ranks that hold the same part of the network as this one."""
        if transport.size % self.ranks:
            raise ValueError(
                f"{transport.size} workers cannot hold networks that are cut over {self.ranks} ranks each: use a "
                f"multiple of {self.ranks} workers"
            )
        self._mesh = Mesh((transport.size // self.ranks, self.ranks), ("dp", "tp"), transport)
        return self._mesh["dp"]

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make the network, and keep this rank's part of it; all parameters get their layouts now."""
        model, layout = make_model(), Layout((self.ranks,), ("tp",))
        given = (self.layouts or megatron_layouts)(model, layout)
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        if not given and self.ranks > 1:
            raise ValueError(
                f"nothing in {type(model).__name__} can be cut over {self.ranks} ranks: use a number that divides the "
                "outputs of its linear layers (or its heads), or say with layouts= what to cut"
            )
        self._placed = {name: replicated(layout, len(shape)) for name, shape in self._shapes.items()} | given
        self._parallel = AutoParallel(model, transport=self._mesh["tp"], layouts=self._placed)
        return model

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make the copies of each part equal, and return the cut network, which takes and returns whole tensors."""
        super().begin(model, optimizer, transport)
        return cast(nn.Module, self._parallel)

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Compute the gradients of this rank's parts; the first rank of a line reports the loss for all of it."""
        loss = super().backward(module, batch, objective)
        return loss if self._mesh["tp"].rank == 0 else None

    # the whole model, and checkpoints

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Gather the whole model's state along tp; every rank must call it."""
        return self._parallel.state_dict()

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's parts of the state of a whole model."""
        self._parallel.load_state_dict(state)

    def _slices(self, name: str) -> tuple[slice, ...]:
        return self._placed[name].slices_of(self._mesh["tp"].rank, self._shapes[name])

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state, and the bounds of its part of each weight."""
        bounds: list[Bounds] = [[[each.start, each.stop] for each in self._slices(name)] for name in self._order()]
        return {"optimizer": self.optimizer.state_dict(), "bounds": bounds}

    def _order(self) -> list[str]:
        """Return the names of the parameters in the order in which the optimizer numbers them."""
        names = {id(each): name for name, each in self.model.named_parameters()}
        return [names[id(each)] for group in self.optimizer.param_groups for each in group["params"]]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's part from those of all ranks, which may have cut the network in another way."""
        mine: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._order()):
            keys = states[0]["optimizer"]["state"].get(number, {})
            parts = [(state["optimizer"]["state"][number], state["bounds"][number]) for state in states if keys]
            mine[number] = {key: self._restored(name, [(part[key], where) for part, where in parts]) for key in keys}
        groups = self.optimizer.state_dict()["param_groups"]
        saved = states[0]["optimizer"]["param_groups"]
        hyper = [{**theirs, "params": own["params"]} for theirs, own in zip(saved, groups, strict=True)]
        self.optimizer.load_state_dict({"state": {n: each for n, each in mine.items() if each}, "param_groups": hyper})

    def _restored(self, name: str, parts: list[tuple[Any, Bounds]]) -> Any:
        """Put the saved parts of one value of a weight's optimizer state together, and return this rank's part."""
        first, where = parts[0]
        if not isinstance(first, torch.Tensor) or list(first.shape) != [end - begin for begin, end in where]:
            return first  # the number of steps, the same for all
        whole = torch.empty(self._shapes[name], dtype=first.dtype)
        for value, bounds in parts:
            whole[tuple(slice(*each) for each in bounds)] = value
        return whole[self._slices(name)].clone()
