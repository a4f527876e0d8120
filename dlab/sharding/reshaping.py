"""Rules of functions that change a tensor's shape: dimensions change places, are joined, split, or picked from."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from string import ascii_lowercase
from typing import Any

import torch

from dlab.sharding.operation import UNCUT, Operation
from dlab.sharding.subscripts import dim_of, rule, shape_of, subscripts_of
from dlab.sharding.tensor import _ANSWERS, _getter, call


@rule(torch.transpose, torch.Tensor.transpose)
def transpose(x: Any, dim0: int, dim1: int) -> Operation:
    """Two dimensions exchange their subscripts: `ab->ba`; each may be cut."""
    order = list(range(len(shape_of(x))))
    first, second = (dim_of(dim, shape_of(x), "Transpose") for dim in (dim0, dim1))
    order[first], order[second] = order[second], order[first]
    return permute(x, order)


@rule(torch.permute, torch.Tensor.permute)
def permute(x: Any, *dims: Any) -> Operation:
    """The subscripts are put into the given order: `abc->cab`; each dimension may be cut."""
    order = list(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else list(dims)
    subscripts = subscripts_of(len(shape_of(x)))
    order = [dim_of(dim, shape_of(x), "Transpose") for dim in order]
    if sorted(order) != list(range(len(subscripts))):
        raise ValueError(f"Transpose: {tuple(order)} does not name each of {len(subscripts)} dimensions once")
    result = "".join(subscripts[dim] for dim in order)
    return Operation("Transpose", [x], [subscripts], result, lambda parts, _: parts[0].permute(order), linear=True)


@rule(torch.t, torch.Tensor.t, _getter("mT"))
def swap_last(x: Any) -> Operation:
    """The last two subscripts change places."""
    if len(shape_of(x)) < 2:
        return permute(x, list(range(len(shape_of(x)))))
    return transpose(x, -2, -1)


@rule(torch.flatten, torch.Tensor.flatten)
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Operation:
    """Several dimensions become one; of these only the first can be cut."""
    shape = shape_of(x)
    start, end = (dim_of(dim, shape or (1,), "Flatten") for dim in (start_dim, end_dim))  # a number becomes a vector
    if start > end:
        raise ValueError(
            f"Flatten: dimension {start_dim} does not come before dimension {end_dim} of the shape {shape}"
        )
    return _reshaped("Flatten", x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule(torch.reshape, torch.Tensor.reshape, torch.Tensor.view)
def reshape(x: Any, *shape: Any) -> Operation:
    """Dimensions are joined or split; of those that belong together only the first can be cut."""
    wanted = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    total = prod(shape_of(x))
    if -1 in wanted:
        wanted[wanted.index(-1)] = total // max(1, abs(prod(wanted)))
    if prod(wanted) != total or min(wanted, default=1) < 0:
        raise ValueError(f"a tensor of shape {shape_of(x)} cannot get the shape {tuple(shape)}: the sizes differ")
    return _reshaped("Reshape", x, wanted)


def _reshaped(name: str, x: Any, wanted: list[int]) -> Operation:
    old, subscripts, result, uncut = shape_of(x), "", "", ""
    names = iter(ascii_lowercase)
    lengths: dict[str, int] = {}
    shared: dict[str, tuple[int, int]] = {}
    i = j = 0
    while i < len(old) or j < len(wanted):  # the smallest runs of dimensions with the same product
        first_old, first_new, a, b = i, j, 1, 1
        while i < len(old) and (a < b or first_old == i):
            a, i = a * old[i], i + 1
        while j < len(wanted) and (b < a or first_new == j):
            b, j = b * wanted[j], j + 1
            if a < b:
                while i < len(old) and a < b:
                    a, i = a * old[i], i + 1
        if i == len(old) or j == len(wanted):  # what is left has length 1
            i, j = (len(old), len(wanted)) if prod(old[i:]) == prod(wanted[j:]) == 1 else (i, j)
        run_old, run_new = old[first_old:i], wanted[first_new:j]
        leading = next(names)
        same = run_old and run_new
        for number, length in enumerate(run_old):
            subscript = leading if number == 0 and same else next(names)
            subscripts += subscript
            lengths[subscript] = length
            uncut += "" if subscript == leading else subscript
        for number, length in enumerate(run_new):
            subscript = leading if number == 0 and same else next(names)
            result += subscript
            if subscript == leading:
                shared[subscript] = (lengths[subscript], length)
            else:
                lengths[subscript] = length
                uncut += subscript

    def compute(parts: list[Any], local: dict[str, int]) -> Any:
        shape = [
            length * local[subscript] // shared[subscript][0] if subscript in shared else length
            for subscript, length in zip(result, wanted, strict=True)
        ]
        return parts[0].reshape(shape)

    split = {subscript: after for subscript, (_, after) in shared.items()}
    new = {subscript: lengths[subscript] for subscript in result if subscript not in shared}
    return Operation(
        name,
        [x],
        [subscripts],
        result,
        compute,
        uncut=uncut,
        linear=True,
        lengths=new,
        shape=tuple(wanted),
        split=split,
    )


@rule(_getter("T"))
def reverse(x: Any) -> Operation:
    """The subscripts stand in the opposite order."""
    return permute(x, list(range(len(shape_of(x))))[::-1])


@rule(torch.unsqueeze, torch.Tensor.unsqueeze)
def unsqueeze(x: Any, dim: int) -> Operation:
    """A new dimension of length 1, which is not cut."""
    subscripts = subscripts_of(len(shape_of(x)))
    place = dim_of(dim, (*shape_of(x), 1), "Unsqueeze")
    result = subscripts[:place] + UNCUT + subscripts[place:]
    return Operation("Unsqueeze", [x], [subscripts], result, lambda parts, _: parts[0].unsqueeze(place), linear=True)


@rule(torch.squeeze, torch.Tensor.squeeze)
def squeeze(x: Any, dim: Any = None) -> Operation:
    """Dimensions of length 1, which are not cut, are left out."""
    shape, subscripts = shape_of(x), subscripts_of(len(shape_of(x)))
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = tuple(each for dim in dims if shape[each := dim_of(dim, shape, "Squeeze")] == 1)
    result = "".join(subscript for each, subscript in enumerate(subscripts) if each not in gone)
    return Operation("Squeeze", [x], [subscripts], result, lambda parts, _: parts[0].squeeze(gone), linear=True)


@rule(torch.Tensor.__getitem__)
def pick(x: Any, index: Any) -> Operation:
    """`x[:, 0]`, `x[..., 2:4]`, `x[None]`: a dimension from which something is picked must be whole on every rank."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is ... or isinstance(each, slice) or type(each) is int for each in index):
        raise NotImplementedError(
            "dlab cuts x[...] with whole numbers, slices, None and ...: pick by a tensor outside of the network"
        )
    shape = shape_of(x)
    missing = len(shape) - sum(each is not None and each is not ... for each in index)
    if missing < 0:
        raise IndexError(
            f"x[...] picks from {len(shape) - missing} dimensions, but a tensor of shape {shape} has fewer"
        )
    place = next((number for number, each in enumerate(index) if each is ...), len(index))
    index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
    subscripts, new = subscripts_of(len(shape)), iter("efghijkl")
    result, uncut, lengths, dim = "", "", {}, 0
    for each in index:
        if each is None:
            result += UNCUT
            continue
        subscript, length = subscripts[dim], shape[dim]
        if each == slice(None):
            result += subscript
        else:
            uncut += subscript
            if isinstance(each, slice):
                result += (kept := next(new))
                lengths[kept] = len(range(length)[each])
                uncut += kept
            elif not -length <= each < length:
                raise IndexError(f"x[{each}] is not there: dimension {dim} of the shape {shape} has length {length}")
        dim += 1
    return Operation(
        "Pick", [x], [subscripts], result, lambda parts, _: parts[0][index], uncut=uncut, linear=True, lengths=lengths
    )


