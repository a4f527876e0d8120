"""What the ranks of a pipeline do and send: a schedule's rows, with the messages between them in their order.

Every rank knows all rows, so it also knows in which order the others send, and no message has to say what it is.
Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from typing import NamedTuple

from dlab.pipeline.actions import Action
from dlab.pipeline.schedules import Schedule

FORWARD, BACKWARD, RESULT = "F", "B", "result"


class Key(NamedTuple):
    """What a message carries: activations to a stage (F), gradients to a stage (B), or the result of the step."""

    direction: str
    stage: int  # that gets it
    microbatch: int


class Program:
    """One rank's actions, the messages that follow them, and those that come from each other rank.

    A schedule without sends gets them: each result whose next stage is on another rank is sent at once. The result of
    the last stage goes to all ranks in the end. `microbatches` may be fewer than in the schedule; the actions of the
    others are left out. With `forward_only`, the forwards are all that is left.
    """

    def __init__(self, schedule: Schedule, rank: int, microbatches: int, forward_only: bool) -> None:
        kept = [
            [each for each in row if each.microbatch < microbatches and (each.kind == "F" or not forward_only)]
            for row in schedule.rows
        ]
        self.row = kept[rank]
        self.sends: dict[Action, tuple[Key, int]] = {}  # what is sent after an action, and to whom
        self.incoming: dict[int, list[Key]] = {}  # by rank: what it sends here, in order
        self.rank_of = {action.stage: number for number, row in enumerate(schedule.rows) for action in row}
        self.last = max(self.rank_of)
        explicit = any(each.is_transfer for row in kept for each in row)
        for source, row in enumerate(kept):
            for action in row:
                key = _sent_key(action) if explicit else self._implied_key(action)
                if key is None:
                    continue
                destination = self.rank_of[key.stage]
                if source == rank:
                    self.sends[action] = key, destination
                elif destination == rank:
                    self.incoming.setdefault(source, []).append(key)
        self.result = Key(RESULT, self.last, 0)
        self.others = [other for other in range(len(kept)) if other != rank]
        if self.rank_of[self.last] != rank:
            self.incoming.setdefault(self.rank_of[self.last], []).append(self.result)

    def _implied_key(self, action: Action) -> Key | None:
        if action.kind == "F":
            key = Key(FORWARD, action.stage + 1, action.microbatch)
        elif action.kind in ("B", "I"):
            key = Key(BACKWARD, action.stage - 1, action.microbatch)
        else:
            return None
        if not 0 <= key.stage <= self.last or self.rank_of[key.stage] == self.rank_of[action.stage]:
            return None
        return key  # to another rank


def _sent_key(action: Action) -> Key | None:
    if action.kind == "SEND_F":
        return Key(FORWARD, action.stage + 1, action.microbatch)
    return Key(BACKWARD, action.stage - 1, action.microbatch) if action.kind == "SEND_B" else None
