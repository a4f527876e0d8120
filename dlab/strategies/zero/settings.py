"""What a user of `ZeRO` decides, checked once for all stages. Taught in `09_sharded_optimizers.ipynb`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Settings:
    """The arguments of `ZeRO` besides the stage; a bad one is refused with a sentence."""

    bucket_mb: float
    overlap: bool
    parameters: torch.dtype | None
    clip: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.bucket_mb, int | float) or not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb!r}: give a size in megabytes, larger than 0")
        if self.parameters is not None and self.parameters not in _HALVES:
            raise ValueError(
                f"parameters={self.parameters!r}: give torch.bfloat16 (the optimizer then keeps float32 copies), "
                "or None to train in the model's own type"
            )
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise ValueError(f"clip={self.clip!r}: give the largest norm of the whole gradient, larger than 0, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
