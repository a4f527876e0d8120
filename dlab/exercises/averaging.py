"""The exercise of `00_tour.ipynb`, "one message instead of eight": gradients averaged by a single all-reduce."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlab import collectives
from dlab.backend import NAME
from dlab.exercises.averages import Gradients, explain_wrong
from dlab.exercises.own import each_call, is_inside_dlab
from dlab.exercises.sandbox import describe_line, join, name_ranks
from dlab.models import SmallCNN
from dlab.processes.between.errors import Report, WorkerError
from dlab.processes.parent.cluster import Cluster
from dlab.processes.worker.context import device, rank, world_size
from dlab.reduction import allreduce, average_gradients

Average = Callable[[nn.Module], object]
Call = tuple[str, list[int]]  # the name of a collective and the sizes of the tensors that a rank passes to it

OTHER_SIZES = (3, 2, 5)  # tried after the learner's own cluster; starting a cluster takes a tenth of a second
LIMIT = 20.0  # seconds on one cluster; a correct answer takes a tenth of a second
RETURNED, FAILED = "returned", "failed"  # reported by a rank instead of the name of its next collective
_OWN = tuple(getattr(collectives, name) for name in collectives.__all__ if name.endswith("_allreduce"))
_WAITS = ("wait", "synchronize", "is_completed", "get_future")
_NAMES = {"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "allgather": "all_gather"}
_ONCE = {"all_reduce", "all_reduce_coalesced", "allreduce", *(each.__name__ for each in _OWN)}


def check_one_message(average: Any, cluster: Cluster) -> str:
    """Try `average(model)` on the cluster, then with 3, 2 and 5 ranks: "well done …", or "not yet: …" with the reason.

    The function must leave the mean over the ranks in every `parameter.grad`, and use a single all-reduce.

    >>> check_one_message(dlab.average_gradients, cluster)
    "not yet: this calls dlab's own average_gradients, which sends a message for each parameter: …"
    """
    if not callable(average):
        return f"not yet: {average!r} is not a function: write def my_average(model)."
    try:
        # the backend `dlab` is written in Python, so torch does not see its collectives as operators
        with Cluster(cluster.workers) if cluster.backend == NAME else nullcontext(cluster) as given:
            if problem := _AverageTrial(average, SmallCNN).problem(given):
                return f"not yet: {problem}."
        for size in OTHER_SIZES:
            if size != cluster.workers:
                with Cluster(size) as another:
                    if problem := _AverageTrial(average, _other_network).problem(another):
                        return f"not yet: with {size} ranks and another network, {problem}."
    except WorkerError as error:  # a rank has died or did not return
        return f"not yet: {error}"
    except TypeError as error:  # the function cannot be sent to workers
        return f"not yet: {error}."
    return "well done: the right mean, with one message instead of eight."


def _other_network() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2))


class _Ended(BaseException):
    """Ends the learner's function on every rank once it is clear that it cannot continue."""


class _AverageTrial:
    """Runs the learner's function on all ranks of a cluster, with different gradients and weights on each rank."""

    def __init__(self, average: Average, network: Callable[[], nn.Module]) -> None:
        self.average, self.network = average, network
        self.__name__ = getattr(average, "__name__", "my_average")  # the cluster shows it as the name of the run

    def problem(self, cluster: Cluster) -> str | None:
        """Return what is wrong, as a sentence without a full stop, or None."""
        found = cluster.run(self, timeout=LIMIT)
        calls, waited, reports = found[0]["calls"], found[0]["waited"], [each["report"] for each in found]
        if any(reports):
            return self._describe_failure(reports)
        if found[0]["ended"]:
            return _explain_disagreement(found[0]["ended"])
        if "average_gradients" in calls:
            return (
                "this calls dlab's own average_gradients, which sends a message for each parameter: "
                "pack the gradients into one tensor yourself, and call all_reduce once"
            )
        if not waited:
            return (
                "all_reduce with async_op=True returns at once, before the sum is there: keep what it returns, "
                "work = dist.all_reduce(…), and call work.wait() before you use the result"
            )
        own = [self._inputs(rank) for rank in range(cluster.workers)]
        if problem := explain_wrong(own, [(each["gradients"], each["weights"]) for each in found], calls):
            return problem
        return _explain_calls([call for call in calls if call != "barrier"])

    def _inputs(self, rank: int) -> tuple[Gradients, Gradients]:
        """Return a rank's gradients and weights by parameter name, without touching the notebook's random numbers."""
        dice = torch.Generator().manual_seed(rank)
        shapes = {name: parameter.shape for name, parameter in self._model().named_parameters()}
        rows = [{name: torch.randn(shape, generator=dice) for name, shape in shapes.items()} for _ in range(2)]
        return rows[0], rows[1]

    def _model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
            return self.network()

    def _describe_failure(self, reports: list[Report | None]) -> str:
        ranks = [rank for rank, report in enumerate(reports) if report]
        report = next(filter(None, reports))
        frames = [traceback.FrameSummary(*frame) for frame in report.chain[0][0]]
        hint = "; gloo knows ReduceOp.SUM: divide by dlab.world_size() yourself" * ("ReduceOp" in report.message)
        return f"{name_ranks(ranks)} ended in {report.message}{describe_line(frames, self.__name__)}{hint}"

    # this part runs in the workers

    def __call__(self) -> dict[str, Any]:
        model = self._model().to(device())
        gradients, weights = self._inputs(rank())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
            parameter.grad = gradients[name].to(device(), copy=True)
        watched, report = _CollectiveCalls(), None
        try:
            with watched, each_call(watched.note_call, allreduce, average_gradients, *_OWN, builtins=_WAITS):
                self.average(model)
            watched.meet((RETURNED, []))
        except _Ended:
            pass
        except Exception as problem:
            report = Report.of(problem)
            watched.leave()
        watched.close()
        return {
            "gradients": {name: _plain(each.grad) for name, each in model.named_parameters()},
            "weights": {name: _plain(each) for name, each in model.named_parameters()},
            "calls": watched.calls,
            "waited": not watched.pending,
            "ended": watched.ended,
            "report": report,
        }


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float32, copy=True)


