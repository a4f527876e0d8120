"""This rank's part of a model: its stages, cut along tp, and nothing of the others. Taught in `10_hybrid.ipynb`."""

from __future__ import annotations

from typing import Any

from torch import nn

from dlab.kinds import SLICE, SliceData
from dlab.mesh import Mesh
from dlab.processes.worker.context import emit
from dlab.sharding.home import Home
from dlab.sharding.parallel import AutoParallel
from dlab.strategies.hybrid.plan import HybridPlan
from dlab.transports import Transport


class CutStage(nn.Module):
    """A stage whose weights are cut over a line of ranks, and that is called as before: whole in, whole out."""

    communicates = True  # as `Stage` must know

    def __init__(self, stage: nn.Module, line: Transport, plan: HybridPlan) -> None:
        super().__init__()
        self.stage = stage
        layouts = {name: plan.layouts[plan.names[id(each)]] for name, each in stage.named_parameters()}
        self._parallel = AutoParallel(stage, transport=line, layouts=layouts)

    def forward(self, *inputs: Any) -> Any:
        """Run the stage; all ranks of the line have the same inputs, and get the same outputs."""
        return self._parallel(*inputs)


def keep_own_part(plan: HybridPlan, mesh: Mesh, model: nn.Module) -> list[nn.Module]:
    """Cut the parameters of this rank's stages, drop all others from the model, and return the stages.

    A stage in which nothing is cut runs as it is, on all ranks of its line along tp.
    """
    rank, line = mesh.transport.rank, mesh["tp"]
    mine = plan.stages_of(rank)
    parameters = dict(model.named_parameters())
    for name, slices in plan.slices_of(rank).items():
        parameter = parameters[name]
        if line.size > 1:
            Home(parameter, name).settle(plan.layouts[name], line.rank)
        else:
            spans = [(each.start, each.stop) for each in slices]
            told: SliceData = {"tensor": name, "shape": list(parameter.shape), "slice": spans}
            emit(SLICE, told)
    stages = [
        CutStage(stage, line, plan) if number in mine and plan.is_cut(stage) else stage
        for number, stage in enumerate(plan.stages)
    ]
    held = {id(each) for number in mine for each in _tensors_of(plan.stages[number])}
    for module in (model, *plan.stages):  # a stage may have modules that are not in the model
        _drop_others(module, held)
    return stages


def _tensors_of(module: nn.Module) -> list[Any]:
    return [each for one in module.modules() for each in (*one._parameters.values(), *one._buffers.values())]


def _drop_others(model: nn.Module, kept: set[int]) -> None:
    """Remove parameters and buffers that this rank does not hold from the model; its modules and names stay."""
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name in [name for name, each in own.items() if each is not None and id(each) not in kept]:
                del own[name]
