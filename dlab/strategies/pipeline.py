"""Pipeline parallelism in the training loop: a network in stages on several ranks, and copies of those ranks.

On a mesh with the axes dp and pp, the ranks of a line along pp hold one network together and get the same samples; the
lines have different samples, and average their gradients along dp. Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dlab.collectives import broadcast
from dlab.mesh import Mesh
from dlab.pipeline import Pipeline, Schedule
from dlab.pipeline.runner import find_schedule
from dlab.pipeline.splitting import split as split_by_parameters
from dlab.strategies.base import Told
from dlab.strategies.flat import AllReduceSGD
from dlab.strategies.objective import Batch, Objective
from dlab.transports import Transport

Split = Callable[[nn.Module, int], list[nn.Module]]


class PipelineSGD(AllReduceSGD):
    """Splits the network into stages on `stages` neighbouring ranks; more workers than that are data parallel.

    `schedule` is a name (see `dlab.schedule`), a `dlab.Schedule` or its rows; `virtual` says how many stages a rank has
    in the schedules "interleaved" and "zb1p". `split(model, n)` returns the n stages, by default `dlab.split`. Each
    rank holds the weights, the gradients and the optimizer's state of its stages. A step averages gradients as
    `AllReduceSGD` does, along dp only, after its last action: while the first stages still compute, the last ones
    already send. With `accumulate`, the whole schedule runs several times in a step.

    Gradients are those of one process, except that a batch norm sees one micro-batch at a time.

    >>> dlab.train(dlab.MLP, strategy=dlab.PipelineSGD(stages=2, microbatches=8), workers=4)
    """

    sharded = True

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
        super().__init__(bucket_mb, overlap=False)
        if type(stages) is not int or stages < 1:
            raise ValueError(f"stages={stages!r}: give the number of ranks that hold one network, 1 or more")
        if type(virtual) is not int or virtual < 1:
            raise ValueError(f"virtual={virtual!r}: give the number of stages on each rank, 1 or more")
        if not callable(split):
            raise TypeError(f"split={split!r}: give a function split(model, n), as dlab.split is")
        self.stages, self.schedule, self.microbatches, self.virtual = stages, schedule, microbatches, virtual
        self.recompute, self.split = recompute, split
        self._planned = self._plan()
        self._waited = 0.0

    def _plan(self) -> Schedule:
        if isinstance(self.schedule, str):
            each = 2 if self.schedule == "zbv" else self.virtual
            return find_schedule(self.schedule, each * self.stages, self.stages, self.microbatches)
        planned = self.schedule if isinstance(self.schedule, Schedule) else Schedule(self.schedule)
        return find_schedule(planned, planned.stages, self.stages, self.microbatches)

    @property
    def elastic(self) -> bool:
        """No: a rank that dies takes its stages with it."""
        return False

    def data_group(self, transport: Transport) -> Transport:
        """Return the ranks that hold the same stages as this one."""
        if transport.size % self.stages:
            raise ValueError(
                f"{transport.size} workers cannot hold networks in stages on {self.stages} ranks each: use a multiple "
                f"of {self.stages} workers"
            )
        self._mesh = Mesh((transport.size // self.stages, self.stages), ("dp", "pp"), transport)
        return self._mesh["dp"]

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make the network, and keep this rank's stages of it."""
        model = make_model()
        parts = list(self.split(model, self._planned.stages))
        self._check_parts(model, parts)
        pipe = Pipeline(parts, self._planned, loss=self._loss, transport=self._mesh["pp"], recompute=self.recompute)
        self._find_names(model, parts, pipe)
        self._pipe = pipe
        return pipe

    def _check_parts(self, model: nn.Module, parts: list[nn.Module]) -> None:
        """Refuse stages that do not make up the model, and a rank that would have nothing to learn."""
        kind, planned = type(model).__name__, self._planned
        if len(parts) != planned.stages:
            raise ValueError(f"split() made {len(parts)} stages of {kind}, but the schedule has {planned.stages}")
        held = {id(each) for part in parts for each in part.state_dict(keep_vars=True).values()}
        lost = [name for name, each in model.state_dict(keep_vars=True).items() if id(each) not in held]
        if lost:
            raise ValueError(f"no stage of {kind} holds {', '.join(lost[:3])}: each of its blocks must be in a stage")
        for rank in range(planned.ranks):
            own = [each for number in planned.stages_of(rank) for each in parts[number].parameters()]
            if not any(each.requires_grad for each in own):
                raise ValueError(
                    f"rank {rank} would hold no parameters of {kind}, which is too small for {planned.stages} stages: "
                    "use fewer, or say with split= where to cut"
                )

    def _find_names(self, model: nn.Module, parts: list[nn.Module], pipe: Pipeline) -> None:
        """Find out, for each name in the whole model, which rank has it, and what it is called there."""
        rank_of = {
            id(each): self._planned.rank_of(number)
            for number, part in reversed(list(enumerate(parts)))
            for each in part.state_dict(keep_vars=True).values()
        }
        here = {id(each): name for name, each in pipe.state_dict(keep_vars=True).items()}
        whole = model.state_dict(keep_vars=True)
        self._ranks = {name: rank_of[id(each)] for name, each in whole.items()}
        self._like = {name: torch.empty_like(each, device="meta") for name, each in whole.items()}
        self._here = {name: here[id(each)] for name, each in whole.items() if id(each) in here}

    def _loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._objective.loss(outputs, labels)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make the copies of each stage equal; each rank of a line draws other random numbers for dropout."""
        torch.manual_seed(torch.initial_seed() + transport.size * self._mesh["pp"].rank)
        return super().begin(model, optimizer, transport)

    # one step

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Run the schedule; the first rank of a line reports the loss for all of it."""
        self._objective, self._pipe.amp = objective, objective.amp
        total = 0.0
        for piece in batch.split(min(objective.pieces, len(batch.labels))):
            loss = self._pipe.step(piece.inputs, piece.labels, piece.weight, fewer=True)
            total += loss.item() * (len(piece.labels) / len(batch.labels))
            self._waited += self._pipe.waited
        return total if self._mesh["pp"].rank == 0 else None

    def step(self) -> Told:
        """Average the gradients along dp, and update the weights; the time in which the pipeline waited counts."""
        told = super().step()
        waited, self._waited = self._waited, 0.0
        return {**told, "wait": told["wait"] + waited}

    # the whole model, and checkpoints

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Give every rank the state of all stages: a broadcast along pp for each tensor. Every rank must call it."""
        own, whole = self._pipe.state_dict(), {}
        device = next(self._pipe.parameters()).device
        for name, like in self._like.items():
            mine = self._ranks[name] == self._mesh["pp"].rank
            whole[name] = own[self._here[name]].clone() if mine else torch.empty_like(like, device=device)
            broadcast(whole[name], self._mesh["pp"], root=self._ranks[name])
        return whole

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's stages from the state of a whole model."""
        if missing := sorted(set(state) ^ set(self._like)):
            raise RuntimeError(f"only one of the two models has {', '.join(missing[:3])}")
        for name, like in self._like.items():
            if state[name].shape != like.shape:
                there, here = tuple(state[name].shape), tuple(like.shape)
                raise RuntimeError(f"size mismatch for {name}: {there} was saved, and the model here has {here}")
        self._pipe.load_state_dict({here: state[name] for name, here in self._here.items()})

    def state(self) -> dict[str, Any]:
        """Return the state of this rank's optimizer, and the names of its parameters in the whole model."""
        return {"optimizer": self.optimizer.state_dict(), "names": self._order()}

    def _order(self) -> list[str]:
        """Return the names of this rank's parameters in the order in which the optimizer numbers them."""
        own = {id(each): name for name, each in self._pipe.state_dict(keep_vars=True).items()}
        names = {here: name for name, here in reversed(self._here.items())}  # the first of several, if it is tied
        return [names[own[id(each)]] for group in self.optimizer.param_groups for each in group["params"]]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore the optimizer from the states of all ranks, which may have held other stages."""
        saved = {
            name: state["optimizer"]["state"][number]
            for state in states
            for number, name in enumerate(state["names"])
            if number in state["optimizer"]["state"]
        }
        mine = {number: saved[name] for number, name in enumerate(self._order()) if name in saved}
        groups = self.optimizer.state_dict()["param_groups"]
        before = states[0]["optimizer"]["param_groups"]
        hyper = [{**theirs, "params": own["params"]} for theirs, own in zip(before, groups, strict=True)]
        self.optimizer.load_state_dict({"state": mine, "param_groups": hyper})
