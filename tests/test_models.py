"""The networks of the course have the sizes that the lessons name."""

import pytest
import torch

import dlab


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
