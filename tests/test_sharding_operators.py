"""Sharded operators: results and gradients of every legal strategy equal plain torch; every other one is refused."""

import sys
from itertools import product
from math import prod

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from sharded import Net, assert_same, by_ranks, by_torch, check_on_threads

import dlab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
WORKERS = 4
ops = dlab.ops


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# every strategy of a matmul


def factors(ranks):
    """All (a, b, c) whose product divides the ranks."""
    return [cuts for cuts in product(range(1, ranks + 1), repeat=3) if ranks % prod(cuts) == 0]


def matmuls(ranks, a, b, c):
    """The same matmul in both forms, with both kinds of strategy, and with every kind of result."""
    cuts = (a, b), (b, c)
    layout = dlab.Layout((c, ranks // (a * b * c), a, b), ("k", "copies", "i", "j"))  # its axes in another order
    named = layout("i", "j"), layout("j", "k")
    swapped = layout("i", "j"), layout("k", "j")
    yield ops.MatMul().shard(cuts)
    yield dlab.shard(torch.matmul, in_strategy=cuts)
    yield ops.MatMul().shard(named)
    yield dlab.shard(torch.matmul, in_strategy=named)
    yield ops.MatMul().shard(cuts, out_strategy=(a, c))
    yield dlab.shard(torch.mm, in_strategy=cuts, out_strategy=(a * b, c))
    yield ops.MatMul().shard(named, out_strategy=layout(("i", "j"), "k"))
    yield dlab.shard(torch.matmul, in_strategy=named, out_strategy=layout("k", ("j", "i")))
    yield ops.MatMul(transpose_b=True).shard(((a, b), (c, b)))
    yield ops.MatMul(transpose_b=True).shard(swapped, out_strategy=layout("None", "k"))


def is_transposed(operator):
    return bool(operator.settings.get("transpose_b"))


def products(operators, size=8):
    """A network with a result for each operator, each of a weight of its own, and the same in plain torch."""
    weights = [torch.randn(size, size) for _ in operators]

    def plain(weights, *inputs):
        return tuple(
            x @ (weight.t() if is_transposed(operator) else weight)
            for operator, x, weight in zip(operators, inputs, weights, strict=True)
        )

    def cut(weights, *inputs):
        return tuple(operator(x, weight) for operator, x, weight in zip(operators, inputs, weights, strict=True))

    return Net(plain, *weights), Net(cut, *weights), [torch.randn(size, size) for _ in operators]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_strategy_of_a_matmul_equals_the_unsharded_one(ranks):
    for a, b, c in factors(ranks):
        plain, cut, inputs = products(list(matmuls(ranks, a, b, c)))
        check_on_threads(plain, cut, inputs, ranks, f"cuts {a}, {b}, {c}")


def all_forms(strategies):
    """On this rank of a cluster: what each strategy gives."""
    torch.set_default_dtype(torch.float64)
    found = []
    for a, b, c in strategies:
        torch.manual_seed(a * 100 + b * 10 + c)
        _, cut, inputs = products(list(matmuls(4, a, b, c)))
        found.append(by_ranks(cut, inputs))
    torch.set_default_dtype(torch.float32)
    return found


def test_strategies_of_a_matmul_on_processes(cluster):
    strategies = [(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2), (4, 1, 1)]
    by_rank = cluster.run(all_forms, strategies, timeout=60)
    for number, (a, b, c) in enumerate(strategies):
        torch.manual_seed(a * 100 + b * 10 + c)
        plain, _, inputs = products(list(matmuls(4, a, b, c)))
        truth = by_torch(plain, inputs)
        for found in by_rank:
            assert_same(found[number], truth, f"cuts {a}, {b}, {c}")


def test_three_ranks_and_six(ranks=6):
    for cuts in [(3, 1, 2), (1, 6, 1), (2, 3, 1), (1, 3, 1), (1, 1, 3)]:
        plain, cut, inputs = products(list(matmuls(ranks, *cuts)), size=12)
        check_on_threads(plain, cut, inputs, ranks, str(cuts))


# every operator, every cut

LENGTHS = {"a": 8, "b": 4, "c": 8, "i": 4, "j": 8, "k": 4, "n": 4, "v": 8, "e": 4, "m": 8}
INTEGERS = {"Embedding": "v", "CrossEntropy": "m", "embedding": "v", "cross_entropy": "m", "nll_loss": "m"}


def functional(function, *args, **kwargs):
    """A maker of the functional form, with settings behind the tensors."""

    def make(strategy):
        operator = dlab.shard(function, in_strategy=strategy)
        return lambda x, *others: operator(x, *args, *others, **kwargs)

    return make


def written(equation):
    """A maker of an einsum, of which the equation comes before the tensors."""
    return lambda strategy: lambda *tensors: dlab.shard(torch.einsum, in_strategy=strategy)(equation, *tensors)


def stacked(strategy):
    return lambda *tensors: dlab.shard(torch.stack, in_strategy=strategy)(tensors, dim=1)


# name: what makes the operator from its strategy, plain torch, the subscripts of its inputs, and those never cut
OPERATORS = {
    "MatMul": (ops.MatMul().shard, torch.matmul, "ij jk", ""),
    "MatMul transposed": (ops.MatMul(transpose_b=True).shard, lambda x, w: x @ w.mT, "ij kj", ""),
    "MatMul of batches": (ops.MatMul().shard, torch.matmul, "nij njk", ""),
    "MatMul of a batch": (ops.MatMul().shard, torch.matmul, "nij jk", ""),
    "MatMul of a vector": (ops.MatMul().shard, torch.matmul, "j jk", ""),
    "MatMul by a vector": (ops.MatMul().shard, torch.matmul, "nij j", ""),
    "MatMul of vectors": (ops.MatMul().shard, torch.matmul, "j j", ""),
    "ReLU": (ops.ReLU().shard, torch.relu, "ab", ""),
    "Gelu": (ops.Gelu().shard, F.gelu, "abc", ""),
    "Add": (ops.Add().shard, torch.add, "ab ab", ""),
    "Add of a row": (ops.Add().shard, torch.add, "ab b", ""),
    "Mul": (ops.Mul().shard, torch.mul, "ab ab", ""),
    "Mul by rows": (ops.Mul().shard, torch.mul, "bc abc", ""),
    "Softmax": (ops.Softmax().shard, lambda x: F.softmax(x, dim=-1), "ab", "b"),
    "Softmax of columns": (ops.Softmax(dim=0).shard, lambda x: F.softmax(x, dim=0), "ab", "a"),
    "LayerNorm": (ops.LayerNorm((8,)).shard, lambda x, w, b: F.layer_norm(x, (8,), w, b), "bc c c", "c"),
    "LayerNorm alone": (ops.LayerNorm((4, 8)).shard, lambda x: F.layer_norm(x, (4, 8)), "abc", "bc"),
    "Embedding": (ops.Embedding().shard, F.embedding, "ni ve", ""),
    "ReduceSum": (ops.ReduceSum().shard, torch.sum, "ab", ""),
    "ReduceSum of rows": (ops.ReduceSum(dim=1).shard, lambda x: x.sum(1), "ab", ""),
    "ReduceSum kept": (ops.ReduceSum((0, -1), True).shard, lambda x: x.sum((0, 2), keepdim=True), "abc", ""),
    "Flatten": (ops.Flatten().shard, lambda x: x.flatten(1), "abc", "c"),
    "Transpose": (ops.Transpose((2, 0, 1)).shard, lambda x: x.permute(2, 0, 1), "abc", ""),
    "CrossEntropy": (ops.CrossEntropy().shard, F.cross_entropy, "am a", "m"),
    "matmul": (functional(torch.matmul), torch.matmul, "ij jk", ""),
    "bmm": (functional(torch.bmm), torch.bmm, "nij njk", ""),
    "mv": (functional(torch.mv), torch.mv, "ij j", ""),
    "dot": (functional(torch.dot), torch.dot, "j j", ""),
    "einsum": (written("nij, jk -> kn"), lambda x, w: torch.einsum("nij,jk->kn", x, w), "nij jk", ""),
    "einsum of one": (written("ab"), lambda x: x, "ab", ""),
    "linear": (functional(F.linear), F.linear, "aj kj", ""),
    "relu": (functional(torch.relu), torch.relu, "ab", ""),
    "F.relu": (functional(F.relu), F.relu, "ab", ""),
    "gelu": (functional(F.gelu, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), "ab", ""),
    "add": (functional(torch.add), torch.add, "ab ab", ""),
    "mul": (functional(torch.mul), torch.mul, "ab b", ""),
    "div": (functional(torch.div), torch.div, "ab b", ""),
    "softmax": (functional(F.softmax, dim=1), lambda x: F.softmax(x, dim=1), "ab", "b"),
    "log_softmax": (functional(F.log_softmax, dim=0), lambda x: F.log_softmax(x, dim=0), "ab", "a"),
    "layer_norm": (functional(F.layer_norm, (8,)), lambda x, w, b: F.layer_norm(x, (8,), w, b), "ac c c", "c"),
    "embedding": (functional(F.embedding), F.embedding, "n ve", ""),
    "sum": (functional(torch.sum), torch.sum, "ab", ""),
    "mean": (functional(torch.mean, dim=0), lambda x: x.mean(0), "ab", ""),
    "mean kept": (functional(torch.mean, (0, -1), True), lambda x: x.mean((0, 2), keepdim=True), "abc", ""),
    "squeeze": (functional(torch.squeeze), torch.squeeze, "ab", ""),
    "stack": (stacked, lambda *tensors: torch.stack(tensors, dim=1), "ab ab", ""),
    "flatten": (functional(torch.flatten), torch.flatten, "ab", "b"),
    "transpose": (functional(torch.transpose, 0, 1), lambda x: x.transpose(0, 1), "abc", ""),
    "reshape": (functional(torch.reshape, (2, 4, 4)), lambda x: x.reshape(2, 4, 4), "ab", ""),
    "cross_entropy": (functional(F.cross_entropy), F.cross_entropy, "am a", "m"),
    "nll_loss": (functional(F.nll_loss), F.nll_loss, "am a", "m"),
    "mse_loss": (functional(F.mse_loss), F.mse_loss, "ab ab", ""),
    "mse_loss added up": (
        functional(F.mse_loss, reduction="sum"),
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        "ab ab",
        "",
    ),
    "attention": (
        functional(F.scaled_dot_product_attention),
        F.scaled_dot_product_attention,
        "nbie nbie nbie",
        "ie",
    ),
}


def tensors(name, words):
    """Inputs with these subscripts; some operators look up the rows of a table, or have labels."""
    made = [torch.randn([LENGTHS[subscript] for subscript in word]) for word in words]
    if (limit := INTEGERS.get(name)) is not None:
        place = 0 if limit == "v" else 1
        made[place] = torch.randint(0, LENGTHS[limit], made[place].shape)
    return made


def strategies(words, ranks, choices):
    """Every way to cut the dimensions by these numbers."""
    for cuts in product(choices, repeat=sum(map(len, words))):
        numbers = iter(cuts)
        yield tuple(tuple(next(numbers) for _ in word) for word in words)


def is_legal(words, whole, strategy, ranks, lengths):
    """By the definition: equal subscripts are cut equally, whole ones not at all, the product divides the ranks."""
    parts = {}
    for word, cuts in zip(words, strategy, strict=True):
        for subscript, cut in zip(word, cuts, strict=True):
            if parts.setdefault(subscript, cut) != cut or (subscript in whole and cut > 1) or lengths[subscript] % cut:
                return False
    return ranks % prod(parts.values()) == 0


@pytest.mark.parametrize("name", OPERATORS)
def test_every_cut_of_every_operator_is_right_or_refused(name, ranks=4):
    make, function, words, whole = OPERATORS[name]
    words = words.split()
    inputs = tensors(name, words)
    plain = Net(lambda _, *inputs: function(*inputs))
    lengths = LENGTHS | ({"a": 2} if name == "reshape" else {})  # 8 rows become 2
    legal = 0
    for strategy in strategies(words, ranks, (1, 2, 4) if sum(map(len, words)) < 5 else (1, 2)):
        operator = make(strategy)
        cut = Net(lambda _, *inputs, operator=operator: operator(*inputs))
        if is_legal(words, whole, strategy, ranks, lengths):
            legal += 1
            if legal < 9 or legal % 3 == 0:
                check_on_threads(plain, cut, inputs, ranks, f"{name} {strategy}")
        else:
            with pytest.raises(ValueError):
                dlab.AutoParallel(cut, ranks=ranks).explain(*inputs)
    assert legal > 1


TWO = dlab.Layout((2, 2), ("dp", "tp"))


@pytest.mark.parametrize("out", [None, (4, 1), (1, 4)])
@pytest.mark.parametrize(
    "strategy",
    [
        *(((1, 4), (1, 4)), ((4, 1), (1, 1)), ((1, 1), (4, 1)), ((2, 2), (1, 2)), ((1, 2), (2, 2))),
        *(((1, 4), (1, 4), (1,)), ((2, 1), (2, 1), (2,)), (TWO("dp", None), TWO("tp", None), TWO("tp"))),
        (TWO("dp", "tp"), TWO(None, "tp")),
    ],
)
def test_a_bias_is_added_once(strategy, out):
    """It waits until the sum over all ranks is complete."""
    linear = dlab.shard(F.linear, in_strategy=strategy, out_strategy=out)
    plain, cut = (
        Net(lambda w, x, each=each: each(x, *w), torch.randn(4, 8), torch.randn(4)) for each in (F.linear, linear)
    )
    check_on_threads(plain, cut, [torch.randn(8, 8)], ranks=4, where=str(strategy), passes=2)


@pytest.mark.parametrize("bias", [(4,), (1, 1), 4, "x", TWO("dp")])
def test_a_bias_is_cut_as_the_result_is(bias):
    linear = dlab.shard(F.linear, in_strategy=((1, 2), (2, 2), bias))
    sentence = refused(lambda w, x: linear(x, w[0], w[0][0]), X, ranks=4, error=ValueError)
    assert f"its entry cannot be {bias} where that of the weight is (2, 2)" in sentence


def test_both_kinds_of_strategy_in_one_network():
    layout = dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))
    eight = dlab.Layout((8,), ("tp",))
    first = ops.MatMul().shard((layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
    relu = ops.ReLU().shard(((4, 1),))
    second = dlab.shard(torch.matmul, in_strategy=(eight("None", "tp"), eight("tp", "None")))
    third = dlab.shard(torch.matmul, in_strategy=((2, 4), (4, 1)), out_strategy=(8, 1))
    weights = [torch.randn(16, 16) for _ in range(3)]
    plain = Net(lambda w, x: torch.relu(torch.relu(x @ w[0]) @ w[1]) @ w[2], *weights)
    cut = Net(lambda w, x: third(torch.relu(second(relu(first(x, w[0])), w[1])), w[2]), *weights)
    check_on_threads(plain, cut, [torch.randn(16, 16)], ranks=8, passes=2)


def test_the_groups_of_the_tutorial():
    """On 8 ranks ((2, 4), (4, 1)) adds up over {0..3} and {4..7}; fewer cuts than ranks: neighbours hold copies."""
    matmul, relu = ops.MatMul().shard(((2, 4), (4, 1))), ops.ReLU().shard(((4, 1),))
    seen = {}

    def look(weights, x):
        seen["product"] = product_ = matmul(x, weights[0])
        seen["relu"] = relu(product_)
        return seen["relu"]

    par = dlab.AutoParallel(Net(look, torch.randn(784, 512)), ranks=8)
    told = par.explain(torch.randn(32, 784)).messages
    groups = {each.direction: each.group for each in told if each.collective == "all-reduce"}
    assert groups == {"forward": (0, 1, 2, 3), "backward": (0, 4)}  # the second for the two halves of the batch
    quarters = [rows.start // 8 for rows, _ in seen["relu"].placed.slices((32, 512))]
    assert quarters == [0, 0, 1, 1, 2, 2, 3, 3]
    assert seen["product"].placed.cuts(0) == 2 and seen["product"].placed.cuts(1) == 1


@pytest.mark.parametrize(("out", "collective"), [((2, 1), "all-reduce"), ((8, 1), "reduce-scatter")])
def test_the_result_of_a_contraction_is_added_up_or_scattered(out, collective):
    matmul = ops.MatMul().shard(((2, 4), (4, 1)), out_strategy=out)
    par = dlab.AutoParallel(lambda x, w: matmul(x, w), ranks=8)
    told = par.explain(torch.randn(32, 784), torch.randn(784, 512))
    assert [each.collective for each in told.messages if each.operator.endswith("MatMul")] == [collective]


def test_cuts_of_a_result_take_the_axes_that_its_layouts_have():
    """On axes in another order than that of the subscripts, new ones would make every rank send more."""
    layout = dlab.Layout((2, 2, 2), ("k", "i", "j"))
    matmul = ops.MatMul().shard((layout("i", "j"), layout("j", "k")), out_strategy=(4, 2))
    told = dlab.AutoParallel(lambda x, w: matmul(x, w), ranks=8).explain(torch.randn(8, 8), torch.randn(8, 8))
    assert [each.collective for each in told.messages if each.operator.endswith("MatMul")] == ["reduce-scatter"]


# what is refused, and with which words


LAYOUT = dlab.Layout((2, 2), ("dp", "tp"))
OTHER = dlab.Layout((4,), ("all",))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (((2, 2), (1, 2)), ["dimension 0 of input 1 is cut into 1", "dimension 1 of input 0", "into 2", "agree"]),
        (((2, 3), (3, 1)), ["6 parts", "4 ranks cannot share"]),
        (((8, 1), (1, 1)), ["8 parts", "4 ranks"]),
        (((1, 1), (1, 4)), ["length 6", "cannot be cut into 4", "4 or 8 would work"]),
        (((2, 2),), ["1 entry", "not 2", "each input"]),
        (((2, 2, 1), (2, 1)), ["input 0 has 2 dimensions", "(2, 2, 1)"]),
        (((2, 0), (0, 1)), ["1 or more"]),
        (((2, 1.0), (1, 1)), ["whole number"]),
        ((2, 2), ["input 0"]),
        ((LAYOUT("dp", "None"), LAYOUT("None", "dp")), ["'dp' cuts dimension 0 of input 0", "dimension 1 of input 1"]),
        ((LAYOUT("dp", "tp"), LAYOUT("None", "None")), ["along no axis", "along tp", "agree"]),
        ((LAYOUT("dp", "tp"), (2, 1)), ["mixes cuts and layouts"]),
        ((LAYOUT("dp", "None"), OTHER("None", "None")), ["different layouts"]),
        ((LAYOUT("dp"), LAYOUT("None", "None")), ["input 0 has 2 dimensions", "1 entr"]),
        ((dlab.Layout((8,), ("x",))("x", "None"), dlab.Layout((8,), ("x",))("None", "None")), ["8 places", "4 ranks"]),
    ],
)
def test_an_illegal_strategy_is_refused_with_a_reason_on_every_rank(strategy, words):
    wrong, right = ops.MatMul().shard(strategy), ops.MatMul().shard(((2, 2), (2, 1)))
    x, w = torch.randn(8, 8), torch.randn(8, 6)

    def work(transport):
        with pytest.raises(ValueError) as caught:
            dlab.AutoParallel(lambda x, w: wrong(x, w), transport=transport)(x, w)
        return str(caught.value), dlab.AutoParallel(lambda x, w: right(x, w), transport=transport)(x, w)

    for sentence, result in dlab.rehearse(work, ranks=4):
        assert all(word in sentence for word in words), sentence
        assert torch.allclose(result, x @ w)  # and the next call works


def test_a_dimension_that_must_be_whole():
    softmax = ops.Softmax().shard(((1, 2),))
    with pytest.raises(ValueError, match="Softmax cannot cut dimension 1 of input 0: it needs the whole of it; give 1"):
        dlab.AutoParallel(lambda x: softmax(x), ranks=2).explain(torch.randn(4, 4))


@pytest.mark.parametrize("out", [(3, 1), (2,), 4, (4, 4), LAYOUT("dp"), dlab.Layout((2,), ("x",))("x", "None")])
def test_an_illegal_out_strategy(out):
    matmul = ops.MatMul().shard(((2, 2), (2, 1)), out_strategy=out)
    with pytest.raises(ValueError):
        dlab.AutoParallel(lambda x, w: matmul(x, w), ranks=4).explain(torch.randn(8, 8), torch.randn(8, 8))


def refused(body, *inputs, ranks=2, error=NotImplementedError):
    """The sentence with which every rank refuses a network."""

    def work(transport):
        with pytest.raises(error) as caught:
            dlab.AutoParallel(Net(body, torch.ones(8, 8)), transport=transport)(*inputs)
        return str(caught.value)

    (sentence,) = set(dlab.rehearse(work, ranks=ranks))
    return sentence


X = torch.arange(64.0, dtype=torch.float64).view(8, 8)
ROWS = ops.MatMul().shard(((2, 1), (1, 1)))
CONTRACT = ops.MatMul().shard(((1, 2), (2, 1)))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("cumsum", lambda w, x: torch.cumsum(ROWS(x, w[0]), dim=0)),
        ("add_", lambda w, x: ROWS(x, w[0]).add_(1)),
        ("relu_", lambda w, x: torch.relu_(ROWS(x, w[0]))),
        ("argmax", lambda w, x: ROWS(x, w[0]).argmax(1)),
        ("batch_norm", lambda w, x: F.batch_norm(ROWS(x, w[0]), None, None, training=True)),
        ("sort", lambda w, x: torch.sort(ROWS(x, w[0]))),
        ("norm", lambda w, x: CONTRACT(x, w[0]) / w[0].norm()),  # of a weight of which each rank holds a part
        ("vstack", lambda w, x: CONTRACT(x, w[0]) + torch.vstack([w[0], w[0]]).sum()),
        ("var", lambda w, x: CONTRACT(x, w[0]) + torch.var(input=w[0])),
    ],
)
def test_a_function_that_dlab_does_not_know_is_refused_by_name(name, body):
    sentence = refused(body, X)
    assert f"{name!r}" in sentence and "the network" in sentence and "functions that dlab can cut" in sentence, sentence


