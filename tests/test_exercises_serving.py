"""The exercise of the fifth lesson: right updates pass, on real servers too, and each mistake is told apart."""

import json
import re
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

import dlab
from dlab import kvstore
from dlab.exercises import calling, check_update
from dlab.exercises.updates import MOMENTUM, RATE, with_momentum
from dlab.kvstore.optimizers import ServerOptimizer, recipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "05_parameter_server.ipynb"

# ------------------------------------------------------------------------------------------- right


def from_zeros(key, gradient, stored, state):
    velocity = state.setdefault(key, torch.zeros_like(stored))
    velocity.mul_(0.9).add_(gradient)
    stored.sub_(velocity, alpha=0.1)


def from_a_copy(key, gradient, stored, state):
    if key in state:
        state[key] = 0.9 * state[key] + gradient
    else:
        state[key] = gradient.clone()
    stored -= 0.1 * state[key]


def rate_inside(key, gradient, stored, state):
    """The same, as long as the learning rate does not change."""
    state[key] = 0.9 * state.get(key, 0) + 0.1 * gradient
    stored[:] = stored - state[key]
    return stored


def with_more_in_the_state(key, gradient, stored, state):
    """It may look at the last gradient, as long as it does not use it."""
    state[key, "last"] = gradient
    state["pushes"] = state.get("pushes", 0) + 1
    from_zeros(key, gradient, stored, state)


def by_torch(key, gradient, stored, state):
    if key not in state:
        state[key] = torch.optim.SGD([stored], lr=0.1, momentum=0.9)
    stored.grad = gradient
    state[key].step()
    stored.grad = None


def forgets_afterwards(key, gradient, stored, state):
    velocity = state.get(key, 0) + gradient
    stored.copy_(stored - 0.1 * velocity)
    state[key] = 0.9 * velocity


def as_mxnet(key, gradient, stored, state):
    """The velocity points downhill, and has the learning rate in it."""
    state[key] = 0.9 * state.get(key, torch.zeros_like(stored)) - 0.1 * gradient
    stored += state[key]


class Remembering:
    def __call__(self, key, gradient, stored, state):
        memory = state.setdefault("velocities", {})
        memory[key] = torch.add(gradient, memory.get(key, torch.zeros(())), alpha=0.9)
        torch.sub(stored, memory[key], alpha=0.1, out=stored)


RIGHT = [from_zeros, from_a_copy, with_more_in_the_state, by_torch, forgets_afterwards, Remembering()]
INSIDE = [rate_inside, as_mxnet]


@pytest.mark.parametrize("right", RIGHT + INSIDE, ids=lambda function: getattr(function, "__name__", "callable"))
def test_right_updates_pass(right):
    answer = check_update(right)
    assert answer.startswith("well done: ") and "\n" not in answer
    assert ("(Your velocity has the learning rate in it, as MXNet's has: the same, as long as" in answer) == (
        right in INSIDE
    )


def test_what_is_asked_for_is_what_torch_does():
    weight, stored, state = torch.ones(3, requires_grad=True), torch.ones(3), {}
    optimizer = torch.optim.SGD([weight], lr=RATE, momentum=MOMENTUM)
    for number in range(5):
        weight.grad = torch.tensor([1.0, -2.0, 0.5]) * number
        optimizer.step()
        with_momentum("w", weight.grad, stored, state)
    torch.testing.assert_close(stored, weight.detach())


# ------------------------------------------------------------------------------------------- wrong


def nothing(key, gradient, stored, state):
    pass


