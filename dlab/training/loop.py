"""The training loop: what every rank does, with a model, its part of the data, and a strategy that joins the ranks.

Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch

from dlab.collectives import all_gather
from dlab.data.batches import take
from dlab.data.sampler import TrainingSampler
from dlab.processes.worker.context import knob
from dlab.processes.worker.tracing import watch
from dlab.training.checkpoints import Checkpoint, open_checkpoint
from dlab.training.checks import check_network, check_rate
from dlab.training.elastic import meet_again, newest, stand_together
from dlab.training.evaluation import evaluate
from dlab.training.plan import RankResult, Training
from dlab.training.saving import Folder, FolderInUse, save_checkpoint
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
        self.plan, self.transport, self.device, self.tell, self.folder = plan, transport, device, tell, folder
        if folder is not None and transport.rank == 0:
            folder.claim(plan.resume, plan.overwrite)
        self.data = plan.load()
        self.sampler = TrainingSampler(self.data, transport.size, plan.batch_size, plan.order, plan.seed)
        self.first_ranks = transport.size
        self.epoch = self.step = self.steps = 0  # the next step: in its epoch, and of all
        self.started = time.perf_counter()
        self.saved = 0  # after how many steps, the last time
        self.losses: list[float] = []
        self.counts: list[int] = []
        # of all who began, and which of them I am
        self.family = (stand_together(transport), transport.rank) if plan.elastic else None

    def join(self, transport: Transport) -> None:
        """Make a model, and begin the strategy over this transport."""
        self.transport = transport
        if self.plan.elastic:
            stand_together(transport)
        with _making:
            torch.manual_seed(self.plan.seed)
            self.model = check_network(self.plan.model()).to(self.device)
            torch.manual_seed(
                self.plan.seed + 1 + transport.rank
            )  # what is random in training differs from rank to rank
        if self.plan.watch:  # before the strategy, which may change a gradient as soon as it is there
            watch(self.model, self.plan.watch)
        self.optimizer = self.plan.make_optimizer(self.model.parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.strategy = copy.deepcopy(self.plan.strategy)
        self.module = self.strategy.begin(self.model, self.optimizer, transport)

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
                if self.plan.elastic:
                    begin = self.go_on_without_the_dead
                elif self.plan.revives and self.strategy.has_lost_a_server:
                    begin = self.go_back_with_new_servers
                else:
                    raise

    def begin(self) -> None:
        """With new weights, or with those of a checkpoint."""
        self.join(self.transport)
        if self.plan.resume is not None:
            self.resume(open_checkpoint(self.plan.resume))

    def learn_all(self) -> None:
        """The steps that are left, and checkpoints."""
        while self.epoch < self.plan.epochs:
            while self.step < self.sampler.steps(self.epoch):
                self.learn()
                if self.folder is not None and self.plan.every and self.steps % self.plan.every == 0:
                    self.save()
            self.epoch, self.step = self.epoch + 1, 0
            if self.folder is not None and not self.plan.every:
                self.save()

    def learn(self) -> None:
        """One step, and what there is to tell of it."""
        self.turn_knobs()
        inputs, labels, count = self.batch(self.epoch, self.step)
        self.strategy.clear()
        loss = self.backward(inputs, labels, self.sampler.weight(self.epoch, self.step, self.transport.rank))
        told = self.strategy.step()
        self.losses.append(loss)
        self.counts.append(count)
        now = time.perf_counter()
        compute, self.started = now - self.started - told["wait"], now  # a delay, slept in `tell`, is in the next step
        self.tell(step=self.steps, epoch=self.epoch, loss=loss, samples=count, compute=compute, **told)
        self.step, self.steps = self.step + 1, self.steps + 1

    def batch(self, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """This rank's samples. One that has none left brings somebody's, which then weigh nothing."""
        positions = self.sampler.positions(epoch, step, self.transport.rank)
        inputs, labels = take(self.data, positions if len(positions) else [0, 0])
        return inputs.to(self.device), labels.to(self.device), len(positions)

    def backward(self, inputs: torch.Tensor, labels: torch.Tensor, weight: float) -> float:
        """Leave the gradient of the weighted mean loss in the model, in one pass or several; gives the mean loss."""
        pieces = min(self.plan.accumulate, len(labels))
        total = 0.0
        for number, (some, answers) in enumerate(
            zip(inputs.tensor_split(pieces), labels.tensor_split(pieces), strict=True), start=1
        ):
            with self.strategy.accumulating() if number < pieces else nullcontext():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.amp):
                    loss = self.loss(self.module(some), answers)
                share = len(answers) / len(labels)
                (loss * (weight * share)).backward()
                total += loss.item() * share
        return total

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """That of the plan; torch does not say whose mistake it is when a label has no output."""
        try:
            return self.plan.loss(outputs, labels)
        except IndexError as problem:
            if outputs.ndim != 2 or not len(labels) or labels.is_floating_point() or labels.max() < outputs.shape[1]:
                raise
            raise ValueError(
                f"there is a label {labels.max().item()}, and the model has outputs for labels below "
                f"{outputs.shape[1]} only: give its last layer as many outputs as there are classes"
            ) from problem

    def turn_knobs(self) -> None:
        """The learning rate may be changed while it trains; groups with rates of their own keep their proportions."""
        rate = knob("lr", self.rates[0])
        if rate != self.rates[0]:
            check_rate(rate)
        for group, own in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = own * (rate / self.rates[0]) if self.rates[0] else rate

    def save(self) -> None:
        """A checkpoint, by all ranks together that are still there.

        If one of them dies meanwhile, a strategy that survives it goes on, and the next checkpoint is saved by those
        who are left. This one is there if the first rank came to its end, and else it is not; nobody asks the others,
        who may have gone on already.
        """
        try:
            self.save_together()
        except ConnectionError:
            if self.strategy.has_lost_a_server or not self.strategy.has_lost_a_rank:
                raise

    def save_together(self) -> None:
        """The same, if nobody dies."""
        assert self.folder is not None
        self.strategy.settle()
        transport = self.strategy.transport
        losses, counts = (
            torch.stack(all_gather(torch.tensor(each, dtype=torch.float64), transport))
            for each in (self.losses, self.counts)
        )
        total = counts.sum(0)
        common = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "strategy": type(self.strategy).__name__,
            "place": [self.epoch, self.step, self.steps],
            "history": [list(change) for change in self.sampler.history],
            "ranks": self.first_ranks,
            "losses": losses.where(counts > 0, 0.0).mul(counts).sum(0).div(total).tolist(),
            "counts": total.long().tolist(),
        }
        own = {
            "buffers": dict(self.model.named_buffers()),
            "random": torch.get_rng_state(),
            "strategy": self.strategy.state(),
        }
        save_checkpoint(self.folder, self.steps, transport, common, own)
        self.saved = self.steps

    def resume(self, saved: Checkpoint) -> None:
        """Go on where it was saved; with another number of ranks, what is left of the epoch is dealt anew."""
        common, here = saved.common(), type(self.strategy).__name__
        if common["strategy"] != here:
            raise ValueError(f"{saved.folder} was saved by {common['strategy']}: resume it with that, not with {here}")
        self.model.load_state_dict(common["model"])
        self.epoch, self.step, self.steps = common["place"]
        if self.transport.rank == 0:
            self.losses, self.counts = common["losses"], common["counts"]
        else:
            self.losses, self.counts = [0.0] * self.steps, [0] * self.steps
        history = [tuple(change) for change in common["history"]]
        plan, self.first_ranks = self.plan, common["ranks"]
        self.sampler = TrainingSampler(self.data, self.first_ranks, plan.batch_size, plan.order, plan.seed, history)
        states = [saved.own(rank) for rank in range(saved.ranks)]
        self.strategy.restore([state["strategy"] for state in states])
        if not states[0]["strategy"].get("optimizer"):  # the same on all ranks
            self.optimizer.load_state_dict(common["optimizer"])
        if saved.ranks == self.transport.size:
            own = states[self.transport.rank]
            torch.set_rng_state(own["random"])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(own["buffers"][name])
        if self.sampler.ranks != self.transport.size:
            self.sampler.resplit(self.epoch, self.step, self.transport.size)

    def go_on_without_the_dead(self) -> None:
        """From the weights of the last step that anybody has finished; what is left of the epoch is dealt anew."""
        assert self.family is not None
        transport, alive = meet_again(*self.family)
        mine = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "place": [self.epoch, self.step, self.steps],
        }
        state = newest(mine, self.steps, transport)
        self.join(transport)
        if self.plan.resume is not None and not any(state["place"]):  # nobody had come so far
            self.resume(open_checkpoint(self.plan.resume))
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.step, self.steps = state["place"]
        missed = self.steps - len(self.losses)  # a step that others have finished and I have not
        self.losses, self.counts = self.losses + [0.0] * missed, self.counts + [0] * missed
        self.sampler.resplit(self.epoch, self.step, transport.size)
        if transport.rank == 0:
            print(f"a rank has died: ranks {', '.join(map(str, alive))} go on from step {self.steps}")

    def go_back_with_new_servers(self) -> None:
        """All that a server knew is gone with it: go on from the last checkpoint, or from the beginning.

        Once one rank knows of a checkpoint of this run, all that are in the folder are of this run, and whole.
        """
        self.join(self.strategy.reconnect())
        self.saved = max(map(int, all_gather(torch.tensor([self.saved], device=self.device), self.transport)))
        if self.saved and self.folder is not None:
            self.resume(open_checkpoint(self.folder.path))
        elif self.plan.resume is not None:
            self.resume(open_checkpoint(self.plan.resume))
        else:
            self.sampler = TrainingSampler(
                self.data, self.transport.size, self.plan.batch_size, self.plan.order, self.plan.seed
            )
            self.epoch = self.step = self.steps = 0
            self.losses, self.counts = [], []
        if self.transport.rank == 0:
            print(f"a server has died: a new one goes on from step {self.steps}")

    def result(self) -> RankResult:
        """The results, of which some are for one rank to bring."""
        test = self.plan.load_test()
        transport = self.strategy.transport  # of those who are still there
        evaluation = evaluate(self.model, test, transport, device=self.device) if test is not None else None
        weights = {name: each.detach().cpu() for name, each in self.model.state_dict().items()}
        digest = hashlib.sha256()
        for each in weights.values():
            digest.update(each.contiguous().view(-1).view(torch.uint8).numpy())
        return RankResult(
            self.losses, self.counts, digest.hexdigest(), weights if transport.rank == 0 else None, evaluation
        )