def test_what_cannot_be_cut_rightly_is_refused():
    assert "in place" in refused(lambda w, x: F.relu(ROWS(x, w[0]), inplace=True), X)
    assert "in place" in refused(lambda w, x: torch.nn.ELU(inplace=True)(ROWS(x, w[0])), X)
    assert "tensor" in refused(lambda w, x: torch.clamp(ROWS(x, w[0]), min=x), X)
    assert "alpha" in refused(lambda w, x: torch.add(ROWS(x, w[0]), x, alpha=2), X)
    assert "padding_idx" in refused(lambda w, i: F.embedding(i, w[0], padding_idx=0), torch.zeros(4, dtype=torch.long))
    assert "weight" in refused(lambda w, x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long), weight=w[0][0]), X)
    assert "(8, 8) and (4, 8)" in refused(lambda w, x: ROWS(x, w[0]) + torch.ones(4, 8), X, error=ValueError)
    assert "row 9" in refused(
        lambda w, i: ops.Embedding().shard(((1,), (2, 1)))(i, w[0]), torch.tensor([1, 9]), error=IndexError
    )
    assert "with each subscript once" in refused(lambda w, x: torch.einsum("ii", ROWS(x, w[0])), X)
    assert "is for 2 tensors, not 1" in refused(
        lambda w, x: torch.einsum("ij,jk", [ROWS(x, w[0])]), X, error=ValueError
    )
    assert "(8, 8) and (4, 8)" in refused(lambda w, x: F.mse_loss(ROWS(x, w[0]), torch.ones(4, 8)), X)
    assert "to a device before" in refused(lambda w, x: ROWS(x, w[0]).to("cpu"), X)
    assert "whole numbers" in refused(lambda w, x: ROWS(x, w[0])[True], X)
    sentence = refused(lambda w, x: ROWS(x, w[0])[torch.tensor([1])], X)
    assert "slices" in sentence and "outside" in sentence


