"""Compress gradients; what a code loses is kept and added to the next gradient. See `06_gradient_compression.ipynb`.

The work is done in blocks that fit into the cache, with tables and whole words instead of single bits: at least 1 GB
of gradients per second (`make bench`).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_BLOCK = 1 << 16  # values: a block of them and its code fit into the cache of a core
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000  # the bits of a float32 without its sign; those of infinity


class Compression(ABC):
    """A way to write a float32 gradient in fewer bytes; it has no state of its own.

    What was not sent stays in the residual and is sent later (error feedback): over many steps a receiver gets the sum
    of all gradients, less the last residual. A value that is not finite leaves no residual, so it does harm only once.

    >>> two_bit, residual, code = TwoBit(0.5), torch.zeros(3), torch.empty(4, dtype=torch.uint8)
    >>> two_bit.encode(torch.tensor([0.75, -0.5, 0.25]), residual, code)
    >>> two_bit.decode(code, sent := torch.empty(3))
    >>> sent, residual
    (tensor([ 0.5000, -0.5000,  0.0000]), tensor([0.2500, 0.0000, 0.2500]))
    """

    name: ClassVar[str]

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the number of bytes in which `count` values are sent."""

    def encode(self, gradient: Tensor, residual: Tensor, code: Tensor) -> None:
        """Write gradient + residual into the code, and leave in the residual what the code has lost."""
        self._check(gradient, code)
        self._check(residual, code)
        if gradient.shape != residual.shape:
            raise ValueError(f"{len(gradient)} values cannot use a residual of {len(residual)}: keep one per gradient")
        with np.errstate(over="ignore", invalid="ignore"):  # no warning for infinity minus infinity
            self._encode(gradient.detach().numpy(), residual.detach().numpy(), code.numpy())

    def decode(self, code: Tensor, out: Tensor) -> None:
        """Overwrite `out` with the values of a code."""
        self._check(out, code)
        self._decode(code.numpy(), out.detach().numpy())

    def _check(self, values: Tensor, code: Tensor) -> None:
        if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous() or not values.is_cpu:
            raise ValueError(f"{self.name} works on flat float32 tensors in main memory: use .cpu().float().flatten()")
        needed = self.nbytes(values.numel())
        if code.dtype != torch.uint8 or code.shape != (needed,) or not code.is_contiguous():
            raise ValueError(f"the code of {values.numel()} values by {self.name} is a flat uint8 tensor of {needed}")

    @abstractmethod
    def _encode(self, gradient: Floats, residual: Floats, code: Bytes) -> None: ...

    @abstractmethod
    def _decode(self, code: Bytes, out: Floats) -> None: ...


