"""What a view of a pipeline needs: the planned schedule, and when each action really began and ended.

Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

import time

from dlab.kinds import ACTION, SCHEDULE, ActionData
from dlab.pipeline.actions import Action
from dlab.pipeline.schedules import Schedule
from dlab.transports import Emit


class ActionRecorder:
    """Notes when the actions of every `every`-th step begin and end, and emits them after the step."""

    def __init__(self, schedule: Schedule, rank: int, emit: Emit, every: int) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every!r}: give a whole number of steps, 1 or more")
        self._schedule, self._rank, self._emit, self._every = schedule, rank, emit, every
        self._step, self._told = 0, False
        self._times: list[tuple[Action, float, float]] = []

    def begin(self, step: int) -> ActionRecorder | None:
        """Return the recorder if this step is recorded, and None if not.

        The second step always is: in the first one ranks also tell each other the shapes of what they send.
        """
        self._step = step
        self._times.clear()
        return self if step % self._every == 0 or step == 1 else None

    def add(self, action: Action, start: float) -> None:
        """Note that an action has just ended."""
        self._times.append((action, start, time.time()))

    def tell(self) -> None:
        """Emit the actions of the step; before the first of them, the schedule."""
        if not self._told:
            self._told = True
            self._emit(SCHEDULE, self._schedule.planned(self._rank))
        for action, start, end in self._times:
            done: ActionData = {
                "action": str(action),
                "stage": action.stage,
                "microbatch": action.microbatch,
                "start": start,
                "end": end,
                "step": self._step,
            }
            self._emit(ACTION, done)
