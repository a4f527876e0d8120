"""The bytes that a rank holds, and sends, when training is sharded: the formulas of the papers.

`dlab.ZeRO` measures both in a run. Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations


class ZeroMemory(float):
    """The bytes that a rank holds, and what they are: `parameters`, `gradients` and `optimizer`."""

    parameters: float
    gradients: float
    optimizer: float

    def __new__(cls, parameters: float, gradients: float, optimizer: float) -> ZeroMemory:
        made = super().__new__(cls, parameters + gradients + optimizer)
        made.parameters, made.gradients, made.optimizer = parameters, gradients, optimizer
        return made

    def __getnewargs__(self) -> tuple[float, float, float]:  # type: ignore[override]
        return self.parameters, self.gradients, self.optimizer

    def __repr__(self) -> str:
        parts = (("parameters", self.parameters), ("gradients", self.gradients), ("optimizer", self.optimizer))
        return f"{self / 1e9:.3g} GB per rank: " + ", ".join(f"{name} {each / 1e9:.3g}" for name, each in parts)


def zero_memory(
    parameters: float,
    ranks: int,
    stage: int,
    optimizer_bytes: float = 12,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
) -> ZeroMemory:
    """Return the bytes per rank of a model with so many parameters, in a stage of ZeRO; 0 is plain data parallelism.

    The defaults are those of the ZeRO paper: parameters and gradients of 16 bits, and Adam with float32 copies of the
    parameters (4 + 4 + 4 bytes). Adam without copies has optimizer_bytes=8, float32 parameter_bytes=gradient_bytes=4.
    Activations, buffers, and layers gathered for a while come on top.

    >>> zero_memory(7.5e9, ranks=64, stage=1)
    31.4 GB per rank: parameters 15, gradients 15, optimizer 1.41
    """
    _check(parameters, ranks, stage)
    for name, each in (("optimizer", optimizer_bytes), ("parameter", parameter_bytes), ("gradient", gradient_bytes)):
        if each < 0:
            raise ValueError(f"{name}_bytes={each}: give a number of bytes, 0 or more")
    in_parts = [parameters / ranks if stage >= first else parameters for first in (3, 2, 1)]
    return ZeroMemory(in_parts[0] * parameter_bytes, in_parts[1] * gradient_bytes, in_parts[2] * optimizer_bytes)


def zero_traffic(bytes: float, ranks: int, stage: int) -> float:
    """Return the bytes that each rank sends in a step, for parameters of `bytes` in all.

    That is (n-1)/n of them twice: a reduce-scatter of the gradients and an all-gather of the weights. Stage 3 gathers
    them for the backward pass once more, unless a layer does not need them there, as the first one does not.

    >>> zero_traffic(1000, ranks=4, stage=3)
    2250.0
    """
    _check(bytes, ranks, stage)
    return (3 if stage == 3 else 2) * bytes * (ranks - 1) / ranks


def deepspeed_memory(
    parameters: float, ranks: int, stage: int, largest_layer: float = 0, offload: str | None = None
) -> float:
    """Return DeepSpeed's estimate of the bytes on each GPU of a node, for stage 2 or 3 with Adam and 16-bit parameters.

    `offload` says what is in the memory of the host instead: None, "optimizer", or "parameters" (and the optimizer).
    Stage 3 has room for the gathered parameters and gradients of its largest layer. With `stage=2` DeepSpeed counts 4
    bytes for parameters and 16 for what it shards, more than the ZeRO paper does.

    >>> round(deepspeed_memory(2851e6, ranks=8, stage=2) / 2**30, 2)
    15.93
    """
    _check(parameters, ranks, stage)
    if (stage, offload) == (2, None):
        return 4 * parameters + 16 * parameters / ranks
    if (stage, offload) == (2, "optimizer"):
        return 2 * parameters
    if stage == 3 and offload in (None, "optimizer", "parameters"):
        return 4 * largest_layer + {None: 18, "optimizer": 2, "parameters": 0}[offload] * parameters / ranks
    raise ValueError(
        f"stage={stage}, offload={offload!r}: DeepSpeed has estimates for stage 2 with offload=None or 'optimizer', "
        "and for stage 3 with None, 'optimizer' or 'parameters'"
    )


def activation_memory(
    tokens: int,
    batch: int,
    hidden: int,
    layers: int,
    heads: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    scores: bool = True,
) -> float:
    """Return the bytes of the 16-bit activations that a transformer keeps for its backward pass, on each rank.

    `tokens` is the length of a sequence, `batch` the number of sequences. `scores` are those of attention, which fused
    kernels do not keep. Tensor parallelism divides what is inside attention and the two linear layers (24 of 34 bytes
    per number), sequence parallelism the rest, too.

    >>> activation_memory(1024, 1, hidden=4096, layers=32, scores=False) / 2**30
    4.25
    """
    sizes = {"tokens": tokens, "batch": batch, "hidden": hidden, "layers": layers, "heads": heads}
    for name, value in (sizes | {"tensor_parallel": tensor_parallel}).items():
        if value < 1:
            raise ValueError(f"{name}={value}: give a whole number, 1 or more")
    whole, cut = (0, 34) if sequence_parallel else (10, 24)
    each = whole + cut / tensor_parallel
    if scores:
        each += 5 * heads * tokens / (hidden * tensor_parallel)
    return tokens * batch * hidden * layers * each


def _check(count: float, ranks: int, stage: int) -> None:
    if ranks < 1 or count < 0:
        raise ValueError(f"{count:g} and {ranks} ranks: give a number, 0 or more, and 1 rank or more")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has no stage {stage!r}: give 0, which shards nothing, 1, 2 or 3")
