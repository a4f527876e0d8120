"""One cell of a pipeline's schedule: which stage does what with which micro-batch. Taught in `08_pipeline.ipynb`."""

from __future__ import annotations

from dlab.kinds import ACTION_FORM

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMPUTATIONS = (FORWARD, BACKWARD, INPUT, WEIGHT)
TRANSFERS = (SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD)


class Action(str):
    """The text of an action, as PyTorch prints it, with its parts: `2F0` is stage 2, forward, micro-batch 0.

    F is the forward and B the whole backward of a stage. Some schedules cut the backward in two: I computes the
    gradient of the stage's input, for which the stage before it waits, and W the gradients of its weights, for which
    nobody waits. SEND_F and RECV_B are the messages of a stage to and from the next one, RECV_F and SEND_B those from
    and to the one before: `1SEND_F0` goes to `2RECV_F0`, and `2SEND_B0` to `1RECV_B0`.

    >>> action = Action("2F0")
    >>> action == "2F0", action.stage, action.kind, action.microbatch
    (True, 2, 'F', 0)
    """

    __slots__ = ("kind", "microbatch", "stage")
    stage: int
    kind: str
    microbatch: int

    def __new__(cls, text: str) -> Action:
        found = ACTION_FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise ValueError(
                f"{text!r} is no action: write the number of the stage, what it does ({', '.join(COMPUTATIONS)}, "
                f"{', '.join(TRANSFERS[:-1])} or {TRANSFERS[-1]}) and the number of the micro-batch, as in '2F0'"
            )
        stage, microbatch = int(found[1]), int(found[3])
        self = super().__new__(cls, f"{stage}{found[2]}{microbatch}")
        self.stage, self.kind, self.microbatch = stage, found[2], microbatch
        return self

    @property
    def is_transfer(self) -> bool:
        """Whether it sends or receives, instead of computing."""
        return self.kind in TRANSFERS

    @property
    def step(self) -> int:
        """Of a send or receive: 1 if its other end is the next stage, -1 if it is the one before."""
        return 1 if self.kind in (SEND_FORWARD, RECEIVE_BACKWARD) else -1

    @property
    def partner(self) -> str:
        """The other end of a message: `2RECV_F0` for `1SEND_F0`."""
        does, way = self.kind.split("_")
        return f"{self.stage + self.step}{'RECV' if does == 'SEND' else 'SEND'}_{way}{self.microbatch}"
