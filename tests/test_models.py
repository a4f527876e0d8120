"""The networks of the course have the sizes that the lessons name, and their gradients can lie in one tensor."""

import pytest
import torch

import dlab
from dlab.models import flatten_gradients


@pytest.mark.parametrize(
    ("model", "parameters"), [(dlab.SimpleCNN, 80_202), (dlab.MLP, 669_706), (dlab.TwoLayer, 79_510)]
)
def test_each_network_turns_images_into_ten_scores_and_has_the_stated_size(model, parameters):
    torch.manual_seed(0)
    network = model()
    assert network(torch.randn(5, 1, 28, 28)).shape == (5, 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert f"{parameters:,}" in model.__doc__ or model is dlab.TwoLayer


@pytest.mark.parametrize("model", [dlab.SimpleCNN, dlab.MLP, dlab.TwoLayer])
def test_a_network_gives_the_same_scores_twice_in_training_mode(model):
    network = model().train()
    images = torch.randn(3, 1, 28, 28)
    assert torch.equal(network(images), network(images))


def test_a_flat_gradient_holds_what_backward_computes():
    torch.manual_seed(0)
    plain, flattened = dlab.TwoLayer(), dlab.TwoLayer()
    flattened.load_state_dict(plain.state_dict())
    flat = flatten_gradients(flattened)
    images = torch.randn(4, 1, 28, 28)
    for model in (plain, flattened):
        model(images).square().sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert torch.equal(flat, expected)
    flat.zero_()
    assert all((parameter.grad == 0).all() for parameter in flattened.parameters())


def test_frozen_parameters_stay_out():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert flatten_gradients(model).numel() == 6 and model.bias.grad is None


def test_parameters_of_different_types_are_refused():
    with pytest.raises(ValueError, match="of one type on one device"):
        flatten_gradients(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double()))