class _CollectiveCalls(TorchDispatchMode):
    """Lets the ranks agree on each collective before it starts, so that a missing rank is known at once.

    It sees torch's collectives as operators, below `torch.distributed`, whatever name the learner calls them by.
    """

    def __init__(self) -> None:
        super().__init__()
        self._group = dist.new_group(backend="gloo")
        self._busy = False
        self.calls: list[str] = []
        self.pending = False  # is an operation with async_op=True still unfinished?
        self.ended: list[Call] = []  # the call of each rank, where they did not agree

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Agree on the operator with the other ranks first if it is a collective."""
        schema = func._schema.arguments if "c10d" in func.namespace else []
        arguments = {each.name: each.default_value for each in schema}
        arguments |= dict(zip(arguments, args, strict=False)) | (kwargs or {})
        collective = not self._busy and bool(arguments.keys() & {"process_group", "group_name"})
        if collective and not is_inside_dlab(except_for=average_gradients):
            name = func.__name__.partition(".")[0].strip("_")
            self._enter(_NAMES.get(name, name), arguments)
            self.pending = bool(arguments.get("async_op"))
        return func(*args, **(kwargs or {}))

    def note_call(self, name: str) -> None:
        """Note a call of one of dlab's own functions, or of a function that waits for a collective."""
        if name in _WAITS:
            self.pending = False
        elif name == average_gradients.__name__:
            self.calls.append(name)
        else:
            self._enter(name, {})

    def _enter(self, name: str, arguments: dict[str, Any]) -> None:
        tensors = arguments.get("tensors", arguments.get("input", []))
        sizes = [each.numel() for each in ([tensors] if isinstance(tensors, Tensor) else tensors)]
        if name not in ("send", "recv"):  # only two ranks take part
            self.meet((name, sizes if name.startswith("all_reduce") else []))
        self.calls.append(name)

    def meet(self, mine: Call) -> None:
        """Continue only if all ranks are about to make the same call."""
        calls: list[Any] = [None] * world_size()
        self._busy = True
        dist.all_gather_object(calls, mine, group=self._group)
        self._busy = False
        if any(call != mine for call in calls):
            self.ended = calls
            raise _Ended

    def leave(self) -> None:
        """Tell the other ranks that this one has failed, unless they know it already."""
        try:
            self.meet((FAILED, []))
        except _Ended:
            pass

    def close(self) -> None:
        """Free the group over which the ranks agreed; all of them must be done with it."""
        dist.destroy_process_group(self._group)


def _explain_disagreement(calls: list[Call]) -> str:
    """Explain that some ranks wait in a collective that others never call."""
    names = [name for name, _ in calls]
    gone = [rank for rank, name in enumerate(names) if name == RETURNED]
    if gone:
        waiting = [rank for rank, name in enumerate(names) if name != RETURNED]
        return (
            f"{name_ranks(waiting)} {'calls' if len(waiting) == 1 else 'call'} {names[waiting[0]]}, but "
            f"{name_ranks(gone)} {'has' if len(gone) == 1 else 'have'} returned without it: "
            "every rank must call it, or the others wait for ever"
        )
    other = next(rank for rank, call in enumerate(calls) if call != calls[0])
    what = [f"{name} with {' + '.join(map(str, sizes)) or 'its'} numbers" for name, sizes in (calls[0], calls[other])]
    return f"rank 0 calls {what[0]}, but rank {other} {what[1]}: all ranks must call the same, with the same sizes"


def _explain_calls(calls: list[str]) -> str | None:
    """Explain why a correct mean was not computed by one all-reduce; None if it was."""
    if len(calls) == 1 and calls[0] in _ONCE:
        return None
    if not calls:
        return "the mean is right, but no all_reduce was seen: pack the gradients into one tensor, and reduce that"
    if len(set(calls)) == 1 and calls[0] in _ONCE:
        return f"{calls[0]} was called {len(calls)} times: pack the gradients into one tensor first"
    how = join([name if times == 1 else f"{times} times {name}" for name, times in Counter(calls).items()])
    return (
        f"the mean is right, but it took {how}: one all_reduce of the packed gradients does it, with the fewest bytes"
    )
