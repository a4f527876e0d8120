"""Continue a training after a failure: without the rank that died, or with a new server in place of the old one.

The surviving ranks reconnect, agree on the newest state, and divide the remaining data among themselves. A server's
state is lost with it, so with a new server all ranks go back to the last checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dlab.collectives import all_gather, broadcast
from dlab.memory.backoff import Peers
from dlab.training.checkpoints import open_checkpoint
from dlab.training.state import resume
from dlab.transports import Transport
from dlab.transports.rendezvous import Rendezvous, meet

if TYPE_CHECKING:
    from dlab.training.loop import Trainer


def fail_together(transport: Transport) -> Peers:
    """Let the death of any rank end every wait on this transport with ConnectionError, so that all ranks notice it."""
    if transport.peers is None:
        raise ValueError("elastic=True needs worker processes on one host: run it in a cluster, on the CPU")
    transport.peers.together = True
    return transport.peers


def find_recovery(trainer: Trainer) -> Callable[[], None] | None:
    """Return what a rank must do before its next step after a rank or a server was lost; None if it cannot continue."""
    if trainer.plan.elastic:
        return partial(continue_without_dead_ranks, trainer)
    if trainer.plan.revives and trainer.strategy.has_lost_a_server:
        return partial(restart_with_new_servers, trainer)
    return None


def continue_without_dead_ranks(trainer: Trainer) -> None:
    """Continue from the last step that any rank has finished; the rest of the epoch is redistributed."""
    assert trainer.family is not None
    transport, alive = reconnect_survivors(*trainer.family)
    mine = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "place": [trainer.epoch, trainer.step, trainer.steps],
    }
    state = newest_state(mine, trainer.steps, transport)
    trainer.enter(transport)
    trainer.join()
    if trainer.plan.resume is not None and not any(state["place"]):  # no rank had finished a step
        resume(trainer, open_checkpoint(trainer.plan.resume))
    else:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.epoch, trainer.step, trainer.steps = state["place"]
    missed = trainer.steps - len(trainer.losses)  # steps that other ranks have finished and this one has not
    trainer.losses, trainer.counts = trainer.losses + [0.0] * missed, trainer.counts + [0] * missed
    trainer.sampler.resplit(trainer.epoch, trainer.step, trainer.data_group.size)
    if transport.rank == 0:
        print(f"a rank has died: ranks {', '.join(map(str, alive))} continue from step {trainer.steps}")


def restart_with_new_servers(trainer: Trainer) -> None:
    """Restart all ranks, with new servers, from the last checkpoint or, without one, from the beginning.

    If any rank has saved a checkpoint in this run, all checkpoints in the folder belong to this run and are complete.
    """
    trainer.enter(trainer.strategy.reconnect())
    trainer.join()
    saved = all_gather(torch.tensor([trainer.saved], device=trainer.device), trainer.transport)
    trainer.saved = max(map(int, saved))
    if trainer.saved and trainer.folder is not None:
        resume(trainer, open_checkpoint(trainer.folder.path))
    elif trainer.plan.resume is not None:
        resume(trainer, open_checkpoint(trainer.plan.resume))
    else:
        trainer.start()
    if trainer.transport.rank == 0:
        print(f"a server has died: a new one continues from step {trainer.steps}")


def reconnect_survivors(peers: Peers, rank: int) -> tuple[Transport, list[int]]:
    """Return a transport between the ranks that are alive, and their old numbers; each of them must call it."""

    def where() -> Rendezvous:
        alive = peers.alive()
        return f"without the dead: {alive}", alive

    return meet(where, rank)


def newest_state(state: dict[str, Any], steps: int, transport: Transport) -> dict[str, Any]:
    """Send the state of the rank with the most steps to all; when a rank dies, some may be one step ahead."""
    made = [int(each) for each in all_gather(torch.tensor([steps]), transport)]
    leader = made.index(max(made))
    buffer = io.BytesIO()
    if transport.rank == leader:
        torch.save(state, buffer)
    size = torch.tensor([buffer.tell()])
    broadcast(size, transport, leader)
    content = torch.empty(int(size), dtype=torch.uint8)
    if transport.rank == leader:
        content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    broadcast(content, transport, leader)
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