def test_a_call_that_torch_would_not_take_either_is_told_with_the_whole_shape():
    """The parts of 4 rows and 8 columns would make the message about a tensor that nobody has written."""
    told = refused(lambda w, x: F.layer_norm(ROWS(x, w[0]), (7,)), X, error=ValueError)
    assert "a tensor of shape (8, 8) are not (7,)" in told
    assert "no dimension 2" in refused(lambda w, x: ROWS(x, w[0]).flatten(2), X, error=IndexError)
    assert "1 does not come before dimension 0" in refused(
        lambda w, x: ROWS(x, w[0]).flatten(1, 0), X, error=ValueError
    )
    assert "no dimension 1" in refused(lambda w, x: ROWS(x, w[0]).sum().sum(1), X, error=IndexError)
    told = refused(lambda w, x: ops.MatMul(transpose_b=True)(ROWS(x, w[0]), x[0]), X, error=ValueError)
    assert "2 and 1 dimensions of which the second is transposed" in told


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda w, x: ops.MatMul()(x), ["'matmul' as matmul(first, second", "missing a required argument: 'second'"]),
        (lambda w, x: ROWS(x, w[0]).sum(axis=1), ["'sum' as sum(x, dim=None,", "unexpected keyword argument 'axis'"]),
        (lambda w, x: ops.Add()(ROWS(x, w[0]), x, x), ["'add' as add(first, second,", "too many positional"]),
        (lambda w, x: ops.MatMul()(ROWS(x, w[0]), [[1.0]]), ["dlab cuts tensors, not [[1.0]]"]),
    ],
)
def test_arguments_that_no_rule_takes_are_told_with_those_that_it_takes(body, words):
    sentence = refused(body, X, error=TypeError)
    assert all(word in sentence for word in words), sentence


