"""Cut a network as Megatron-LM does: of two linear layers the first by columns, the second by rows, and no other.

Between the two no rank needs what another has; after the second the ranks add up partial sums: one all-reduce forward
and one backward for each pair. In attention the heads are the columns. Taught in `07_operator_parallel.ipynb`.
"""

from __future__ import annotations

from torch import nn

from dlab.layout import Layout, Placed
from dlab.models import RowTransformer, SelfAttention, TransformerBlock


def megatron_layouts(model: nn.Module, layout: Layout, axis: str = "tp", sequence: bool = False) -> dict[str, Placed]:
    """Return the layouts, by name, that cut a network's pairs of linear layers along an axis; the rest stays whole.

    In a `TransformerBlock` the pairs are attention and MLP; other linear layers make a pair with the next one whose
    inputs are as many as their outputs. A pair that cannot be cut evenly stays whole. With `sequence` the tokens
    between pairs are cut along the same axis, so that each all-reduce becomes a reduce-scatter and an all-gather: the
    same bytes, and a part of the memory (sequence parallelism).

    >>> layout = dlab.Layout((2,), ("tp",))
    >>> par = dlab.AutoParallel(dlab.RowTransformer(), layouts=megatron_layouts(dlab.RowTransformer(), layout), ranks=2)
    >>> par.explain(torch.empty(32, 1, 28, 28)).collectives("forward")
    ['all-reduce', 'all-reduce']
    """
    tokens = layout(None, axis, None)
    ranks = layout.lengths[axis]
    found: dict[str, Placed] = {}
    seen: set[nn.Module] = set()

    def pair(columns: list[str], row: str) -> None:
        for name in columns:
            found[f"{name}.weight"] = layout(axis, None)  # (outputs, inputs)
            if model.get_submodule(name).bias is not None:
                found[f"{name}.bias"] = layout(axis)
        found[f"{row}.weight"] = layout(None, axis)
        if sequence:
            found[row] = tokens

    for name, module in model.named_modules():
        within = f"{name}." if name else ""
        if isinstance(module, SelfAttention):
            seen |= set(module.children())
            if module.heads % ranks == 0:
                pair([f"{within}query", f"{within}key", f"{within}value"], f"{within}out")
        elif isinstance(module, TransformerBlock):
            seen |= {module.fc1, module.fc2}
            if module.fc1.out_features % ranks == 0:
                pair([f"{within}fc1"], f"{within}fc2")
        elif isinstance(module, RowTransformer):
            seen |= {module.embed, module.head}
            if sequence:
                found |= {f"{within}embed": tokens, f"{within}position": layout(axis, None)}
    linear = [(n, each) for n, each in model.named_modules() if isinstance(each, nn.Linear) and each not in seen]
    while len(linear) > 1:
        (first, one), (second, two), *linear = linear
        if one.out_features == two.in_features and one.out_features % ranks == 0:
            pair([first], second)
        else:
            linear = [(second, two), *linear]
    return found
