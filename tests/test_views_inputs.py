"""Controls for one value: they show it as it is, and only the user makes them write."""

from collections import deque

import pytest

from dlab.views.inputs import LinearScale, LogScale, control


class _Panel:
    """Carries out wishes when it is told to, and keeps what was written."""

    def __init__(self, name, value):
        self.wishes, self.written = deque(), []
        self.control = control(name, value, self.wishes.append, self.written.append)
        self.control.show(value)
        self.widgets = getattr(self.control.widget, "children", (self.control.widget,))

    @property
    def slider(self):
        return self.widgets[0]

    @property
    def field(self):
        return self.widgets[-1]

    def serve(self):
        while self.wishes:
            self.wishes.popleft()()
        return self.written


VALUES = [0.05, 0.025, 0.3, 1 / 3, 0.1 + 0.2, 1e-12, -0.05, 0.0, -0.0, float("inf"), 1e300, 4, 0, -7, 10**18, 2**70]
VALUES += ["ring", "", "0.5", None, [], [1, 0.1, "a"]]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_shown_with_all_its_digits_and_nothing_is_written(value):
    panel = _Panel("knob", value)
    assert panel.field.value == (value if isinstance(value, str) else repr(value))
    for widget in panel.widgets:  # a browser that sends back what it was given
        widget.set_state({"value": widget.value})
    assert not panel.wishes and panel.serve() == []


@pytest.mark.parametrize("value", [True, False])
def test_a_switch(value):
    panel = _Panel("on", value)
    assert panel.slider.value is value and not panel.wishes
    panel.slider.value = not value
    assert panel.serve() == [not value]
    panel.control.show(value)  # by code
    assert panel.slider.value is value and not panel.wishes


@pytest.mark.parametrize("value", [0.05, 1 / 3, -0.3, 4, -7])
@pytest.mark.parametrize("other", [1e9, -1e9, 0.0, float("nan"), float("inf"), "auto", None, [3], 10**30])
def test_whatever_code_gives_is_shown_and_not_written_back(value, other):
    panel = _Panel("knob", value)
    panel.control.show(other)
    assert panel.field.value == repr(other)
    assert panel.slider.min <= panel.slider.value <= panel.slider.max
    assert not panel.wishes


def test_a_slider_moved_by_hand_writes_round_values_and_its_middle_is_the_value_that_was_given():
    panel = _Panel("lr", 1 / 3)
    panel.slider.value = 3
    assert panel.serve() == [0.666666666667]
    panel.control.show(panel.written[-1])
    assert panel.field.value == "0.666666666667"
    panel.slider.value = 0
    assert panel.serve()[-1] == 1 / 3


def test_scales_know_their_places():
    assert [LogScale(0.05).value(place) for place in (-20, -10, -3, 0, 1, 2, 10, 20)] == [
        *(0.0005, 0.005, 0.025, 0.05, 0.0625, 0.08, 0.5, 5.0)
    ]
    for scale in (LogScale(0.05), LogScale(-2.0), LinearScale(-4, 10), LinearScale(0, 20, 0.05)):
        places = list(range(scale.low, scale.high + 1))
        assert [scale.position(scale.value(place)) for place in places] == places


@pytest.mark.parametrize(
    ("value", "typed", "taken"),
    [
        (0.05, "0.0501234567890123", 0.0501234567890123),
        (0.05, " 1e-3 ", 0.001),
        (0.05, "1", 1.0),
        (4, "-12", -12),
        (4, "100000000000000000001", 100000000000000000001),
        ("ring", "0.5", "0.5"),
        (None, "0.5", 0.5),
        (None, "True", True),
        (None, "ring", "ring"),
        ([1], "[2, 0.5]", [2, 0.5]),
        ([1], "2, 3", [2, 3]),
    ],
)
def test_what_is_typed_is_taken_as_it_is(value, typed, taken):
    panel = _Panel("knob", value)
    panel.field.value = typed
    (written,) = panel.serve()
    assert written == taken and type(written) is type(taken)


@pytest.mark.parametrize(
    ("value", "typed", "sentence"),
    [
        (0.05, "abc", "'abc' is not a value for knob: give a number, such as 0.05"),
        (0.05, "nan", "'nan' is not a value for knob: give a number, such as 0.05"),
        (0.05, "-inf", "'-inf' is not a value for knob: give a number"),
        (0.05, "", "'' is not a value for knob: give a number"),
        (4, "2.5", "'2.5' is not a value for knob: give a whole number, such as 4"),
        ([1], "abc", r"'abc' is not a value for knob: give a list, such as \[1, 2\]"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_value_is_shown_again(value, typed, sentence):
    panel = _Panel("knob", value)
    panel.field.value = typed
    with pytest.raises(ValueError, match=sentence):
        panel.serve()
    panel.control.show(value)
    assert panel.field.value == repr(value) and panel.written == []


def test_a_hand_that_goes_back_at_once_is_obeyed_too():
    panel = _Panel("lr", 0.05)
    panel.slider.value = 10
    panel.slider.value = 0
    assert panel.serve() == [0.5, 0.05]


def test_code_does_not_pull_a_slider_out_of_a_hand():
    panel = _Panel("lr", 0.05)
    panel.slider.value = 7
    panel.control.show(0.05)  # the wish has not been carried out yet
    assert panel.slider.value == 7
    panel.serve()
    panel.control.show(panel.written[-1])
    assert panel.slider.value == 7 and panel.field.value == "0.25" and not panel.wishes