def test_labels_that_do_not_count():
    labels = torch.tensor([1, -100, 3, 7, -100, 2, 5, 6])
    loss = ops.CrossEntropy().shard(((4, 1), (4,)))
    plain = Net(lambda w, x, y: F.cross_entropy(x @ w[0], y), torch.randn(8, 8))
    cut = Net(lambda w, x, y: loss(x @ w[0], y), torch.randn(8, 8))
    check_on_threads(plain, cut, [torch.randn(8, 8), labels], ranks=4)

    def own_batch(transport):  # each rank has its own labels, and nobody knows how many count
        par = dlab.AutoParallel(lambda x, y: loss(x, y), transport=transport, dataset_strategy="data_parallel")
        with pytest.raises(ValueError, match="reduction='sum'"):
            par(torch.randn(2, 8), torch.tensor([-100, 1]))

    dlab.rehearse(own_batch, ranks=4)


# partial sums


def test_a_partial_sum_shows_itself_and_is_reduced_where_it_must_be():
    """Rows times columns that are both cut leave a sum of which each rank has a summand."""
    seen = []

    def body(weights, x):
        part = torch.matmul(x, weights[0])  # follows: the weight is cut by rows
        seen.append(part)
        seen.append(part * 2)  # linear: may keep it
        seen.append(part.t())
        seen.append(torch.relu(part))
        seen.append(part + 1)
        return sum((each.sum() for each in seen[1:]), start=part.sum())

    layout = dlab.Layout((2,), ("tp",))
    net = Net(body, torch.randn(8, 6))
    par = dlab.AutoParallel(net, ranks=2, layouts={"weights.0": layout("tp", "None")})
    par.explain(torch.randn(4, 8))
    part, doubled, turned, relu, more = seen
    assert part.placed.partial == doubled.placed.partial == turned.placed.partial == ("tp",)
    assert relu.placed.partial == more.placed.partial == ()
    assert "partial over tp" in repr(part) and "partial over tp" in str(part) and "partial" not in repr(relu)
    assert "4 × 6" in repr(part) and repr(relu) == "<ShardedTensor 4 × 6, (None, None), here (4, 6)>"


