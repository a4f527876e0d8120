"""One placement in the notations of four libraries: dlab, PyTorch's DTensor, JAX and MindSpore.

Taught in `07_operator_parallel.ipynb`. Nothing here communicates; of the other libraries, only torch is imported, when
DTensor's placements are asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dlab.data.table import Bars, Table
from dlab.layout import Layout, Placed, check_placed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

TensorMap = tuple[int | tuple[int, ...], ...]


def _place(layout: Layout, dims: Sequence[Sequence[str]], partial: Sequence[str] = ()) -> Placed:
    """Place a tensor by the axes of each dimension, the major one first, whatever the layout's own order is."""
    written = [tuple(names) if layout.major == "first" else tuple(reversed(names)) for names in dims]
    return layout(*written).with_partial(*partial)


# ------------------------------------------------------------------------------------------------- DTensor


def to_dtensor(placed: Placed, strided: bool = False) -> list[Placement]:
    """Return DTensor's placements, one for each axis of a `DeviceMesh` with the lengths and names of the layout.

    DTensor cuts in the order of the mesh's axes, so the first axis of the mesh is the major one of any dimension. For
    another order it needs a `_StridedShard`, which is private to PyTorch: it is used only with `strided=True`.

    >>> layout = dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))
    >>> to_dtensor(layout("mp", ("dp", "sp")))
    [Shard(dim=1), Shard(dim=1), Shard(dim=0)]
    """
    check_placed(placed, "this")
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Placement] = []
    for name in placed.layout.names:
        dim = next((number for number, names in enumerate(placed.dims) if name in names), None)
        if dim is None:
            found.append(Partial() if name in placed.partial else Replicate())
            continue
        factor = _cut_later(placed, dim, name)
        if factor > 1 and not strided:
            raise ValueError(_out_of_order(placed, dim))
        found.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    return found


def _cut_later(placed: Placed, dim: int, name: str) -> int:
    """Return into how many pieces a dimension is cut by axes that are major to this one and later in the mesh."""
    names, order = placed.dims[dim], placed.layout.names
    major = names[: names.index(name)] if placed.layout.lengths[name] > 1 else ()
    return prod(placed.layout.lengths[other] for other in major if order.index(other) > order.index(name))


def _out_of_order(placed: Placed, dim: int) -> str:
    order = [name for name in placed.layout.names if name in placed.dims[dim]]
    return (
        f"dimension {dim} is cut along {', then '.join(placed.dims[dim])}, but DTensor's Shard cuts in the order of "
        f"the mesh's axes, {', then '.join(order)}: cut in that order, order the device matrix's axes so, or ask "
        "for its private _StridedShard with strided=True"
    )