class _PerValue(Compression):
    """Every value has a code of `bits` bits; the last word of 32 bits is padded with zeros."""

    bits: ClassVar[int]

    def nbytes(self, count: int) -> int:
        """Return the number of bytes in whole words of 32 bits."""
        return 4 * -(-count * self.bits // 32)

    def _encode(self, gradient: Floats, residual: Floats, code: Bytes) -> None:
        sent = np.empty(min(_BLOCK, len(gradient)), np.float32)
        code[-4:] = 0  # the last word may be only partly filled
        for start in range(0, len(gradient), _BLOCK):
            value, codes = residual[start : start + _BLOCK], code[start * self.bits // 8 :]
            value += gradient[start : start + _BLOCK]
            self._pack(value, codes)
            self._unpack(codes, sent[: len(value)])
            value -= sent[: len(value)]
            if not np.isfinite(value).all():
                np.nan_to_num(value, copy=False, nan=0.0, posinf=0.0, neginf=0.0)

    def _decode(self, code: Bytes, out: Floats) -> None:
        for start in range(0, len(out), _BLOCK):
            self._unpack(code[start * self.bits // 8 :], out[start : start + _BLOCK])

    @abstractmethod
    def _pack(self, value: Floats, code: Bytes) -> None:
        """Write a block to the beginning of `code`."""

    @abstractmethod
    def _unpack(self, code: Bytes, out: Floats) -> None:
        """Read a block from the beginning of `code`."""


@dataclass(frozen=True)
class TwoBit(_PerValue):
    """Sends t for values of at least the threshold t, -t for those of at most -t, else 0: 1/16 of the bytes.

    The codes are 11, 10 and 00, the first value in the top bits of the first byte. nan is sent as 0, infinity as t.
    """

    threshold: float = 0.5
    name, bits = "2bit", 2

    def __post_init__(self) -> None:
        if not 0 < _float32(self.threshold) < math.inf:
            raise ValueError(f"2bit cannot have the threshold {self.threshold!r}: use a number above 0, such as 0.5")

    def _pack(self, value: Floats, code: Bytes) -> None:
        t, count = _float32(self.threshold), len(value)
        signs = np.empty((2, -(-count // 4) * 4), np.bool_)
        np.greater_equal(value, t, out=signs[0, :count])
        np.less_equal(value, -t, out=signs[1, :count])
        signs[:, count:] = False
        up, down = signs.view("<u4")  # four values per word; the product has their codes side by side in its top byte
        code[: len(up)] = (3 * up + 2 * down) * (1 + 2**10 + 2**20 + 2**30) >> 24

    def _unpack(self, code: Bytes, out: Floats) -> None:
        t = _float32(self.threshold)
        _look_up(_table((0.0, 0.0, -t, t)), code, out)


@dataclass(frozen=True)
class OneBit(_PerValue):
    """Sends 1 for values above the threshold, -1 for all others: 1/32 of the bytes.

    The first value is the top bit of the first byte. nan is sent as -1, since it is not above the threshold.
    """

    threshold: float = 0.0
    name, bits = "1bit", 1

    def __post_init__(self) -> None:
        if not math.isfinite(_float32(self.threshold)):
            raise ValueError(f"1bit cannot have the threshold {self.threshold!r}: use a finite number, such as 0.0")

    def _pack(self, value: Floats, code: Bytes) -> None:
        code[: -(-len(value) // 8)] = np.packbits(value > _float32(self.threshold))

    def _unpack(self, code: Bytes, out: Floats) -> None:
        _look_up(_table((-1.0, 1.0)), code, out)


@dataclass(frozen=True)
class BFloat16(_PerValue):
    """Sends the upper half of each float32, rounded: half of the bytes. nan and infinity are sent as they are."""

    name, bits = "bfloat16", 16

    def nbytes(self, count: int) -> int:
        """Return two bytes for each value."""
        return 2 * count

    def _pack(self, value: Floats, code: Bytes) -> None:
        code[: 2 * len(value)] = torch.from_numpy(value).bfloat16().view(torch.uint8).numpy()

    def _unpack(self, code: Bytes, out: Floats) -> None:
        torch.from_numpy(out).copy_(torch.from_numpy(code[: 2 * len(out)]).view(torch.bfloat16))


@dataclass(frozen=True)
class TopK(Compression):
    """Sends only the values of largest magnitude: their int32 positions, in order, then the float32 values.

    That is 2 * ratio of the bytes. Of equal magnitudes the first are sent. Infinity counts as larger than any number
    and nan as larger still; both are sent as they are. The larger the ratio, the longer the selection takes.
    """

    ratio: float = 0.01
    name = "topk"

    def __post_init__(self) -> None:
        if not 0 < _number(self.ratio) <= 1:
            raise ValueError(f"topk cannot have the ratio {self.ratio!r}: use a share above 0, up to 1, such as 0.01")

    def nbytes(self, count: int) -> int:
        """Return eight bytes for each value that is sent."""
        return 8 * math.ceil(self.ratio * count)

    def _encode(self, gradient: Floats, residual: Floats, code: Bytes) -> None:
        residual += gradient
        if len(residual):
            positions, lost = _largest(residual.view(np.int32), len(code) // 8)
            code[:] = np.concatenate([positions.astype(np.int32), residual[positions].view(np.int32)]).view(np.uint8)
            residual[positions] = 0
            residual[lost] = 0

    def _decode(self, code: Bytes, out: Floats) -> None:
        positions, values = code.view(np.int32).reshape(2, -1)
        out.fill(0)
        out[positions] = values.view(np.float32)


def _largest(bits: NDArray[np.int32], wanted: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the positions of the largest magnitudes, and of all values that are not finite.

    Without their signs, float32 numbers have the same order as their bits read as integers, with nan above infinity. A
    sample estimates a bound that slightly more values than wanted reach, and only those are compared with each other.
    """
    sample = bits[:: (len(bits) >> 14) | 1] & _MAGNITUDE
    expected = wanted * len(sample) / len(bits)
    rank = min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 4))  # four standard deviations to spare
    bound = min(max(1, np.partition(sample, -rank)[-rank]), _INFINITY)  # at least 1: zeros need not be compared
    starts = range(0, len(bits), _BLOCK)
    near = np.concatenate([np.flatnonzero(bits[at : at + _BLOCK] & _MAGNITUDE >= bound) + at for at in starts])
    enough = len(near) >= wanted
    if not enough:  # the estimate was wrong, or too few are not 0
        near = np.arange(len(bits))
    magnitude = bits[near] & _MAGNITUDE
    least = np.partition(magnitude, -wanted)[-wanted] if enough or bound > 1 else 0
    chosen = magnitude > least
    chosen[np.flatnonzero(magnitude == least)[: wanted - np.count_nonzero(chosen)]] = True
    return near[chosen], near[magnitude >= _INFINITY]


@cache
def _table(values: tuple[float, ...]) -> Floats:
    """Return, for each byte, the values of the codes in it, the first in the top bits."""
    bits = len(values).bit_length() - 1
    codes = (np.arange(256)[:, None] >> np.arange(8 - bits, -1, -bits)) & (len(values) - 1)
    return np.array(values, np.float32)[codes]


def _look_up(table: Floats, code: Bytes, out: Floats) -> None:
    """Fill `out` with the table's rows for the bytes of the code; the last row may be used in part."""
    width = table.shape[1]
    whole, rest = divmod(len(out), width)
    np.take(table, code[:whole], axis=0, out=out[: len(out) - rest].reshape(whole, width), mode="clip")
    if rest:
        out[-rest:] = table[code[whole], :rest]


def _float32(value: Any) -> float:
    """Round a threshold to float32, as values are compared with it and as it is sent."""
    with np.errstate(over="ignore"):
        return float(np.float32(_number(value)))


def _number(value: Any) -> float:
    """Return a number as a float, and anything else as nan, which fails every comparison."""
    return float(value) if isinstance(value, Real) else math.nan


KINDS: dict[str, type[Compression]] = {kind.name: kind for kind in (TwoBit, OneBit, TopK, BFloat16)}


def parse_compression(params: Mapping[str, Any] | str | Compression | None) -> Compression | None:
    """Make a compression from MXNet's `{"type": "2bit", "threshold": 0.5}` or from `"2bit"`; None means none."""
    if params is None or isinstance(params, Compression):
        return params
    options = dict(params) if isinstance(params, Mapping) else {"type": params}
    kind = options.pop("type", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"there is no gradient compression {kind!r}: use {', '.join(KINDS)}, or None for none")
    known = list(inspect.signature(KINDS[kind]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(f"{kind} has no option {option!r}: {f'use {known[0]}' if known else 'it takes none'}")
    return KINDS[kind](**options)
