"""The training loop that every rank runs with its part of the model and of the data; a strategy combines the ranks.

The strategy decides what each rank holds; see `Strategy`. `state.py` makes checkpoints of a trainer, and `elastic.py`
continues after a rank or a server has died. Taught in `03_sync_sgd.ipynb`.
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
from dlab.training.elastic import fail_together, find_recovery
from dlab.training.evaluation import evaluate
from dlab.training.plan import RankResult, Training
from dlab.training.saving import Folder, FolderInUse
from dlab.training.state import resume, save
from dlab.transports import Transport

_making = threading.Lock()  # the ranks of a rehearsal are threads that share one random number generator


class Trainer:
    """One rank's part of a training, from the first step to its result."""

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
        self.saved = 0  # number of steps at the last checkpoint
        self.started = time.perf_counter()
        self.enter(transport)
        self.start()
        # all ranks that started, and this rank's number among them
        self.family = (fail_together(transport), transport.rank) if plan.elastic else None

    def enter(self, transport: Transport) -> None:
        """Become a rank of this transport, with a fresh copy of the strategy."""
        self.transport = transport
        self.strategy = copy.deepcopy(self.plan.strategy)
        self.data_group = self.strategy.data_group(transport)

    def start(self) -> None:
        """Reset the sampler, the step counters and the losses to those before the first step."""
        self.first_ranks = self.data_group.size
        self.sampler = TrainingSampler(
            self.data, self.first_ranks, self.plan.batch_size, self.plan.order, self.plan.seed
        )
        self.epoch = self.step = self.steps = 0  # the next step: its number in the epoch, and in the whole training
        self.losses: list[float] = []
        self.counts: list[int] = []

    def join(self) -> None:
        """Build the model, or this rank's part of it, and start the strategy together with the other ranks."""
        if self.plan.elastic:
            fail_together(self.transport)
        self.model = self.strategy.build(self.make_model, self.transport).to(self.device)
        with _making:  # dropout differs between the ranks of a data group
            torch.manual_seed(self.plan.seed + 1 + self.data_group.rank)
        if self.plan.watch:  # before the strategy, which may change a gradient as soon as it is computed
            watch(self.model, self.plan.watch)
        self.optimizer = self.plan.make_optimizer(self.model.parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.module = self.strategy.begin(self.model, self.optimizer, self.transport)

    def make_model(self) -> nn.Module:
        """Make the whole model from the seed, so that it is the same on every rank."""
        with _making:
            torch.manual_seed(self.plan.seed)
            return check_network(self.plan.model())

    def run(self) -> RankResult:
        """Train to the end, and recover from the loss of ranks or servers where the plan allows it."""
        begin = self.begin
        while True:
            try:
                begin()
                self.learn_all()
                self.strategy.end()
                if self.folder is not None and self.strategy.transport.rank == 0:
                    with suppress(FolderInUse):  # if the old rank 0 has died, this rank must clean up
                        self.folder.take()
                return self.result()
            except ConnectionError:
                recovery = find_recovery(self)
                if recovery is None:
                    raise
                begin = recovery

    def begin(self) -> None:
        """Start with fresh weights, or with those of a checkpoint."""
        self.join()
        if self.plan.resume is not None:
            resume(self, open_checkpoint(self.plan.resume))

    def learn_all(self) -> None:
        """Train the remaining steps, and save checkpoints on the way."""
        while self.epoch < self.plan.epochs:
            while self.step < self.sampler.steps(self.epoch):
                self.learn()
                if self.folder is not None and self.plan.every and self.steps % self.plan.every == 0:
                    save(self)
            self.epoch, self.step = self.epoch + 1, 0
            if self.folder is not None and not self.plan.every:
                save(self)

    def learn(self) -> None:
        """Train one step, and report its loss and times."""
        self.turn_knobs()
        batch, count = self.batch(self.epoch, self.step)
        self.strategy.clear()
        loss = self.strategy.backward(self.module, batch, self.objective)
        told = self.strategy.step()
        if loss is None:  # another rank reports the loss of these samples
            loss, count, shown = 0.0, 0, {}
        else:
            shown = {"loss": loss}
        self.losses.append(loss)
        self.counts.append(count)
        now = time.perf_counter()
        compute, self.started = now - self.started - told["wait"], now  # a delay in `tell` counts for the next step
        self.tell(step=self.steps, epoch=self.epoch, **shown, samples=count, compute=compute, **told)
        self.step, self.steps = self.step + 1, self.steps + 1

    def batch(self, epoch: int, step: int) -> tuple[Batch, int]:
        """Return this rank's samples and their number; a rank with none left gets two samples of weight 0."""
        rank = self.data_group.rank
        positions = self.sampler.positions(epoch, step, rank)
        inputs, labels = take(self.data, positions if len(positions) else [0, 0])
        weight = self.sampler.weight(epoch, step, rank)
        return Batch(inputs.to(self.device), labels.to(self.device), weight), len(positions)

    def turn_knobs(self) -> None:
        """Apply a changed learning rate; parameter groups with different rates keep their proportions."""
        rate = knob("lr", self.rates[0])
        if rate != self.rates[0]:
            check_rate(rate)
        for group, own in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = own * (rate / self.rates[0]) if self.rates[0] else rate

    def whole_model(self) -> nn.Module:
        """Return the whole model: this rank's own, or, if that is only a shard, a new one with all ranks' state."""
        if not self.strategy.sharded:
            return self.model
        model = self.make_model()
        model.load_state_dict(self.strategy.whole_state())
        return model.to(self.device)

    def result(self) -> RankResult:
        """Evaluate the model and return this rank's result; only rank 0 includes the weights."""
        test, model = self.plan.load_test(), self.whole_model()
        transport = self.strategy.transport  # between the ranks that are still alive
        evaluation = evaluate(model, test, transport, device=self.device) if test is not None else None
        weights = {name: each.detach().cpu() for name, each in model.state_dict().items()}
        digest = hashlib.sha256()
        for each in weights.values():
            digest.update(each.contiguous().view(-1).view(torch.uint8).numpy())
        return RankResult(
            self.losses, self.counts, digest.hexdigest(), weights if transport.rank == 0 else None, evaluation
        )
