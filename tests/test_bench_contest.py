"""The benchmarks of collectives compare what they say, at every size, and check the sums. No test asks how fast."""

import os
import subprocess
import sys

import pytest
import torch

from dlab.bench import contest, exchanging, mpi, reducing, table
from dlab.bench.contest import OPEN_MPI, RANKS, SIZES
from dlab.bench.rows import AtLeast, Grid, Row

needs_open_mpi = pytest.mark.skipif(not mpi.installed(), reason="Open MPI and mpi4py are not installed")
CONTESTS = (reducing.ALL_REDUCE, *exchanging.CONTESTS)
CONTENDERS = reducing.ALL_REDUCE.contenders
NAMES = "import dlab.bench.reducing; from dlab.bench.rows import REGISTERED; print(*REGISTERED, sep='\\n')"


@pytest.fixture
def made_up(monkeypatch):
    """Contender number i takes i microseconds for a small tensor, i + 1 for the next size."""

    def measured(which, ranks, quick):
        there = [who for who in CONTENDERS if who != OPEN_MPI or mpi.installed()]
        return {
            (size, who): [float(place + CONTENDERS.index(who))] * 3
            for place, size in enumerate(SIZES, 1)
            for who in there
        }

    monkeypatch.setattr(contest, "measured", measured)


# ---------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize(("which", "quick"), [*((each, True) for each in CONTESTS), (CONTESTS[0], False)])
def test_every_contender_is_measured_at_every_size(monkeypatch, which, quick):
    monkeypatch.setattr(contest, "SIZES", {64: "64 B", 1024: "1 KiB"})
    monkeypatch.setattr(contest, "SECONDS", 1e-4)
    monkeypatch.setattr(contest, "ROUNDS", 2)
    contest.measured.cache_clear()
    times = contest.measured(which, 2, quick)
    contest.measured.cache_clear()
    there = [who for who in which.contenders if who != OPEN_MPI or mpi.installed()]
    assert set(times) == {(size, who) for size in (64, 1024) for who in there}
    samples = 1 if quick else contest.ROUNDS * contest.PASSES
    assert all(len(taken) == samples and min(taken) > 0 for taken in times.values())


def test_a_right_sum_passes_and_leaves_zeros(monkeypatch):
    monkeypatch.setattr(reducing.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(reducing.dist, "get_world_size", lambda: 3)
    tensor = torch.empty(5)
    reducing.check(lambda: tensor.mul_(3), tensor, "three ranks")  # 2 becomes 1 + 2 + 3
    assert tensor.eq(0).all()


@pytest.mark.parametrize("place", [0, 4])
def test_a_wrong_sum_is_noticed_wherever_it_is(monkeypatch, place):
    monkeypatch.setattr(reducing.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(reducing.dist, "get_world_size", lambda: 3)
    tensor = torch.empty(5)

    def all_but_one():
        tensor.mul_(3)
        tensor[place] = 5

    with pytest.raises(AssertionError, match="the sum is wrong: a contender"):
        reducing.check(all_but_one, tensor, "a contender")


# ----------------------------------------------------------------------------------------- Open MPI


@needs_open_mpi
@pytest.mark.parametrize("name", [each.name for each in CONTESTS])
def test_a_job_of_open_mpi_measures_what_it_is_told(name):
    taken = mpi.seconds_per_call(name, 2, {64: 3, 4096: 2}, passes=2)
    assert list(taken) == [64, 4096]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in taken.values())


@needs_open_mpi
def test_ranks_that_do_not_find_each_other_are_no_measurement():
    run = subprocess.run(
        [sys.executable, "-m", "dlab.bench.mpi", '["all-reduce", 2, [[64, 1]], 1]'], capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "mpi4py sees 1 of 2 ranks" in run.stderr


def test_a_job_that_fails_is_an_error(monkeypatch, tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        mpi.seconds_per_call("all-reduce", 2, {64: 1}, passes=1)


def test_without_open_mpi_its_rows_are_left_out():
    without = {**os.environ, "PATH": "/nowhere"}
    names = subprocess.run(
        [sys.executable, "-c", NAMES], env=without, capture_output=True, text=True, check=True
    ).stdout
    assert "against gloo" in names
    assert "Open MPI" not in names


def test_without_open_mpi_the_grid_says_how_to_get_it(monkeypatch, made_up):
    monkeypatch.setattr(mpi, "installed", lambda: False)
    grid = contest.grid(reducing.ALL_REDUCE, 2, "a grid", quick=True)
    assert OPEN_MPI not in grid.headings
    assert "Open MPI is not installed: pip install 'dlab[bench]'" in grid.note


# ----------------------------------------------------------------------------------- rows and grids


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("comparison", reducing.ALL_REDUCE.comparisons, ids=lambda comparison: comparison.name)
def test_a_row_compares_the_two_it_names(monkeypatch, made_up, comparison, ranks):
    monkeypatch.setattr(mpi, "installed", lambda: True)
    row = contest.compare(reducing.ALL_REDUCE, comparison, ranks, "a row", quick=True)
    place = 1 + [*SIZES.values()].index(row.name.removeprefix("a row: "))
    assert (row.ours, row.theirs) == tuple(
        place + CONTENDERS.index(who) for who in (comparison.ours, comparison.theirs)
    )
    assert len(comparison.targets[ranks]) == len(SIZES)
    assert all(f"{label} " in row.note for label in SIZES.values())


def one(ratio: float, target: float | None) -> Row:
    return Row("all-reduce", 1.0, ratio, ratio, None if target is None else AtLeast(target), "us", "one round")


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ({"small": one(100, 80), "large": one(8, 7)}, "large"),
        ({"small": one(70, 80), "large": one(8, 7)}, "small"),
        ({"small": one(0.1, None), "large": one(8, 7)}, "large"),  # where nothing is asked nothing is missed
        ({"small": one(3, None), "large": one(2, None)}, "large"),
    ],
)
def test_the_size_nearest_to_missing_its_target_is_shown(rows, chosen):
    row = contest.nearest(rows)
    assert row.name == f"all-reduce: {chosen}"
    assert (row.ratio, row.target) == (rows[chosen].ratio, rows[chosen].target)


def test_the_note_has_every_size_and_what_was_asked():
    row = contest.nearest({"small": one(100, 80), "middle": one(3.25, None), "large": one(8, 7)})
    assert row.note == "one round; small 100x of 80x, middle 3.25x, large 8x of 7x"


GRID = Grid("microseconds", ("", "ours", "a long heading"), [("4 KiB", "5.1", "7"), ("64 MiB", "16400", "8")], "how")


def test_a_grid_is_printed_below_the_rows():
    lines = table.as_text([GRID, one(100, 80)], "a machine").splitlines()
    start = lines.index("microseconds:")
    heading, *cells = lines[start + 1 : start + 4]
    assert [line.split() for line in cells] == [["4", "KiB", "5.1", "7"], ["64", "MiB", "16400", "8"]]
    for place in ("ours", "a long heading"):
        column = heading.index(place)
        assert all(line[column - 1] == " " and line[column] != " " for line in cells)
    assert lines[start + 4].strip() == "how"
    assert any(line.startswith("all-reduce ") for line in lines[:start])


def test_a_grid_is_a_table_of_its_own_on_the_page():
    lines = table.as_page([one(100, 80), GRID], "a machine").splitlines()
    assert lines[lines.index("## microseconds") :] == [
        "## microseconds",
        "",
        "(how)",
        "",
        "|  | ours | a long heading |",
        "| --- | --- | --- |",
        "| 4 KiB | 5.1 | 7 |",
        "| 64 MiB | 16400 | 8 |",
    ]