def test_relu_of_a_partial_sum_is_not_the_sum_of_relus():
    layout = dlab.Layout((4,), ("tp",))
    net = Net(lambda w, x: torch.relu(x @ w[0]) + (x @ w[0] / 3).t().t(), torch.randn(8, 6))
    x = torch.randn(4, 8)
    check_on_threads(net, None, [x], ranks=4, layouts={"weights.0": layout("tp", "None")})
    parts = zip(x.split(2, dim=1), net.weights[0].split(2, dim=0), strict=True)
    wrong = sum(torch.relu(a @ b) for a, b in parts)
    assert not torch.allclose(wrong, torch.relu(x @ net.weights[0]))  # so the test could tell


def test_a_number_divided_by_a_partial_sum():
    """`sum / 2` keeps a partial sum, `2 / sum` must not: the two calls look alike."""
    columns = ops.MatMul().shard(((1, 1), (1, 4)))

    def body(weights, x, cut=True):
        total = (columns(x, weights[0]) if cut else x @ weights[0]).sum(1)
        return total / 2 + 2 / total - total**2 + (3 - total) * -total

    x = torch.rand(8, 8) + 1
    weight = torch.rand(8, 8)
    check_on_threads(Net(lambda w, x: body(w, x, False), weight), Net(body, weight), [x], ranks=4, passes=2)


