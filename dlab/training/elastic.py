"""Going on when somebody has died: without a rank, or with a new server in the place of one.

Ranks that are left find each other again, agree on the newest state, and deal the data anew. A server takes with it
what it knew, so with a new one all go back to the last checkpoint.
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


def stand_together(transport: Transport) -> Peers:
    """From now on the death of any rank ends every wait on this transport, so that all ranks learn of it."""
    if transport.peers is None:
        raise ValueError("elastic=True needs worker processes on one host: run it in a cluster, on the CPU")
    transport.peers.together = True
    return transport.peers


def find_recovery(trainer: Trainer) -> Callable[[], None] | None:
    """After the loss of a rank or a server: what to do before the next step, or None if it is the end."""
    if trainer.plan.elastic:
        return partial(go_on_without_the_dead, trainer)
    if trainer.plan.revives and trainer.strategy.has_lost_a_server:
        return partial(go_back_with_new_servers, trainer)
    return None


def go_on_without_the_dead(trainer: Trainer) -> None:
    """From the weights of the last step that anybody has finished; what is left of the epoch is dealt anew."""
    assert trainer.family is not None
    transport, alive = meet_again(*trainer.family)
    mine = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "place": [trainer.epoch, trainer.step, trainer.steps],
    }
    state = newest(mine, trainer.steps, transport)
    trainer.enter(transport)
    trainer.join()
    if trainer.plan.resume is not None and not any(state["place"]):  # nobody had come so far
        resume(trainer, open_checkpoint(trainer.plan.resume))
    else:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.epoch, trainer.step, trainer.steps = state["place"]
    missed = trainer.steps - len(trainer.losses)  # a step that others have finished and I have not
    trainer.losses, trainer.counts = trainer.losses + [0.0] * missed, trainer.counts + [0] * missed
    trainer.sampler.resplit(trainer.epoch, trainer.step, trainer.data_group.size)
    if transport.rank == 0:
        print(f"a rank has died: ranks {', '.join(map(str, alive))} go on from step {trainer.steps}")


def go_back_with_new_servers(trainer: Trainer) -> None:
    """All that a server knew is gone with it: go on from the last checkpoint, or from the beginning.

    Once one rank knows of a checkpoint of this run, all that are in the folder are of this run, and whole.
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
        print(f"a server has died: a new one goes on from step {trainer.steps}")


def meet_again(peers: Peers, rank: int) -> tuple[Transport, list[int]]:
    """A transport between those who live, and who they are. Each of them must call it."""

    def where() -> Rendezvous:
        alive = peers.alive()
        return f"without the dead: {alive}", alive

    return meet(where, rank)


def newest(state: dict[str, Any], steps: int, transport: Transport) -> dict[str, Any]:
    """The state of the rank that has made most steps, for all. When a rank dies, some may have made one more."""
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