def from_dtensor(placements: Sequence[Placement], mesh: DeviceMesh | Layout, dims: int) -> Placed:
    """Return the placement of a tensor with `dims` dimensions that has these placements on a mesh, or on a layout.

    A mesh without names gets the names `axis0`, `axis1`, …; its ranks must be in order.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    layout = mesh if isinstance(mesh, Layout) else _layout_of(mesh)
    if len(placements) != len(layout.names):
        raise ValueError(
            f"{len(placements)} placements do not fit {layout}, which has {len(layout.names)}: give one for each axis"
        )
    cut: list[list[str]] = [[] for _ in range(dims)]
    partial = []
    # From the last axis to the first: a Shard is major to all that come after it, a _StridedShard to some of them.
    for name, placement in reversed(list(zip(layout.names, placements, strict=True))):
        if isinstance(placement, (Shard, _StridedShard)):
            if placement.dim not in range(-dims, dims):
                raise ValueError(
                    f"{placement!r} on axis {name!r} cuts a dimension that a tensor of {dims} dimensions does not have"
                )
            names = cut[placement.dim]
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            ahead = [at for at in range(len(names) + 1) if prod(layout.lengths[n] for n in names[:at]) == factor]
            if not ahead:
                raise ValueError(
                    f"{placement!r} on axis {name!r} is not a cut into equal blocks: its split_factor must be the "
                    f"product of axes after it that cut the same dimension, of {' × '.join(names) or 'none'}"
                )
            names.insert(ahead[0], name)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.append(name)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{placement!r} on axis {name!r} has no counterpart: dlab has shards, copies and sums")
    return _place(layout, cut, partial)


def _layout_of(mesh: DeviceMesh) -> Layout:
    shape = tuple(mesh.mesh.shape)
    if mesh.mesh.flatten().tolist() != list(range(prod(shape))):
        raise ValueError(
            f"the ranks of this mesh are {mesh.mesh.tolist()}: only a mesh with all ranks in order can be a layout, "
            "because a layout counts them with the last axis fastest"
        )
    return Layout(shape, mesh.mesh_dim_names or tuple(f"axis{number}" for number in range(len(shape))))


# ----------------------------------------------------------------------------------------------------- JAX


def to_partition_spec(placed: Placed) -> str:
    """Return JAX's PartitionSpec as text, for a `jax.sharding.Mesh` with the lengths and names of the layout.

    JAX, too, takes the first name of a tuple as the major one. A partial sum is what JAX calls unreduced.

    >>> to_partition_spec(dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp")))
    "P('mp', ('sp', 'dp'))"
    """
    check_placed(placed, "this")
    entries = [repr(names if len(names) > 1 else names[0] if names else None) for names in placed.dims]
    if placed.partial:
        entries.append(f"unreduced={{{', '.join(map(repr, placed.partial))}}}")
    return f"P({', '.join(entries)})"


def from_partition_spec(spec: Any, layout: Layout, dims: int | None = None) -> Placed:
    """Return the placement that a PartitionSpec, or its text, says on a mesh with the axes of the layout.

    A PartitionSpec may leave out the last dimensions, which are then uncut: `dims` says how many the tensor has.
    """
    entries, partial = _read_spec(str(spec))
    if dims is not None and dims < len(entries):
        raise ValueError(
            f"{spec} has {len(entries)} entries, but the tensor has {dims}: give at most one for each dimension"
        )
    entries += [()] * ((dims or 0) - len(entries))
    return _place(layout, entries, partial)


def _read_spec(text: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """Read the text of a PartitionSpec: the names of each dimension, and those over which it is a sum."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or getattr(call.func, "id", None) not in ("P", "PartitionSpec"):
            raise ValueError("not a PartitionSpec")
        values = [ast.literal_eval(entry) for entry in call.args]
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        entries = [(value,) if isinstance(value, str) else tuple(value or ()) for value in values]
        partial = sorted(words.pop("unreduced", ()))
        if words or not all(isinstance(name, str) for entry in [*entries, partial] for name in entry):
            raise ValueError("not names")
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(
            f"{text!r} cannot be read as a PartitionSpec: write it as P('mp', ('sp', 'dp'), None), with the name of an "
            "axis, a tuple of names or None for each dimension"
        ) from None
    return entries, partial


# ----------------------------------------------------------------------------------------------- MindSpore


def to_tensor_map(placed: Placed) -> tuple[tuple[int, ...], TensorMap]:
    """Return MindSpore's device matrix and tensor map.

    A tensor map has, for each dimension, the axis that cuts it, counted from the last one, which is 0; -1 if none does;
    a tuple, the major axis first, if several do.

    >>> to_tensor_map(dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"), "None"))
    ((2, 2, 2), (0, (1, 2), -1))
    """
    check_placed(placed, "this")
    if placed.partial:
        raise ValueError(f"{placed} is a partial sum, which a tensor map cannot say: reduce it first")
    last = len(placed.layout.names) - 1
    found: list[int | tuple[int, ...]] = []
    for names in placed.dims:
        axes = tuple(last - placed.layout.names.index(name) for name in names)
        found.append(axes if len(axes) > 1 else axes[0] if axes else -1)
    return placed.layout.device_matrix, tuple(found)


def from_tensor_map(
    device_matrix: Sequence[int], tensor_map: Sequence[int | Sequence[int]], names: Sequence[str] | None = None
) -> Placed:
    """Return the placement that a tensor map says on a device matrix; without names, `axis0` is the first axis."""
    axes = len(device_matrix)
    layout = Layout(tuple(device_matrix), tuple(names or (f"axis{number}" for number in range(axes))))
    dims: list[list[str]] = []
    for dim, entry in enumerate(tensor_map):
        numbers = [entry] if isinstance(entry, int) else list(entry)
        for number in numbers:
            if number not in range(axes) and not (number == -1 and len(numbers) == 1):
                raise ValueError(
                    f"dimension {dim} of the tensor map {tuple(tensor_map)} has {number}, but the device matrix "
                    f"{tuple(device_matrix)} has the axes 0 (its last) to {axes - 1} (its first), and -1 is for a "
                    "dimension that is not cut"
                )
        dims.append([layout.names[axes - 1 - number] for number in numbers if number >= 0])
    return _place(layout, dims)


# ------------------------------------------------------------------------------------------- side by side


class Notation(NamedTuple):
    """How one library writes a device matrix and a tensor's placement on it."""

    library: str
    ranks: str
    placement: str


class RosettaTable(Table):
    """One placement in the notations of several libraries, a row each."""

    def __init__(self, rows: Sequence[Notation]) -> None:
        self.rows = list(rows)

    def heading(self) -> list[str]:
        return ["library", "ranks", "placement of the tensor"]

    def cells(self, row: Notation) -> list[int | str | Bars]:
        return list(row)

    def between(self, hidden: Sequence[Notation]) -> str:
        return f"… {len(hidden)} more"


def rosetta(placed: Placed) -> RosettaTable:
    """Return a table of one placement as dlab, DTensor, JAX and MindSpore write it, each beside its device matrix."""
    shape, names = placed.layout.device_matrix, placed.layout.names
    partial = f".with_partial({', '.join(map(repr, placed.partial))})" if placed.partial else ""
    shards = ", ".join(map(_short, to_dtensor(placed, strided=True)))
    tensor_map = "none: it has no partial sums" if placed.partial else f"tensor map {to_tensor_map(placed)[1]}"
    return RosettaTable(
        [
            Notation("dlab", repr(placed.layout), f"layout({', '.join(map(repr, placed.entries))}){partial}"),
            Notation("DTensor", f"init_device_mesh('cpu', {shape}, mesh_dim_names={names})", f"[{shards}]"),
            Notation("JAX", f"Mesh(devices.reshape{shape}, {names})", to_partition_spec(placed)),
            Notation("MindSpore", f"device matrix {shape}", tensor_map),
        ]
    )


def _short(placement: Placement) -> str:
    """Return a placement as one writes it: `Shard(1)`."""
    kind, dim = type(placement).__name__, getattr(placement, "dim", "")
    factor = getattr(placement, "split_factor", None)
    return f"{kind}({dim}, split_factor={factor})" if factor else f"{kind}({dim})"
