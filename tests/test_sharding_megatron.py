"""Networks cut as Megatron-LM cuts them communicate as often as the known answers say, and compute the same."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlab
from dlab.models import TransformerBlock


def on(ranks):
    return dlab.Layout((ranks,), ("tp",))


def counts(told, direction):
    return dict(Counter(told.collectives(direction)))


def told(net, *inputs, ranks, sequence=False, **more):
    layouts = dlab.megatron_layouts(net, on(ranks), sequence=sequence)
    return dlab.AutoParallel(net, layouts=layouts, ranks=ranks, **more).explain(*inputs)


# ------------------------------------------------------------------------------------------ a pair of linear layers


def pair():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_pair_takes_one_all_reduce_forward_and_one_back_if_the_input_needs_a_gradient(ranks):
    for needs, back in ((False, {}), (True, {"all-reduce": 1})):
        found = told(pair(), torch.empty(8, 16, requires_grad=needs), ranks=ranks)
        assert counts(found, "forward") == {"all-reduce": 1}
        assert counts(found, "backward") == back


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("needs", [False, True])
def test_with_rows_cut_between_pairs_it_is_a_gather_and_a_scatter(ranks, needs):
    net = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    layouts = dlab.megatron_layouts(net, on(ranks)) | {"2": on(ranks)("tp", None)}
    par = dlab.AutoParallel(net, layouts=layouts, ranks=ranks, dataset_strategy="data_parallel")
    found = par.explain(torch.empty(8, 16, requires_grad=needs))
    inside = [(each.direction, each.collective) for each in found.messages if "Linear" in each.operator]
    assert Counter(inside) == {
        ("forward", "all-gather"): 1,
        ("forward", "reduce-scatter"): 1,
        ("backward", "all-gather"): 1,
        **({("backward", "reduce-scatter"): 1} if needs else {}),
    }


def test_layers_make_pairs_by_their_sizes_and_what_cannot_be_cut_stays_whole():
    layout = on(4)
    assert dlab.megatron_layouts(dlab.MLP(), layout) == {
        "1.weight": layout("tp", None),
        "1.bias": layout("tp"),
        "3.weight": layout(None, "tp"),
    }
    assert dlab.megatron_layouts(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)), layout) == {}
    odd = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(8, 3), nn.Linear(9, 9))
    assert list(dlab.megatron_layouts(odd, layout)) == ["1.weight", "2.weight"]
    assert dlab.megatron_layouts(dlab.models.RowTransformer(width=30, heads=3), on(3)) != {}
    few = dlab.megatron_layouts(dlab.models.RowTransformer(width=12, heads=2), layout)
    assert not any("attention" in name for name in few)  # two heads for four ranks
    assert any("fc1" in name for name in few)


# ------------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_block_takes_two_all_reduces_forward_and_two_back(ranks, depth):
    found = told(dlab.RowTransformer(depth=depth), torch.empty(8, 1, 28, 28), ranks=ranks)
    assert counts(found, "forward") == {"all-reduce": 2 * depth}
    assert counts(found, "backward") == {"all-reduce": 2 * depth}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("depth", [1, 3])
def test_with_cut_tokens_a_block_takes_two_gathers_and_two_scatters_each_way(ranks, depth):
    found = told(dlab.RowTransformer(depth=depth), torch.empty(8, 1, 28, 28), ranks=ranks, sequence=True)
    mean = {"all-reduce": 1}  # of the tokens, at the end
    assert counts(found, "forward") == {"all-gather": 2 * depth, "reduce-scatter": 2 * depth} | mean
    large = Counter(each.collective for each in found.messages if each.direction == "backward" and each.bytes > 1000)
    assert large == {"all-gather": 2 * depth + 1, "reduce-scatter": 2 * depth}  # and 1 where the tokens were cut
    plain = told(dlab.RowTransformer(depth=depth), torch.empty(8, 1, 28, 28), ranks=ranks)
    norms = [row.memory for row in found.rows if "LayerNorm" in row.operator]
    assert sum(norms) * ranks == sum(row.memory for row in plain.rows if "LayerNorm" in row.operator)


class TokenTransformer(nn.Module):
    """Two tables of embeddings, for tokens and positions, blocks, and a score for each word of the vocabulary."""

    def __init__(self, block=TransformerBlock):
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(block(16, 4), block(16, 4))
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, words, places):
        return self.output(self.norm(self.blocks(self.words(words) + self.places(places))))


class ThreeNorms(TransformerBlock):
    """Normalises the tokens for query, key and value each, so that none of the three shares its input's gradient."""

    def forward(self, x):
        attention = self.attention
        shape = *x.shape[:2], attention.heads, -1
        layers = attention.query, attention.key, attention.value
        parts = [layer(self.norm1(x)).reshape(shape).transpose(1, 2) for layer in layers]
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        x = x + attention.out(mixed)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def token_layouts(net, ranks):
    layout = on(ranks)
    tables = {f"{name}.weight": layout("tp", None) for name in ("words", "places", "output")}
    sums = {name: layout(None, None, None) for name in ("words", "places")}  # both sums complete before they are added
    return dlab.megatron_layouts(net, layout) | tables | sums


