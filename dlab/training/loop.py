"""The training loop: what every rank does, with its part of the model and of the data, and a strategy that joins them.

The strategy says who holds what; see `Strategy`. Checkpoints are made of a trainer in `state.py`, and what happens when
somebody dies is in `elastic.py`. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from dlab.data.batches import take
from dlab.data.sampler import TrainingSampler
from dlab.processes.worker.context import knob
from dlab.processes.worker.tracing import watch
from dlab.strategies.objective import Batch, Objective
from dlab.training.checkpoints import open_checkpoint
from dlab.training.checks import check_network, check_rate
from dlab.training.elastic import find_recovery, stand_together
from dlab.training.evaluation import evaluate
from dlab.training.plan import RankResult, Training
from dlab.training.saving import Folder, FolderInUse
from dlab.training.state import resume, save
from dlab.transports import Transport

_making = threading.Lock()  # ranks of a rehearsal are threads with one source of random numbers


class Trainer:
    """What one rank does in a training, from the first step to its result."""

    def __init__(
        self,
        plan: Training,
        transport: Transport,
        device: torch.device,
        tell: Callable[..., None],
        folder: Folder | None = None,  # for checkpoints
    ) -> None:
        self.plan, self.device, self.tell, self.folder = plan, device, tell, folder
        if folder is not None and transport.rank == 0:
            folder.claim(plan.resume, plan.overwrite)
        self.data = plan.load()
        self.objective = Objective(plan.loss, plan.accumulate, plan.amp)
        self.saved = 0  # after how many steps, the last time
        self.started = time.perf_counter()
        self.enter(transport)
        self.start()
        # of all who began, and which of them I am
        self.family = (stand_together(transport), transport.rank) if plan.elastic else None

    def enter(self, transport: Transport) -> None:
        """Be one of these ranks, with a strategy that knows nothing yet."""
        self.transport = transport
        self.strategy = copy.deepcopy(self.plan.strategy)
        self.data_group = self.strategy.data_group(transport)

    def start(self) -> None:
        """Before the first step of all."""
        self.first_ranks = self.data_group.size
        self.sampler = TrainingSampler(
            self.data, self.first_ranks, self.plan.batch_size, self.plan.order, self.plan.seed
        )
        self.epoch = self.step = self.steps = 0  # the next step: in its epoch, and of all
        self.losses: list[float] = []
        self.counts: list[int] = []

    def join(self) -> None:
        """Make a model, or this rank's part of it, and begin the strategy with the other ranks."""
        if self.plan.elastic:
            stand_together(self.transport)
        self.model = self.strategy.build(self.make_model, self.transport).to(self.device)
        with _making:  # what is random in training differs between the ranks of a data group
            torch.manual_seed(self.plan.seed + 1 + self.data_group.rank)
        if self.plan.watch:  # before the strategy, which may change a gradient as soon as it is there
            watch(self.model, self.plan.watch)
        self.optimizer = self.plan.make_optimizer(self.model.parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.module = self.strategy.begin(self.model, self.optimizer, self.transport)

    def make_model(self) -> nn.Module:
        """The whole model, as the seed makes it: the same on every rank."""
        with _making:
            torch.manual_seed(self.plan.seed)
            return check_network(self.plan.model())

    def run(self) -> RankResult:
        """To the end, with whoever is there."""
        begin = self.begin
        while True:
            try:
                begin()
                self.learn_all()
                self.strategy.end()
                if self.folder is not None and self.strategy.transport.rank == 0:
                    with suppress(FolderInUse):  # else nobody is left to clear up, if rank 0 has died
                        self.folder.take()
                return self.result()
            except ConnectionError:
                recovery = find_recovery(self)
                if recovery is None:
                    raise
                begin = recovery

    def begin(self) -> None:
        """With new weights, or with those of a checkpoint."""
        self.join()
        if self.plan.resume is not None:
            resume(self, open_checkpoint(self.plan.resume))

    def learn_all(self) -> None:
        """The steps that are left, and checkpoints."""
        while self.epoch < self.plan.epochs:
            while self.step < self.sampler.steps(self.epoch):
                self.learn()
                if self.folder is not None and self.plan.every and self.steps % self.plan.every == 0:
                    save(self)
            self.epoch, self.step = self.epoch + 1, 0
            if self.folder is not None and not self.plan.every:
                save(self)

    def learn(self) -> None:
        """One step, and what there is to tell of it."""
        self.turn_knobs()
        batch, count = self.batch(self.epoch, self.step)
        self.strategy.clear()
        loss = self.strategy.backward(self.module, batch, self.objective)
        told = self.strategy.step()
        if loss is None:  # another rank tells of these samples
            loss, count, shown = 0.0, 0, {}
        else:
            shown = {"loss": loss}
        self.losses.append(loss)
        self.counts.append(count)
        now = time.perf_counter()
        compute, self.started = now - self.started - told["wait"], now  # a delay, slept in `tell`, is in the next step
        self.tell(step=self.steps, epoch=self.epoch, **shown, samples=count, compute=compute, **told)
        self.step, self.steps = self.step + 1, self.steps + 1

    def batch(self, epoch: int, step: int) -> tuple[Batch, int]:
        """This rank's samples, and their number. One that has none left brings somebody's, which then weigh nothing."""
        rank = self.data_group.rank
        positions = self.sampler.positions(epoch, step, rank)
        inputs, labels = take(self.data, positions if len(positions) else [0, 0])
        weight = self.sampler.weight(epoch, step, rank)
        return Batch(inputs.to(self.device), labels.to(self.device), weight), len(positions)

    def turn_knobs(self) -> None:
        """The learning rate may be changed while it trains; groups with rates of their own keep their proportions."""
        rate = knob("lr", self.rates[0])
        if rate != self.rates[0]:
            check_rate(rate)
        for group, own in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = own * (rate / self.rates[0]) if self.rates[0] else rate

    def whole_model(self) -> nn.Module:
        """The model of all ranks together: this rank's own, unless that is a part only."""
        if not self.strategy.sharded:
            return self.model
        model = self.make_model()
        model.load_state_dict(self.strategy.whole_state())
        return model.to(self.device)

    def result(self) -> RankResult:
        """The results, of which some are for one rank to bring."""
        test, model = self.plan.load_test(), self.whole_model()
        transport = self.strategy.transport  # of those who are still there
        evaluation = evaluate(model, test, transport, device=self.device) if test is not None else None
        weights = {name: each.detach().cpu() for name, each in model.state_dict().items()}
        digest = hashlib.sha256()
        for each in weights.values():
            digest.update(each.contiguous().view(-1).view(torch.uint8).numpy())
        return RankResult(
            self.losses, self.counts, digest.hexdigest(), weights if transport.rank == 0 else None, evaluation
        )
