"""A pipeline: each rank holds some stages of a network, and works through its row of a schedule.

Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from dlab.pipeline.actions import Action
from dlab.pipeline.makers import schedule as make_schedule
from dlab.pipeline.messages import PipelineMessages
from dlab.pipeline.microbatches import MicroBatch, Tensors, cut
from dlab.pipeline.program import BACKWARD, FORWARD, Key, Program
from dlab.pipeline.recording import ActionRecorder
from dlab.pipeline.schedules import Schedule
from dlab.pipeline.stage import Stage, as_tuple
from dlab.pipeline.tying import TiedWeights
from dlab.processes.worker import context
from dlab.transports import Deadlock, Emit, Transport

Loss = Callable[[Any, Any], torch.Tensor]


class Pipeline(nn.Module):
    """A network in stages, of which each rank keeps its own, and a schedule that says who does what when.

    Every rank makes the same list of `stages` (see `dlab.split`) and calls `step` with the same whole batch. A stage
    returns a tensor or a tuple of tensors, and the next one is called with these. `schedule` is the name of one
    (`dlab.schedule` lists them), a `dlab.Schedule`, or the rows of one, which then says how many micro-batches there
    are. `loss(outputs, labels)` is a mean over samples. With `recompute`, stages keep their inputs only and compute
    the rest again for the backward pass. With `amp`, they compute in bfloat16 where torch advises it.

    A parameter that is in stages of several ranks gets the sum of its gradients on each of them.

    >>> pipe = dlab.Pipeline(dlab.split(dlab.MLP(), 2), schedule="1f1b", microbatches=8)
    >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)  # of the stages that this rank holds
    >>> optimizer.zero_grad()
    >>> loss = pipe.step(images, labels)
    >>> optimizer.step()
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: str | Schedule | Sequence[Sequence[str]] = "1f1b",
        microbatches: int = 8,
        loss: Loss = F.cross_entropy,
        transport: Transport | None = None,
        recompute: bool = False,
        amp: bool = False,
    ) -> None:
        super().__init__()
        stages = list(stages)
        _check_stages(stages)
        self.transport = context.transport() if transport is None else transport
        self.schedule = find_schedule(schedule, len(stages), self.transport.size, microbatches)
        self.loss = loss
        rank_of = {number: self.schedule.rank_of(number) for number in range(len(stages))}
        self.mine = [number for number, rank in rank_of.items() if rank == self.transport.rank]
        self.stages = nn.ModuleDict({str(number): stages[number] for number in self.mine})
        self.peak_activations = 0  # in the last step: of how many micro-batches there were any here at the same time
        self._tied = TiedWeights(stages, rank_of, self.transport)
        self._stages = {number: Stage(number, stages[number], recompute) for number in self.mine}
        self._programs: dict[tuple[int, bool], Program] = {}
        self._broken = False
        self._results: dict[Key, Tensors] = {}  # that an action on this rank has made or received for another
        self._recorder: ActionRecorder | None = None
        self._steps = 0
        self.amp = amp
        device = next((each.device for each in self.parameters()), torch.device("cpu"))
        self._messages = PipelineMessages(self.transport, device)
        if context.is_worker():
            self.record(context.emit, every=10)

    @property
    def amp(self) -> bool:
        """Whether the stages autocast to bfloat16."""
        return self._amp

    @amp.setter
    def amp(self, on: bool) -> None:
        self._amp = on
        for stage in self._stages.values():
            stage.amp = on

    @property
    def waited(self) -> float:
        """The seconds of the last step in which this rank has waited for messages."""
        return self._messages.waited

    def record(self, emit: Emit, every: int = 1) -> None:
        """Let `emit(kind, data)` get an event for the schedule, and one for each action of every `every`-th step.

        A transport that records messages then does so in these steps only. The second step is recorded, too, and in
        a worker every tenth anyway. An event costs this rank about 20 us, and the notebook's process more.
        """
        self._recorder = ActionRecorder(self.schedule, self.transport.rank, emit, every)

    # running

    def step(self, inputs: Any, labels: Any, weight: float = 1.0, fewer: bool = False) -> torch.Tensor:
        """Run the schedule once: add all gradients to the parameters' `.grad`, and return the mean loss on every rank.

        `inputs` and `labels` are tensors or tuples of tensors, with a row per sample; micro-batches of unequal length
        count by their samples. The gradients are those of the mean loss times `weight`. With `fewer`, a batch of fewer
        samples than the schedule has micro-batches leaves some of these out.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients, but they are turned off here: call pipe(inputs) for outputs")
        microbatches = cut(inputs, labels, self.schedule.microbatches, fewer)
        recorder = self._recorder.begin(self._steps) if self._recorder is not None else None
        program = self._begin(microbatches, False, recorded=recorder is not None or self._recorder is None)
        held = self.peak_activations = 0
        losses: list[torch.Tensor] = []
        with self._running(), self._tied.adding():
            for action in program.row:
                microbatch = microbatches[action.microbatch]
                gathered = self._gather(action, microbatch, program)
                start = time.time() if recorder is not None else 0.0
                if action.kind == "F" and action.stage == program.last:
                    losses.append(self._finish(action, gathered, microbatch, weight))
                else:
                    self._compute(action, gathered)
                held += (action.kind == "F") - (action.kind in ("B", "W"))
                self.peak_activations = max(self.peak_activations, held)
                self._send(action, program)
                if recorder is not None:
                    recorder.add(action, start)
            (loss,) = self._share((torch.stack(losses).sum(),) if losses else None, program)
        self._steps += 1
        if recorder is not None:
            recorder.tell()
        return loss

    def forward(self, inputs: Any) -> Any:
        """Return the outputs of the whole batch on every rank, without gradients; use `pipe.eval()` to evaluate.

        A batch of fewer samples than there are micro-batches leaves some of these out.
        """
        microbatches = cut(inputs, None, self.schedule.microbatches, fewer=True)
        program = self._begin(microbatches, True, recorded=self._recorder is None)
        found: dict[int, Tensors] = {}
        with self._running():
            for action in program.row:
                gathered = self._gather(action, microbatches[action.microbatch], program)
                if action.kind == "F":
                    outputs = as_tuple(self._stages[action.stage].run(gathered), action.stage)
                    if action.stage == program.last:
                        found[action.microbatch] = outputs
                    else:
                        self._results[Key(FORWARD, action.stage + 1, action.microbatch)] = outputs
                self._send(action, program)
            rows = [found[number] for number in sorted(found)]
            whole = self._share(tuple(map(torch.cat, zip(*rows, strict=True))) if rows else None, program)
        return whole if len(whole) > 1 else whole[0]

    def _begin(self, microbatches: list[MicroBatch], forward_only: bool, recorded: bool) -> Program:
        if self._broken:
            raise RuntimeError(
                "this pipeline has failed in the middle of a step, so messages may be left: make a new one"
            )
        place = len(microbatches), forward_only
        if place not in self._programs:
            self._programs[place] = Program(self.schedule, self.transport.rank, *place)
        forms = [(tuple(x.shape), x.dtype) for each in microbatches for x in each.inputs]
        samples = sum(len(each.inputs[0]) for each in microbatches)
        kind = forward_only, self.training, self.amp, *forms
        self._messages.begin(self._programs[place], kind, samples, recorded)
        return self._programs[place]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Tell the other ranks why a step fails here, as far as they can still be told."""
        try:
            yield
        except BaseException as problem:
            self._broken = True
            self._results.clear()
            for stage in self._stages.values():
                stage.activations.clear()
            if isinstance(problem, Exception) and not isinstance(problem, (ConnectionError, TimeoutError, Deadlock)):
                self._messages.fail(problem)
            raise

    def _gather(self, action: Action, microbatch: MicroBatch, program: Program) -> Tensors:
        """Return what an action needs from a neighbour, and wait for it if it is on another rank."""
        if action.kind in ("F", "RECV_F"):
            if action.stage == 0:
                return microbatch.inputs
            key, source = Key(FORWARD, action.stage, action.microbatch), action.stage - 1
        elif action.kind in ("B", "I", "RECV_B"):
            key, source = Key(BACKWARD, action.stage, action.microbatch), action.stage + 1
        else:
            return ()
        if key in self._results:
            return self._results.pop(key)
        return tuple(self._messages.receive(key, program.rank_of[source]))

    def _compute(self, action: Action, gathered: Tensors) -> None:
        """Do what an action says, and put its result where a neighbour or a send takes it."""
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.kind == "F":
            self._results[Key(FORWARD, stage.number + 1, microbatch)] = stage.forward(microbatch, gathered)
        elif action.kind in ("B", "I"):
            backward = stage.backward if action.kind == "B" else stage.backward_input
            gradients = backward(microbatch, gathered)
            if stage.number:
                self._results[Key(BACKWARD, stage.number - 1, microbatch)] = gradients
        elif action.kind == "W":
            stage.backward_weight(microbatch)
        elif action.kind.startswith("RECV"):
            direction = FORWARD if action.kind == "RECV_F" else BACKWARD
            self._results[Key(direction, stage.number, microbatch)] = gathered

    def _finish(self, action: Action, gathered: Tensors, microbatch: MicroBatch, weight: float) -> torch.Tensor:
        """Run the last stage and the loss, and return its part of the mean over the whole batch."""
        (loss,) = self._stages[action.stage].forward(
            action.microbatch, gathered, lambda outputs: _checked_loss(self.loss(outputs, microbatch.labels))
        )
        gradient = torch.full_like(loss, microbatch.share * weight, requires_grad=False)
        self._results[Key(BACKWARD, action.stage, action.microbatch)] = (gradient,)
        return loss.detach() * microbatch.share

    def _send(self, action: Action, program: Program) -> None:
        if action in program.sends:
            key, destination = program.sends[action]
            self._messages.send(key, self._results.pop(key), destination)

    def _share(self, result: Tensors | None, program: Program) -> Tensors:
        """Give all ranks the result of the rank that has the last stage, and end the step."""
        if result is None:
            result = tuple(self._messages.receive(program.result, program.rank_of[program.last]))
        else:
            for other in program.others:
                self._messages.send(program.result, result, other)
        self._messages.end()
        return result

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a pipeline cannot be copied or sent to another process, since it holds this one's transport: return "
            "pipe.state_dict(), which has this rank's stages"
        )

    def __repr__(self) -> str:
        held = f"stages {', '.join(map(str, self.mine))} of {self.schedule.stages}"
        name = self.schedule.name or "a schedule of your own"
        return f"<Pipeline on rank {self.transport.rank} of {self.transport.size}: {held}, {name}>"