@pytest.mark.parametrize(("block", "back"), [(ThreeNorms, 9), (TransformerBlock, 5)])
def test_the_transformer_of_two_layers_meets_the_known_counts(block, back):
    """9 all-reduces back are 4 for each layer, query, key and value apart, and 1 for the output; if the three share
    their input, its gradient is added up first and reduced once, which saves 2 for each layer."""
    net = TokenTransformer(block)
    words, places = torch.zeros(2, 8, dtype=torch.long), torch.arange(8).expand(2, 8).contiguous()
    par = dlab.AutoParallel(net, layouts=token_layouts(net, 2), ranks=2)
    found = par.explain(words, places)
    assert counts(found, "forward") == {"all-reduce": 6, "all-gather": 1}
    assert counts(found, "backward") == {"all-reduce": back}


def agrees(net, inputs, layouts, ranks):
    """Results and all gradients equal those of plain torch."""
    truth = copy.deepcopy(net)
    scores = truth(*inputs)
    weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view(scores.shape)
    (scores * weights).sum().backward()

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), layouts=layouts, transport=transport)
        result = par(*inputs)
        (result * weights).sum().backward()
        return result.detach(), par.whole(grad=True)

    for result, gradients in dlab.rehearse(work, ranks=ranks):
        assert torch.allclose(result, scores, atol=1e-10, rtol=0)
        for name, parameter in truth.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-10, rtol=0), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_row_transformer_equals_one_process(ranks, sequence):
    torch.manual_seed(0)
    net = dlab.RowTransformer(width=16, depth=2).double()
    layouts = dlab.megatron_layouts(net, on(ranks), sequence=sequence)
    agrees(net, [torch.randn(3, 1, 28, 28, dtype=torch.float64)], layouts, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_token_transformer_equals_one_process(ranks):
    torch.manual_seed(0)
    net = TokenTransformer().double()
    words, places = torch.randint(0, 32, (3, 8)), torch.arange(8).expand(3, 8).contiguous()
    agrees(net, [words, places], token_layouts(net, ranks), ranks)


def test_beside_data_parallelism_on_one_layout_the_axis_is_chosen_by_name():
    layout = dlab.Layout((2, 2), ("dp", "tp"))
    net = dlab.RowTransformer()
    found = dlab.AutoParallel(net, layouts=dlab.megatron_layouts(net, layout), ranks=4).explain(
        torch.empty(8, 1, 28, 28)
    )
    assert {each.group for each in found.messages} == {(0, 1)}
    with pytest.raises(ValueError, match="has no axis 'mp': its axes are 'dp', 'tp'"):
        dlab.megatron_layouts(net, layout, axis="mp")


def test_tokens_that_cannot_be_cut_evenly_are_refused():
    with pytest.raises(ValueError, match="cannot be cut into 8 equal parts along tp: 24 or 32 would work"):
        told(dlab.RowTransformer(heads=8), torch.empty(8, 1, 28, 28), ranks=8, sequence=True)