@rule(torch.cat, torch.concat)
def cat(tensors: Any, dim: int = 0) -> Operation:
    """Tensors joined along a dimension, which must be whole on every rank; the others are cut as in the first one."""
    shapes = [shape_of(each) for each in tensors]
    subscripts = subscripts_of(len(shapes[0]))
    place = dim_of(dim, shapes[0], "Cat")
    joined, own = "j", "efghiklstvABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if len(shapes) > len(own) or any(len(shape) != len(subscripts) for shape in shapes):
        raise ValueError(f"Cat: dlab joins up to {len(own)} tensors with the same number of dimensions, not {shapes}")
    words = [subscripts[:place] + own[number] + subscripts[place + 1 :] for number in range(len(shapes))]

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        return torch.cat(parts, dim=place)

    return Operation(
        "Cat",
        list(tensors),
        words,
        subscripts[:place] + joined + subscripts[place + 1 :],
        compute,
        uncut=joined + own[: len(shapes)],
        lengths={joined: sum(shape[place] for shape in shapes)},
    )


@rule(torch.stack)
def stack(tensors: Any, dim: int = 0) -> Operation:
    """Tensors of one shape along a new dimension, which is not cut; the others are cut as in the first one."""
    shape, subscripts = shape_of(tensors[0]), subscripts_of(len(shape_of(tensors[0])))
    place = dim_of(dim, (*shape, 1), "Stack")
    return Operation(
        "Stack",
        list(tensors),
        [subscripts] * len(tensors),
        subscripts[:place] + "s" + subscripts[place:],
        lambda parts, _: torch.stack(parts, dim=place),
        uncut="s",
        lengths={"s": len(tensors)},
    )


def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    """Return the parts of a tensor at each index of a dimension, as a loop over it gets them."""
    place = dim_of(dim, shape_of(x), "Unbind")
    before = (slice(None),) * place
    return tuple(call(torch.Tensor.__getitem__, (x, (*before, at)), {}) for at in range(shape_of(x)[place]))


def split(x: Any, split_size_or_sections: int | list[int], dim: int = 0) -> tuple[Any, ...]:
    """Return parts of a tensor along a dimension, which must be whole on every rank; each is picked by itself."""
    place = dim_of(dim, shape_of(x), "Split")
    length, size = shape_of(x)[place], split_size_or_sections
    sizes = [min(size, length - at) for at in range(0, length, size)] if isinstance(size, int) else list(size)
    if sum(sizes) != length:
        raise ValueError(f"Split: parts of {sizes} do not add up to the length {length} of dimension {place}")
    ends = list(accumulate(sizes))
    before = (slice(None),) * place
    picks = ((*before, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    return tuple(call(torch.Tensor.__getitem__, (x, index), {}) for index in picks)


def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    """Return equal parts of a tensor, the last one smaller where they do not divide."""
    return split(x, -(-shape_of(x)[dim_of(dim, shape_of(x), "Chunk")] // chunks), dim)


_ANSWERS.update({torch.split: split, torch.Tensor.split: split, torch.chunk: chunk, torch.Tensor.chunk: chunk})
_ANSWERS.update({torch.unbind: unbind, torch.Tensor.unbind: unbind})
