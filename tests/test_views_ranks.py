"""The ranks at a glance, from their states and their logged steps."""

from matplotlib.figure import Figure

import dlab
from dlab.views import Timeline
from dlab.views.ranks import LOOKS, Ranks


def _state(rank, state, why="", time=0.0):
    return dlab.Event(time, rank, "state", {"state": state, "why": why})


def _steps(rank, compute, wait, count=6):
    logged = {"loss": 1.0, "compute": compute, "wait": wait}
    return [dlab.Event(float(step), rank, "log", {"step": step, **logged}) for step in range(count)]


def _delayed():
    return [
        *(_state(rank, "running") for rank in range(3)),
        *_steps(0, 0.1, 0.4),
        *_steps(1, 0.1, 0.4),
        *_steps(2, 0.5, 0),
    ]


def test_who_waits_for_whom_and_who_is_slow():
    states = [(rank, state, words, step) for rank, state, words, step in Ranks(_delayed()).rows()]
    assert states == [
        (0, "waiting", "waiting for rank 2", 5),
        (1, "waiting", "waiting for rank 2", 5),
        (2, "slow", "slow", 5),
    ]


def test_a_timeline_that_is_shared_tells_the_same():
    timeline = Timeline(_delayed())
    assert Ranks(_delayed(), timeline=timeline).rows() == Ranks(_delayed()).rows()


def test_the_last_state_counts_and_a_death_says_why():
    view = Ranks([_state(0, "running"), _state(1, "running")])
    view.add([_state(0, "delayed", "0.2 s a step"), _state(1, "dead", "was killed by signal 9 (SIGKILL)")])
    assert str(view).splitlines()[0].startswith("rank 0   delayed 0.2 s a step")
    assert "rank 1 dead: was killed by signal 9 (SIGKILL)" in view.alt
    assert [row["state"] for row in view.data()["ranks"]] == ["delayed", "dead"]
    assert isinstance(view.figure(), Figure)


def test_a_hang_says_what_each_rank_waits_for_and_why_until_it_is_over():
    waits = [{"rank": rank, "words": f"waiting in recv for rank {1 - rank}, line 3 of f"} for rank in range(2)]
    why = "each waits for the next: 0 → 1 → 0"
    view = Ranks([_state(0, "running"), _state(1, "running")])
    view.add([dlab.Event(9.0, 0, "hang", {"why": why, "ranks": waits, "seconds": 5.0})])
    assert [(state, words) for _, state, words, _ in view.rows()] == [
        ("waiting", f"waiting in recv for rank {1 - rank}, line 3 of f") for rank in range(2)
    ]
    assert str(view).endswith(f"no rank makes progress: {why}")
    assert view.data()["hang"] in view.alt
    assert view.hang in {text.get_text() for text in view.figure().axes[0].texts}
    view.add([dlab.Event(12.0, 0, "hang", {"why": "", "ranks": [], "seconds": 8.0})])
    assert [state for _, state, _, _ in view.rows()] == ["running", "running"]
    assert "progress" not in str(view) + view.alt and not view.data()["hang"]


def test_states_differ_without_colours_too():
    for state, (colour, sign) in LOOKS.items():
        twins = [other for other, look in LOOKS.items() if look[1] == sign and look[0] != colour]
        assert not twins, (state, twins)


def test_nothing_known_is_empty():
    assert Ranks().empty and str(Ranks()) == ""
