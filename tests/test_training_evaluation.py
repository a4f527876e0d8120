"""Evaluations equal what plain loops over all samples find, for any number of ranks, and say what is wrong."""

import math
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from html.parser import HTMLParser

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dlab
from dlab import cost
from dlab.data.batches import as_positions
from dlab.training.evaluation import Evaluation, average_precision, count_pairs, evaluate

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

# ------------------------------------------------------------------------ plain truth, by loops over Python numbers


def plain_softmax(row):
    """The probabilities of one sample."""
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / math.fsum(weights) for weight in weights]


def plain_confusion(rows, labels, classes):
    """Counts; the first of equal scores wins."""
    table = [[0] * classes for _ in range(classes)]
    for row, label in zip(rows, labels, strict=True):
        table[label][row.index(max(row))] += 1
    return table


def plain_average_precision(scores, hits):
    """For each threshold anew, count over all samples: who reaches it, and who of them is a hit."""
    if not any(hits):
        return math.nan
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        reached = [hit for score, hit in zip(scores, hits, strict=True) if score >= threshold]
        precision, recall = sum(reached) / len(reached), sum(reached) / sum(hits)
        total += (recall - recall_before) * precision
        recall_before = recall
    return total


def share(part, whole):
    """A fraction that may be 0/0."""
    return part / whole if whole else math.nan


def check(found, rows, labels):
    """Compare an evaluation with the loops."""
    classes = len(rows[0])
    table = plain_confusion(rows, labels, classes)
    probabilities = [plain_softmax(row) for row in rows]
    assert found.confusion.dtype == torch.int64 and found.confusion.tolist() == table
    assert found.samples == len(rows)
    assert found.accuracy == sum(table[c][c] for c in range(classes)) / len(rows)
    for c in range(classes):
        column = sum(table[true][c] for true in range(classes))
        assert found.precision[c].item() == pytest.approx(share(table[c][c], column), nan_ok=True)
        assert found.recall[c].item() == pytest.approx(share(table[c][c], sum(table[c])), nan_ok=True)
        expected = plain_average_precision([each[c] for each in probabilities], [label == c for label in labels])
        assert found.average_precision[c].item() == pytest.approx(expected, rel=1e-12, nan_ok=True)
    known = [value for value in found.average_precision.tolist() if not math.isnan(value)]
    assert found.mean_average_precision == pytest.approx(sum(known) / len(known), rel=1e-12)
    loss = math.fsum(-math.log(each[label]) for each, label in zip(probabilities, labels, strict=True)) / len(rows)
    assert found.loss == pytest.approx(loss, rel=1e-9, abs=1e-12)