# shapes, indices, pieces


@pytest.mark.parametrize(
    "body",
    [
        lambda y: y[:, 0],
        lambda y: y[2:5].sum() + y[..., 1:3].sum() * y[-1, 2],
        lambda y: y[None, :, 3] * y[1:2],
        lambda y: torch.cat([y, y * 2, y[:, :3]], dim=1),
        lambda y: torch.cat([y, y.t()]),
        lambda y: torch.mul(*y.chunk(2, dim=-1)),
        lambda y: y.split([3, 5])[1].sum(0) + torch.split(y, 3, dim=1)[2].sum(),
        lambda y: y.view(y.shape[0] // 2, 2, -1).transpose(0, 1).reshape(-1, 4),
        lambda y: y.reshape(2, 32)[:, 1:],
        lambda y: y.unsqueeze(1) * y.unsqueeze(0),
        lambda y: y.unsqueeze(1).squeeze(1) + y[None].squeeze() * y[:, :1].squeeze(dim=0) + y[:, 1:2].squeeze((0, 1)),
        lambda y: sum(row * number for number, row in enumerate(y)) + y.unbind(-1)[2],
        lambda y: torch.stack([y, y.t()], dim=-1) * torch.stack((y[0, :2], y[1, :2])).sum(0),
        lambda y: torch.einsum("ij,kj", y, y) + torch.einsum("ij->ji", [y]) + torch.einsum("i,j->ij", y[0], y[1]),
        lambda y: y @ y[0] + torch.mv(input=y, vec=y[1]) + y[2] @ y[3] + y.reshape(2, 4, 8)[0, 0] @ y,
        lambda y: y + torch.zeros_like(y) + torch.arange(y.size(1)),
        lambda y: y.mean(dim=0) - y.sum(1, keepdim=True).mean() + y.t().mT.T.contiguous().numel(),
        lambda y: y.detach() * y,
        lambda y: torch.sum(input=torch.mul(input=y, other=y), dim=0),
    ],
)
def test_shapes_indices_and_pieces(body):
    weight = torch.randn(8, 8)
    for strategy in [((4, 1), (1, 1)), ((1, 1), (1, 4)), ((2, 1), (1, 2)), ((1, 4), (4, 1))]:
        matmul = ops.MatMul().shard(strategy)
        cut = Net(lambda w, x, matmul=matmul: body(matmul(x, w[0])), weight)
        check_on_threads(Net(lambda w, x: body(x @ w[0]), weight), cut, [torch.randn(8, 8)], 4, str(strategy))


@pytest.mark.parametrize(
    "body",
    [
        lambda y: y.sum(dim=()) * y.sum([]) * y.mean(()),  # all dimensions, as in torch
        lambda y: y.sum(dim=-1, dtype=torch.float64) + torch.mean(y, -1, dtype=torch.float64),
        lambda y: y.sum().softmax(0) + y.mean().sum(-1) + y.sum().mean() + y.sum().flatten(),
        lambda y: torch.reshape(input=y, shape=(4, 16)).view(size=(-1,)) * torch.permute(y, dims=(1, 0)).flatten(-2),
        lambda y: torch.mm(y, mat2=y) + torch.pow(y, exponent=2) + torch.permute(y, (1, 0)),
        lambda y: torch.nn.LeakyReLU(0.1)(y) + F.elu(y) + F.softplus(y) + y.sin() + torch.cos(y) + y.clone(),
        lambda y: y.to(torch.float64) + y.to(dtype=torch.float32).double(),
    ],
)
def test_arguments_as_torch_takes_them(body):
    weight = torch.randn(8, 8)
    for strategy in [((4, 1), (1, 1)), ((2, 1), (1, 2)), ((1, 4), (4, 1))]:
        matmul = ops.MatMul().shard(strategy)
        cut = Net(lambda w, x, matmul=matmul: body(matmul(x, w[0])), weight)
        check_on_threads(Net(lambda w, x: body(x @ w[0]), weight), cut, [torch.randn(8, 8)], 4, str(strategy))


def test_weights_in_a_list():
    """They are not arguments themselves, and must be cut all the same."""
    layout = dlab.Layout((4,), ("tp",))
    net = Net(
        lambda w, x: torch.cat([x, x], dim=1) @ torch.cat([w[0], w[1]]) @ torch.stack([w[1], w[0]]).sum(0),
        *torch.randn(2, 8, 8),
    )
    layouts = {"weights.0": layout("tp", None), "weights.1": layout(None, "tp")}
    check_on_threads(net, None, [torch.randn(4, 8)], ranks=4, layouts=layouts)


def test_the_mean_of_halves_does_not_overflow():
    """Their sum is more than the largest float16, 65,504."""
    mean, x = dlab.shard(torch.mean, in_strategy=((2, 2),)), torch.full((64, 64), 300.0, dtype=torch.float16)
    found = dlab.rehearse(lambda ranks: dlab.AutoParallel(lambda x: mean(x), transport=ranks)(x), ranks=4)
    assert [each.item() for each in found] == [300.0] * 4


def test_two_calls_that_differ_only_in_a_number_are_not_mixed_up():
    cut = Net(lambda w, x: tuple(ROWS(x, w[0])[:, :end].mean(1) for end in (2, 5, 8)), torch.randn(8, 8))
    plain = Net(lambda w, x: tuple((x @ w[0])[:, :end].mean(1) for end in (2, 5, 8)), torch.randn(8, 8))
    check_on_threads(plain, cut, [torch.randn(8, 8)], ranks=2)


def test_a_tensor_that_is_changed_in_place_between_two_uses():
    """What was moved before is moved again: the mask of the second product is not that of the first."""

    def body(weights, x, matmul=torch.matmul):
        mask = torch.ones(8, 8)
        first = torch.relu(matmul(x, weights[0]) + mask)
        mask[:, :4] = -1
        return first + torch.relu(matmul(x, weights[0]) + mask)

    weight = torch.randn(8, 8)
    check_on_threads(Net(body, weight), Net(lambda w, x: body(w, x, ROWS), weight), [torch.randn(8, 8)], ranks=2)


def test_rows_that_do_not_divide_are_computed_by_every_rank():
    net = Net(lambda w, x: torch.relu(x @ w[0]) + x, torch.randn(8, 8))
    check_on_threads(net, None, [torch.randn(7, 8)], ranks=4, passes=2)


def test_layouts_without_a_common_device_matrix():
    """(2, 3) and (3, 2) share no axes: the tensor is gathered and cut anew."""
    first, second = ops.MatMul().shard(((2, 3), (3, 1))), ops.MatMul().shard(((3, 1), (1, 2)))
    weights = [torch.randn(12, 12) for _ in range(2)]
    plain = Net(lambda w, x: torch.relu(x @ w[0]) @ w[1] + x, *weights)
    cut = Net(lambda w, x: second(torch.relu(first(x, w[0])), w[1]) + x, *weights)
    check_on_threads(plain, cut, [torch.randn(6, 12)], ranks=6)
