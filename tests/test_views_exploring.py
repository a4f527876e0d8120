"""Controls for a function's arguments: what is shown follows them, errors are sentences, and programs get a still."""

import ipywidgets
import pytest
from IPython.core.interactiveshell import InteractiveShell
from kernels import Kernel

from dlab.views.exploring import explore


class Grid:
    """Something with HTML of its own."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return f"grid {self.number}"

    def _repr_html_(self):
        return f"<table><tr><td>{self.number}</td></tr></table>"


def power(n, exponent):
    if exponent == 0:
        raise ValueError("nothing <to> multiply")
    return [f"{n} ** {exponent} = {n**exponent}", Grid(n)]


@pytest.fixture
def explorer():
    return explore(power, {"halve": lambda n, exponent: f"half: {n**exponent / 2:g}"}, n=[2, 3, 5], exponent=[1, 2, 0])


def test_what_is_shown_follows_the_controls(explorer):
    assert explorer.chosen == {"n": 2, "exponent": 1}
    assert explorer.text == "n: 2, exponent: 1\n2 ** 1 = 2\ngrid 2"
    explorer.choose(n=5, exponent=2)
    assert explorer.text == "n: 5, exponent: 2\n5 ** 2 = 25\ngrid 5"
    assert "<table><tr><td>5</td></tr></table>" in explorer._bundle()["text/html"]


def test_an_impossible_choice_is_a_sentence_and_the_next_one_works(explorer):
    explorer.choose(exponent=0)
    assert explorer.text.endswith("nothing <to> multiply")
    assert "nothing &lt;to&gt; multiply" in explorer._bundle()["text/html"]
    explorer.choose(exponent=2)
    assert "2 ** 2 = 4" in explorer.text


def test_what_a_button_has_shown_goes_when_a_control_moves(explorer):
    explorer.press("halve")
    assert explorer.text == "n: 2, exponent: 1\nhalf: 1\n2 ** 1 = 2\ngrid 2"
    explorer.choose(n=3)
    assert "half" not in explorer.text


def test_while_a_button_works_it_is_disabled_and_its_name_is_shown(explorer, monkeypatch):
    shown = []
    monkeypatch.setattr(explorer, "_update", lambda: shown.append((explorer.text, explorer._buttons[0].disabled)))
    explorer.press("halve")
    assert shown == [
        ("n: 2, exponent: 1\nhalve …\n2 ** 1 = 2\ngrid 2", True),
        ("n: 2, exponent: 1\nhalf: 1\n2 ** 1 = 2\ngrid 2", False),
    ]


def test_an_interrupted_button_can_be_pressed_again():
    def interrupt(n):
        raise KeyboardInterrupt

    explorer = explore(lambda n: f"n is {n}", {"wait": interrupt}, n=[2, 3])
    with pytest.raises(KeyboardInterrupt):
        explorer.press("wait")
    assert not explorer._buttons[0].disabled


def test_a_refusal_by_both_is_said_once():
    explorer = explore(power, {"again": power}, n=[2, 3], exponent=[0, 1])
    explorer.press("again")
    assert explorer.text == "n: 2, exponent: 0\nnothing <to> multiply"


def test_numbers_have_sliders_and_others_lists():
    explorer = explore(lambda **chosen: "", first_axis=[1, 2], way=["ring", "tree"], alone=[7])
    first, way, alone = explorer._controls.values()
    assert isinstance(first, ipywidgets.SelectionSlider) and first.description == "first axis"
    assert isinstance(way, ipywidgets.Dropdown) and isinstance(alone, ipywidgets.Dropdown)


def test_an_argument_without_values_is_refused():
    with pytest.raises(ValueError, match="n has no values to choose from: give a list with at least one"):
        explore(power, n=[])


def test_a_change_is_sent_to_the_same_output(explorer, monkeypatch):
    shell, published = InteractiveShell.instance(), []
    monkeypatch.setattr(shell.display_pub, "publish", lambda **told: published.append(told))
    explorer._ipython_display_()
    explorer.choose(n=3)
    first, second = published
    assert not first.get("update") and second["update"] and first["transient"] == second["transient"]
    assert "3 ** 1 = 3" in second["data"]["text/plain"]


def test_a_program_stores_a_still_and_no_widget():
    code = "from dlab.views.exploring import explore\nexplore(lambda n: f'n is {n}', n=[2, 3])"
    kernel = Kernel()
    try:
        cell = kernel.submit(code)
        assert kernel.finish(cell, 60).error is None
        bundles = [each["content"]["data"] for each in kernel._messages[cell] if each["msg_type"] == "display_data"]
        assert [sorted(bundle) for bundle in bundles] == [["text/html", "text/plain"]]
        assert bundles[0]["text/plain"] == "n: 2\nn is 2"
    finally:
        kernel.close()