def draw(samples, classes=4, seed=0):
    """Random scores that are right more often than not, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    scores = torch.randn(samples, classes, generator=generator)
    return scores + nn.functional.one_hot(labels, classes), labels


def score_as_given(scores, labels, ranks=1, **options):
    """The evaluations of all ranks, of a model that returns its input."""
    data = TensorDataset(torch.as_tensor(scores), torch.as_tensor(labels))
    return dlab.rehearse(lambda transport: evaluate(nn.Identity(), data, transport, **options), ranks=ranks)


# --------------------------------------------------------------------------------------- equal, for any number of ranks


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 23, 60])
@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_all_ranks_find_what_plain_loops_find(ranks, samples, batch_size):
    scores, labels = draw(samples, seed=samples)
    alone = evaluate(nn.Identity(), TensorDataset(scores, labels), batch_size=batch_size)
    check(alone, scores.tolist(), labels.tolist())
    assert score_as_given(scores, labels, ranks, batch_size=batch_size) == [alone] * ranks  # to the last bit


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 5),
    classes=st.integers(1, 4),
    samples=st.integers(1, 40),
    different=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_ties_and_missing_classes_are_counted_as_the_loops_count_them(ranks, classes, samples, different, seed):
    chance = random.Random(seed)
    pool = [[chance.gauss(0, 2) for _ in range(classes)] for _ in range(different)]  # few, so that many are equal
    rows = torch.tensor([chance.choice(pool) for _ in range(samples)], dtype=torch.float64)
    labels = [chance.randrange(classes) for _ in range(samples)]
    found = score_as_given(rows, labels, ranks)
    assert all(each == found[0] for each in found)
    check(found[0], rows.tolist(), labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fewer_samples_than_ranks_with_scores_of_any_type(dtype):
    scores, labels = draw(3)
    alone = evaluate(nn.Identity(), TensorDataset(scores.to(dtype), labels))
    check(alone, scores.to(dtype).tolist(), labels.tolist())
    assert score_as_given(scores.to(dtype), labels, ranks=5) == [alone] * 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_network_on_images(ranks):
    torch.manual_seed(0)
    model, data = dlab.SmallCNN(), torch.utils.data.Subset(dlab.mnist(train=False), range(500))
    images, labels = dlab.mnist(train=False)[:500]
    scores = model(images).detach()
    for found in dlab.rehearse(lambda transport: evaluate(model, data, transport, batch_size=64), ranks=ranks):
        assert found.confusion.tolist() == plain_confusion(scores.tolist(), labels.tolist(), 10)
        assert found.loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-5)
        expected = [
            plain_average_precision([plain_softmax(row)[c] for row in scores.tolist()], (labels == c).tolist())
            for c in range(10)
        ]
        torch.testing.assert_close(found.average_precision, torch.tensor(expected).double(), rtol=1e-3, atol=1e-3)


def test_a_list_of_pairs_is_data_too():
    found = evaluate(nn.Identity(), [(torch.tensor([2.0, 1.0]), 0), (torch.tensor([2.0, 1.0]), 1)])
    assert found.confusion.tolist() == [[1, 0], [1, 0]] and found.accuracy == 0.5


def in_a_worker(scores, labels, images):
    """Both evaluations of this rank, and who it is."""
    torch.manual_seed(0)
    given = evaluate(nn.Identity(), TensorDataset(scores, labels), dlab.transport(), batch_size=16)
    digits = torch.utils.data.Subset(dlab.mnist(train=False), range(images))
    return dlab.rank(), given, evaluate(dlab.SmallCNN().to(dlab.device()), digits, dlab.transport())


def test_real_processes_get_what_one_process_gets():
    scores, labels = draw(301, classes=7)
    alone = evaluate(nn.Identity(), TensorDataset(scores, labels))
    torch.manual_seed(0)
    network = evaluate(dlab.SmallCNN(), torch.utils.data.Subset(dlab.mnist(train=False), range(101)))
    with dlab.Cluster(2, backend="gloo") as cluster:
        results = cluster.run(in_a_worker, scores, labels, 101, timeout=60)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert all(given == alone for _, given, _ in results)
    assert results[0][2] == results[1][2]
    assert torch.equal(results[0][2].confusion, network.confusion)
    assert results[0][2].loss == pytest.approx(network.loss, rel=1e-5)


@pytest.mark.gpu
def test_a_model_on_a_gpu_gets_its_data_there():
    torch.manual_seed(0)
    model, data = dlab.SmallCNN(), torch.utils.data.Subset(dlab.mnist(train=False), range(200))
    on_cpu, on_gpu = evaluate(model, data), evaluate(model.cuda(), data)
    assert on_gpu.confusion.device == on_gpu.average_precision.device == torch.device("cpu")
    assert on_gpu.samples == 200 and on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-3)


# --------------------------------------------------------------------------------------------- who does what, and when


class Asked(Dataset):
    """Notes who asks for which positions."""

    def __init__(self, samples):
        self.asked, self.samples = {}, samples

    def __len__(self):
        return self.samples

    def take(self, index):
        positions = as_positions(index, self.samples)
        self.asked.setdefault(threading.current_thread().name, []).append(positions.tolist())
        return torch.zeros(len(positions), 3), torch.zeros(len(positions), dtype=torch.int64)


@pytest.mark.parametrize(("samples", "ranks"), [(12, 3), (11, 3), (13, 5), (10, 1)])
def test_each_rank_takes_its_own_part_batch_by_batch(samples, ranks):
    data = Asked(samples)
    dlab.rehearse(lambda transport: evaluate(nn.Identity(), data, transport, batch_size=2), ranks=ranks)
    for rank, part in enumerate(torch.arange(samples).tensor_split(ranks)):
        assert data.asked[f"rank {rank}"] == [batch.tolist() for batch in part.split(2)]


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("samples", [2, 20, 23])
def test_it_sends_what_the_docstring_says(ranks, samples):
    scores, labels = draw(samples, classes=4)
    sent = Counter()
    for event in score_as_given(scores, labels, ranks).messages:
        sent[event.rank] += event.data["bytes"]
    sizes = [len(part) for part in torch.arange(samples).tensor_split(ranks)]
    counts = cost.allreduce("ring", ranks, 8 * 4 * 4, itemsize=8).bytes_per_rank
    for rank in range(ranks):  # all rows but those that begin at the right neighbour, which has them
        passed = sum(sizes) - sizes[(rank + 1) % ranks]
        assert sent[rank] == passed * (4 * 4 + 8) + counts[rank]


class Slow(TensorDataset):
    """The ranks of a rehearsal come one after another, and need the longer the higher their rank is."""

    def pause(self):
        time.sleep(0.05 * int(threading.current_thread().name.removeprefix("rank ")))

    def __len__(self):
        self.pause()
        return super().__len__()

    def take(self, index):
        self.pause()
        return self[index]


class Picky(nn.Module):
    """Notes in which mode it was asked."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
        self.modes = set()

    def forward(self, inputs):
        modes = {module.training for module in self.modules()}
        self.modes.add((*sorted(modes), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return self.layers(inputs)


@pytest.mark.parametrize("ranks", [1, 3])
def test_modules_are_in_evaluation_mode_meanwhile_and_as_before_afterwards(ranks):
    model = Picky().train()
    model.layers[1].eval()  # frozen by hand: it must stay so
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    data = Slow(*draw(7, classes=3))
    results = dlab.rehearse(lambda transport: evaluate(model, data, transport, batch_size=2), ranks=ranks)
    assert model.modes == {(False, True, False)}
    assert [module.training for module in model.modules()] == flags and True in flags and False in flags
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(each == results[0] for each in results)
    assert not results[0].confusion.is_inference() and not results[0].average_precision.is_inference()


def test_modules_are_as_before_after_a_failure_too():
    model = nn.Sequential(nn.Dropout(), nn.Linear(5, 2)).train()
    with pytest.raises(RuntimeError):  # 3 inputs instead of 5
        evaluate(model, TensorDataset(*draw(4, classes=3)))
    assert all(module.training for module in model.modules())


# ------------------------------------------------------------------------------------------------ the numbers by hand


def test_a_known_average_precision():
    # the example in scikit-learn's manual
    assert average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]) == 1) == pytest.approx(
        5 / 6
    )