def find_schedule(
    schedule: str | Schedule | Sequence[Sequence[str]], stages: int, ranks: int, microbatches: int
) -> Schedule:
    """Make the schedule that is meant, and check that it fits the stages and the ranks."""
    if isinstance(schedule, str):
        if stages % ranks:
            raise ValueError(f"{stages} stages cannot be divided among {ranks} ranks: use a multiple of {ranks} stages")
        virtual = stages // ranks
        if schedule == "zbv" and virtual != 2:
            raise ValueError(f"zbv has two stages on each rank, so {ranks} ranks need {2 * ranks} stages, not {stages}")
        return make_schedule(schedule, ranks, microbatches, virtual)
    found = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    if (found.ranks, found.stages) != (ranks, stages):
        raise ValueError(
            f"the schedule is for {found.stages} stages on {found.ranks} ranks, but there are {stages} stages on "
            f"{ranks} ranks: give it a row per rank and an action for each stage"
        )
    return found


def _check_stages(stages: Sequence[Any]) -> None:
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise TypeError(f"stage {number} is {stage!r:.80}, not a torch.nn.Module: give a list of modules")
    if not stages:
        raise ValueError("a pipeline has at least one stage, but the list of stages is empty")


def _checked_loss(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise ValueError(f"loss() returned {found}: it must return the mean over the samples, a tensor with one number")