def returned(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    return stored - 0.1 * state[key]


def another_of_the_same_name(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored = stored - 0.1 * state[key]


def without_momentum(key, gradient, stored, state):
    stored -= 0.1 * gradient


def velocity_not_kept(key, gradient, stored, state):
    velocity = 0.9 * state.get(key, 0) + gradient
    stored -= 0.1 * velocity


def replaced(key, gradient, stored, state):
    stored.copy_(gradient)


def replaced_by_step(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored[:] = -0.1 * state[key]


def uphill(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored += 0.1 * state[key]


def without_rate(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored -= state[key]


def damped(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + 0.1 * gradient
    stored -= 0.1 * state[key]


def last_gradient(key, gradient, stored, state):
    stored -= 0.1 * (0.9 * state.get(key, 0) + gradient)
    state[key] = gradient.clone()


def never_forgets(key, gradient, stored, state):
    state[key] = state.get(key, 0) + gradient
    stored -= 0.1 * state[key]


def one_velocity(key, gradient, stored, state):
    state["velocity"] = 0.9 * state.get("velocity", 0) + gradient
    stored -= 0.1 * state["velocity"]


def changes_the_gradient(key, gradient, stored, state):
    gradient += 0.9 * state.get(key, 0)
    state[key] = gradient.clone()
    stored -= 0.1 * gradient


def scales_the_gradient(key, gradient, stored, state):
    gradient *= 0.1
    stored -= gradient


def keeps_the_gradient(key, gradient, stored, state):
    state[key] = 0.9 * state[key] + gradient if key in state else gradient
    stored -= 0.1 * state[key]


def keeps_and_changes_it(key, gradient, stored, state):
    velocity = state.setdefault(key, gradient)
    velocity.mul_(0.9).add_(gradient)
    stored -= 0.1 * velocity


def expects_a_state(key, gradient, stored, state):
    state[key] = 0.9 * state[key] + gradient
    stored -= 0.1 * state[key]


def raises(key, gradient, stored, state):
    stored -= 0.1 * missing  # noqa: F821


def another_momentum(key, gradient, stored, state):
    state[key] = 0.5 * state.get(key, 0) + gradient
    stored -= 0.1 * state[key]


def not_a_number(key, gradient, stored, state):
    stored /= 0 * gradient - 0 * gradient
    stored -= stored


def only_names(key, gradient, stored, state):
    if isinstance(key, str):
        from_zeros(key, gradient, stored, state)


def touches_others(key, gradient, stored, state):
    from_zeros(key, gradient, stored, state)
    for other in state.setdefault("all", []):
        if other is not stored and len(other) == 3:
            other -= 1
    state["all"].append(stored)


def along_the_old(key, gradient, stored, state):
    stored -= 0.1 * state.get(key, 0)
    state[key] = 0.9 * state.get(key, 0) + gradient


def along_old_and_gradient(key, gradient, stored, state):
    old = state.get(key, 0)
    stored -= 0.1 * (old + gradient)
    state[key] = 0.9 * old + gradient


def momentum_on_both(key, gradient, stored, state):
    state[key] = 0.9 * (state.get(key, 0) + gradient)
    stored -= 0.1 * state[key]


def rate_on_both(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + 0.1 * gradient
    stored -= 0.1 * state[key]


def damped_as_in_torch(key, gradient, stored, state):
    if key not in state:
        state[key] = torch.optim.SGD([stored], lr=0.1, momentum=0.9, dampening=0.9)
    stored.grad = gradient
    state[key].step()


def nesterov(key, gradient, stored, state):
    if key not in state:
        state[key] = torch.optim.SGD([stored], lr=0.1, momentum=0.9, nesterov=True)
    stored.grad = gradient
    state[key].step()


def gradient_twice(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored -= 0.1 * gradient
    stored -= 0.1 * state[key]


def brakes(key, gradient, stored, state):
    state[key] = gradient - 0.9 * state.get(key, 0)
    stored -= 0.1 * state[key]


def minus_in_the_velocity(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) - gradient
    stored -= 0.1 * state[key]


def mxnet_with_a_wrong_sign(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) - 0.1 * gradient
    stored -= state[key]


def numbers_exchanged(key, gradient, stored, state):
    state[key] = 0.1 * state.get(key, 0) + gradient
    stored -= 0.9 * state[key]


def shrinks_the_weights(key, gradient, stored, state):
    stored *= 0.9
    stored -= 0.1 * gradient


def new_data(key, gradient, stored, state):
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored.data = stored - 0.1 * state[key]


def velocity_is_stored(key, gradient, stored, state):
    velocity = state.setdefault(key, stored)
    velocity.mul_(0.9).add_(gradient)
    stored -= 0.1 * velocity


def another_state(key, gradient, stored, state):
    state = {}
    state[key] = 0.9 * state.get(key, 0) + gradient
    stored -= 0.1 * state[key]


def looks_at_the_last_and_has_another_momentum(key, gradient, stored, state):
    """Not what it keeps is wrong."""
    state[key, "last"] = gradient
    another_momentum(key, gradient, stored, state)


def by_shape(key, gradient, stored, state):
    from_zeros(tuple(gradient.shape), gradient, stored, state)


def yields(key, gradient, stored, state):
    stored -= 0.1 * gradient
    yield stored


def ends_the_program(key, gradient, stored, state):
    sys.exit()


def deeper(gradient):
    return gradient + "a number"


def fails_in_a_function_of_its_own(key, gradient, stored, state):
    stored -= deeper(gradient)


def by_the_checker(key, gradient, stored, state):
    with_momentum(key, gradient, stored, state)


def by_the_servers(key, gradient, stored, state):
    optimizer = state.setdefault("sgd", ServerOptimizer(recipe("sgd", lr=0.1, momentum=0.9)))
    optimizer(key, gradient, stored)


WRONG = [
    (
        along_the_old,
        "with one key, push 1 is a step along the old velocity: make the new one first, with this gradient",
    ),
    (
        along_old_and_gradient,
        "push 1 is right, but push 2 is a step along the whole old velocity and the gradient: take",
    ),
    (momentum_on_both, "push 1 has only 0.9 of the gradient in its velocity: multiply the old velocity by 0.9 first"),
    (rate_on_both, "push 1 has only 0.1 of the gradient in its velocity: take 0.9 of the old velocity, and the whole"),
    (damped_as_in_torch, "push 1 is right, but push 2 has only 0.1 of its gradient in its velocity: take the whole"),
    (nesterov, "push 1 looks ahead, as Nesterov's momentum does: step along the velocity itself"),
    (gradient_twice, "push 1 has the gradient in it twice: it is in the velocity already, so step along that alone"),
    (brakes, "push 1 is right, but push 2 has subtracted the old velocity from the gradient: add them"),
    (minus_in_the_velocity, "push 1 goes uphill: the gradient shows where the loss grows, so add it to the velocity"),
    (mxnet_with_a_wrong_sign, "push 1 goes uphill: the gradient shows where the loss grows, so add it to the velocity"),
    (
        numbers_exchanged,
        "push 1 has exchanged the two numbers: 0.9 of the velocity is kept, and 0.1 of it is subtracted",
    ),
    (shrinks_the_weights, "push 1 has multiplied stored by 0.9: that is for the velocity, which is kept in state"),
    (new_data, "push 1 has given stored new memory, which the server does not see: write into the one that it"),
    (velocity_is_stored, "push 1 goes wrong, and state holds stored itself: the velocity needs a tensor of its own"),
    (another_state, "push 2 is a step along its gradient alone: the momentum is missing. Keep a velocity for the key"),
    (looks_at_the_last_and_has_another_momentum, "after push 2, to key 'w', element 0 is 0.6, and 0.52 is right"),
    (by_shape, "with two keys, push 1 is right, but push 2 uses the velocity of another key: keep one for each"),
    (yields, "push 1 gave a generator, which has done nothing yet: use return, not yield"),
    (ends_the_program, "push 1 called exit(), which ends a whole program: use return"),
    (fails_in_a_function_of_its_own, "push 1 ended in TypeError: "),
    (fails_in_a_function_of_its_own, ', in the line `return gradient + "a number"`'),
    (by_the_checker, "with one key, this calls dlab's own with_momentum, which is the answer: write the two lines"),
    (with_momentum, "with one key, this calls dlab's own with_momentum, which is the answer: write the two lines"),
    (
        by_the_servers,
        "with one key, this calls dlab's own ServerOptimizer.__call__, which is the answer: write the two lines",
    ),
    (nothing, "with one key, push 1 has not changed stored: write into the tensor that the server holds"),
    (returned, "push 1 has not changed stored, and its return value is not used: write into the tensor"),
    (another_of_the_same_name, "stored = stored - … makes another of the same name"),
    (without_momentum, "with one key, push 1 is right, but push 2 is a step along its gradient alone: the momentum is"),
    (velocity_not_kept, "the momentum is missing. Keep a velocity for the key in state, make it 0.9 of itself"),
    (replaced, "push 1 has replaced the weights: an update changes them a little, so subtract 0.1 of the velocity"),
    (replaced_by_step, "push 1 has replaced the weights: an update changes them a little, so subtract from stored"),
    (uphill, "push 1 goes uphill: the gradient shows where the loss grows, so add it to the velocity, and subtract"),
    (without_rate, "push 1 goes too far: multiply the velocity by the learning rate, 0.1"),
    (damped, "push 1 has only 0.1 of the gradient in its velocity: take 0.9 of the old velocity, and the whole"),
    (last_gradient, "pushes 1 to 2 are right, but push 3 remembers only the gradient before it: keep the velocity"),
    (never_forgets, "push 1 is right, but push 2 adds up all gradients: the velocity must forget"),
    (one_velocity, "with two keys, push 1 is right, but push 2 uses the velocity of another key: keep one for each"),
    (changes_the_gradient, "push 2 has changed the gradient, whose memory is not its own: make a new tensor"),
    (scales_the_gradient, "push 1 has changed the gradient"),
    (
        keeps_the_gradient,
        "push 2 goes wrong, since state holds a gradient itself: the server reuses that memory for",
    ),
    (keeps_and_changes_it, "push 1 goes wrong, since state holds a gradient itself"),
    (
        expects_a_state,
        "push 1 ended in KeyError: 'w', in the line `state[key] = 0.9 * state[key] + gradient`: state is",
    ),
    (raises, "push 1 ended in NameError: name 'missing' is not defined, in the line `stored -= 0.1 * missing"),
    (lambda key, gradient: None, "4 were given: it is called with key, gradient, stored and state"),
    (another_momentum, "push 1 is right, but after push 2, to key 'w', element 0 is 0.6, and 0.52 is right: velocity"),
    (not_a_number, "after push 1, to key 'w', element 0 is nan, and 0.8 is right"),
    (only_names, "with three shapes, push 1 has not changed stored"),
    (touches_others, "with two keys, push 1 is right, but push 2, to key 'b', has changed the value of key 'w': leave"),
    (0.1, "0.1 is not a function: write def my_update(key, gradient, stored, state)"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[getattr(wrong, "__name__", "") for wrong, _ in WRONG])
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_update(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_a_loop_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(calling, "LIMIT", 0.3)

    def spin(key, gradient, stored, state):
        while key not in state:
            pass

    assert "push 1 had not returned after 0.3 s: look for a loop that does not end" in check_update(spin)


def test_a_memory_outside_of_the_state_is_found():
    velocities = {}

    def remembers_elsewhere(key, gradient, stored, state):
        from_zeros(key, gradient, stored, velocities)

    answer = check_update(remembers_elsewhere)
    assert "on a second server, whose state is empty, push 1 goes wrong although the first server was right" in answer
    assert "something is kept outside state" in answer


# ------------------------------------------------------------------------------------- real servers


def test_what_passes_works_on_servers_and_what_keeps_the_gradient_does_not():
    state = {}

    def right(key, gradient, stored):
        from_a_copy(key, gradient, stored, state)

    def wrong(key, gradient, stored):
        keeps_the_gradient(key, gradient, stored, state)

    def push(updater):
        kv = kvstore.create("dist_sync")
        kv.init("w", torch.ones(2))
        kv.set_updater(updater)
        for gradient in (2.0, 1.0, 2.0):
            kv.push("w", torch.full((2,), gradient / kv.num_workers))
        return round(kv.pull("w")[0].item(), 4)

    with dlab.Cluster(2, servers=1) as cluster:
        assert cluster.run(push, right, timeout=60) == [0.068] * 2  # as by hand
        assert cluster.run(push, wrong, timeout=60) != [0.068] * 2


# ------------------------------------------------------------------------------------- the notebook


def test_the_hidden_solution_passes_and_the_stub_does_not():
    cells = json.loads(NOTEBOOK.read_text())["cells"]

    def define(source):
        names = {"torch": torch, "dlab": dlab}
        exec(source, names)
        return names["my_update"]

    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    solution, *_ = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_update(define(solution)).startswith("well done")
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("def my_update")]
    answer = check_update(define(stub))
    assert "the momentum is missing" in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