def test_equal_scores_rank_nobody_first_whatever_their_order():
    for hits in ([True, False, False, False], [False, False, False, True]):
        assert average_precision(torch.ones(4), torch.tensor(hits)) == 0.25
    # one ahead, then a tie of three with one hit: 1/2 of the hits at precision 1, 1/2 at 2/4
    assert average_precision(torch.tensor([1.0, 1, 2, 1]), torch.tensor([False, False, True, True])) == 0.75


def test_a_perfect_and_a_worst_ranking():
    scores = torch.arange(4.0)
    assert average_precision(scores, torch.tensor([False, False, True, True])) == 1.0
    assert average_precision(scores, torch.tensor([True, False, False, False])) == 0.25


def test_what_a_model_is_very_sure_of_is_ranked_all_the_same():
    # in float32 each of these probabilities is 1
    found = evaluate(
        nn.Identity(), TensorDataset(torch.tensor([[20.0, 0], [25.0, 0], [30.0, 0]]), torch.tensor([1, 0, 0]))
    )
    assert found.average_precision.tolist() == [1.0, 1.0]


def test_a_class_that_never_occurs_and_one_that_is_never_predicted():
    found = evaluate(nn.Identity(), TensorDataset(torch.tensor([[3.0, 1, 2], [1.0, 0, 2]]), torch.tensor([0, 0])))
    assert found.confusion.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert str(found.precision.tolist()) == "[1.0, nan, 0.0]"
    assert str(found.recall.tolist()) == "[0.5, nan, nan]"
    assert str(found.average_precision.tolist()) == "[1.0, nan, nan]"
    assert found.mean_average_precision == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_a_number_makes_no_ranking(value):
    scores, labels = draw(6)
    scores[2, 1] = value
    found = score_as_given(scores, labels, ranks=2)
    assert found[0] == found[1] and found[0].samples == 6
    assert math.isnan(found[0].loss) and math.isnan(found[0].mean_average_precision)
    assert found[0].average_precision.isnan().all()


def test_counts_of_pairs():
    assert count_pairs(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), classes=2).tolist() == [[1, 0], [1, 1]]


# ------------------------------------------------------------------------------------------------------ how it looks

SMALL = Evaluation(torch.tensor([[2, 1], [0, 0]]), torch.tensor([0.75, math.nan], dtype=torch.float64), 0.5)


def test_the_text():
    assert repr(SMALL) == (
        "class  samples  precision  recall  average precision\n"
        "    0        3  1.0000     0.6667  0.7500\n"
        "    1        0  0.0000     nan     nan\n"
        "accuracy 0.6667, mean average precision 0.7500, loss 0.5000, 3 samples"
    )


