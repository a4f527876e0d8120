"""The state of a training: what a checkpoint stores of a trainer, and how a trainer resumes from one.

Rank 0 saves the state of the whole training, under the parameter names of the whole model, and every rank its own
state, so a checkpoint can be resumed on a different number of ranks. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dlab.collectives import all_gather
from dlab.data.sampler import TrainingSampler
from dlab.training.checkpoints import Checkpoint
from dlab.training.saving import save_checkpoint

if TYPE_CHECKING:
    from dlab.training.loop import Trainer


def save(trainer: Trainer) -> None:
    """Save a checkpoint, together with all ranks that are still alive.

    If a rank dies meanwhile, a strategy that survives it continues, and the remaining ranks save the next checkpoint.
    This one exists if rank 0 completed it, and otherwise does not; the ranks do not agree on which, since some may
    already have continued.
    """
    try:
        save_together(trainer)
    except ConnectionError:
        if trainer.strategy.has_lost_a_server or not trainer.strategy.has_lost_a_rank:
            raise


def save_together(trainer: Trainer) -> None:
    """Gather the state and save it; raises ConnectionError if a rank or a server dies meanwhile."""
    strategy, folder = trainer.strategy, trainer.folder
    assert folder is not None
    strategy.settle()
    transport = strategy.transport
    losses, counts = (
        torch.stack(all_gather(torch.tensor(each, dtype=torch.float64), transport))
        for each in (trainer.losses, trainer.counts)
    )
    total, state = counts.sum(0), strategy.state()
    common = {
        "model": strategy.saved_state(),
        "optimizer": None if "optimizer" in state else trainer.optimizer.state_dict(),
        "settings": settings(trainer),
        "place": [trainer.epoch, trainer.step, trainer.steps],
        "history": [list(change) for change in trainer.sampler.history],
        "ranks": trainer.first_ranks,
        "losses": losses.where(counts > 0, 0.0).mul(counts).sum(0).div(total).tolist(),
        "counts": total.long().tolist(),
    }
    own = {"buffers": dict(trainer.model.named_buffers()), "random": torch.get_rng_state(), "strategy": state}
    save_checkpoint(folder, trainer.steps, transport, common, own)
    trainer.saved = trainer.steps


def settings(trainer: Trainer) -> dict[str, int | str]:
    """What a resumed training must have in common with the one that saved: else samples would be repeated or lost."""
    plan = trainer.plan
    return {
        "strategy": type(trainer.strategy).__name__,
        "optimizer": type(trainer.optimizer).__name__,
        "batch_size": plan.batch_size,
        "order": plan.order,
        "seed": plan.seed,
        "samples": len(trainer.data),
    }


def resume(trainer: Trainer, saved: Checkpoint) -> None:
    """Continue from a checkpoint; with a different number of ranks, the rest of the epoch is redistributed."""
    plan, strategy, group = trainer.plan, trainer.strategy, trainer.data_group
    common = saved.common()
    for name, here in settings(trainer).items():
        if (there := common["settings"][name]) != here:
            raise ValueError(f"{saved.folder} was saved with {name}={there}: resume it with that, not with {here}")
    try:
        strategy.load_saved_state(common["model"])
    except RuntimeError as problem:
        reason = str(problem).splitlines()[-1].strip()
        raise ValueError(
            f"{saved.folder} holds the weights of another model: resume it with the model that was saved ({reason})"
        ) from None
    trainer.epoch, trainer.step, trainer.steps = common["place"]
    if trainer.transport.rank == 0:
        trainer.losses, trainer.counts = common["losses"], common["counts"]
    else:
        trainer.losses, trainer.counts = [0.0] * trainer.steps, [0] * trainer.steps
    history, trainer.first_ranks = [tuple(change) for change in common["history"]], common["ranks"]
    trainer.sampler = TrainingSampler(
        trainer.data, trainer.first_ranks, plan.batch_size, plan.order, plan.seed, history
    )
    states = [saved.own(rank) for rank in range(saved.ranks)]
    strategy.restore([state["strategy"] for state in states])
    if common["optimizer"] is not None:  # the same on all ranks
        trainer.optimizer.load_state_dict(common["optimizer"])
    if saved.ranks == trainer.transport.size and trainer.sampler.ranks == group.size:
        own = states[trainer.transport.rank]
        if strategy.held_by(own["strategy"]):  # in its old place
            _continue(trainer, own)
    if trainer.sampler.ranks != group.size:
        trainer.sampler.resplit(trainer.epoch, trainer.step, group.size)


def _continue(trainer: Trainer, own: dict[str, Any]) -> None:
    """Take up the random numbers and the buffers that this rank had itself."""
    torch.set_rng_state(own["random"])
    for name, buffer in trainer.model.named_buffers():
        if name in own["buffers"]:  # if not, it was cut in another way, and the state of the whole model has it
            buffer.copy_(own["buffers"][name])