class Cells(HTMLParser):
    """The texts of a page, and whether its tags close in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_html_says_the_same_as_the_text():
    *rows, summary = repr(SMALL).replace("average precision\n", "average_precision\n").splitlines()
    words = [word.replace("_", " ") for row in rows for word in row.split()]
    assert Cells(SMALL._repr_html_()).texts == [*words, summary]


def test_many_classes_are_folded():
    many = Evaluation(torch.eye(40, dtype=torch.int64) * 1000, torch.ones(40, dtype=torch.float64), 0.0)
    lines = repr(many).splitlines()
    assert len(lines) == 19 and "… 24 more classes, 24,000 samples together" in lines
    assert lines[-1].endswith("40,000 samples")
    assert not many.figure().axes[0].texts and many.figure().axes[0].get_xlabel()


def test_the_figure_is_the_confusion_matrix():
    figure = Evaluation(torch.tensor([[5, 1], [0, 7]]), torch.ones(2), 0.0).figure()
    axes = figure.axes[0]
    numbers = {text.get_position(): text.get_text() for text in axes.texts}
    assert numbers == {(0, 0): "5", (1, 0): "1", (0, 1): "0", (1, 1): "7"}  # x is the predicted label, y the true one
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted label", "true label")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "1"]
    assert axes.get_ylim() == (1.5, -0.5)  # label 0 is on top, as in the table
    torch.testing.assert_close(
        torch.tensor(axes.images[0].get_array()), torch.tensor([[5 / 6, 1 / 6], [0, 1]]).double()
    )
    # each number stands out from its cell
    for text in axes.texts:
        x, y = text.get_position()
        red, green, blue, _ = axes.images[0].to_rgba(axes.images[0].get_array())[y, x]
        light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5
        assert text.get_color() == ("black" if light else "white")
    figure.canvas.draw()


def test_evaluating_does_not_import_matplotlib():
    code = (
        "import sys, torch; from torch import nn; from dlab.training.evaluation import evaluate; "
        "found = evaluate(nn.Identity(), [(torch.ones(2), 0)]); repr(found), found._repr_html_(); "
        "print('matplotlib' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False"]


def test_evaluations_compare_travel_and_stay_as_they_are():
    same = pickle.loads(pickle.dumps(SMALL))
    assert same == SMALL and SMALL != 3
    assert Evaluation(SMALL.confusion + 1, SMALL.average_precision, SMALL.loss) != SMALL
    assert Evaluation(SMALL.confusion, SMALL.average_precision + 1, SMALL.loss) != SMALL
    assert Evaluation(SMALL.confusion, SMALL.average_precision, math.nan) != SMALL
    with pytest.raises(AttributeError):
        SMALL.loss = 0.0


# ------------------------------------------------------------------------------------------------------ what is wrong


class FirstColumns(nn.Module):
    """Gives only the first columns of its input."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, inputs):
        return inputs[:, : self.columns]


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Flatten(0), r"a tensor \(6,\)"),
        (nn.Unflatten(1, (3, 1)), r"a tensor \(2, 3, 1\)"),
        (FirstColumns(0), r"a tensor \(2, 0\)"),
        (nn.Unflatten(0, (1, 2)), r"a tensor \(1, 2, 3\)"),
        (nn.LSTM(3, 2), "a tuple"),
    ],
)
def test_a_model_that_gives_no_scores(model, found):
    data = TensorDataset(*draw(2, classes=3))
    with pytest.raises(
        ValueError, match=rf"^the model returned {found} for a batch of 2: it must return scores \(batch, cl"
    ):
        evaluate(model, data)


def test_a_single_class_is_enough():
    found = evaluate(FirstColumns(1), TensorDataset(torch.ones(2, 3), torch.tensor([0, 0])))
    assert (found.accuracy, found.mean_average_precision, found.loss) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(("label", "ranks"), [(3, 1), (-1, 1), (3, 4), (-100, 9)])
def test_a_label_outside_the_classes_is_named_on_every_rank(label, ranks):
    scores, labels = draw(8, classes=3)
    labels[6] = label

    def work(transport):
        with pytest.raises(ValueError) as problem:
            evaluate(nn.Identity(), TensorDataset(scores, labels), transport)
        return str(problem.value)

    sentence = f"sample 6 has the label {label}, but the model scores the classes 0 to 2"
    assert dlab.rehearse(work, ranks=ranks) == [sentence] * ranks


def test_no_data():
    with pytest.raises(ValueError, match=r"^there is nothing to evaluate: the data are empty$"):
        evaluate(nn.Identity(), [])


def test_labels_that_are_no_labels():
    with pytest.raises(ValueError, match=r"of 2 are torch.float32 \(2,\): each label must be one whole number$"):
        evaluate(nn.Identity(), TensorDataset(torch.ones(2, 3), torch.ones(2)))
    with pytest.raises(ValueError, match=r"of 2 are torch.int64 \(2, 3\): each label must be one whole number$"):
        evaluate(nn.Identity(), TensorDataset(torch.ones(2, 3), torch.ones(2, 3).long()))
    with pytest.raises(ValueError, match=r"of 1 are tuple: each label must be one whole number$"):
        evaluate(nn.Identity(), [(torch.ones(3), "seven")])


def test_a_batch_of_nothing():
    with pytest.raises(ValueError, match="batch_size is 0: a batch needs at least one sample"):
        evaluate(nn.Identity(), TensorDataset(*draw(2)), batch_size=0)
