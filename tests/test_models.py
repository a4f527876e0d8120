"""The networks of the course have the sizes that the lessons name, and their gradients can lie in one tensor."""

import pytest
import torch

import dlab
from dlab.models import flatten_gradients


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (dlab.SimpleCNN, 421_642),
        (dlab.SmallCNN, 80_202),
        (dlab.MLP, 669_706),
        (dlab.TwoLayer, 79_510),
        (dlab.RowTransformer, 54_410),
    ],
)
def test_each_network_turns_images_into_ten_scores_and_has_the_stated_size(model, parameters):
    torch.manual_seed(0)
    network = model()
    assert network(torch.randn(5, 1, 28, 28)).shape == (5, 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert f"{parameters:,}" in model.__doc__ or model is dlab.TwoLayer


@pytest.mark.parametrize("model", [dlab.SmallCNN, dlab.MLP, dlab.TwoLayer, dlab.RowTransformer])
def test_a_network_gives_the_same_scores_twice_in_training_mode(model):
    network = model().train()
    images = torch.randn(3, 1, 28, 28)
    assert torch.equal(network(images), network(images))


def test_the_row_transformer_is_torchs_own_encoder_on_rows():
    torch.manual_seed(0)
    model, images = dlab.RowTransformer(width=24, heads=3, depth=2), torch.randn(5, 1, 28, 28)
    layer = torch.nn.TransformerEncoderLayer(24, 3, 96, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, model.norm, enable_nested_tensor=False)
    for theirs, mine in zip(encoder.layers, model.blocks, strict=True):
        heads = mine.attention
        parts = (heads.query, heads.key, heads.value)
        theirs.self_attn.in_proj_weight.data = torch.cat([each.weight.data for each in parts])
        theirs.self_attn.in_proj_bias.data = torch.cat([each.bias.data for each in parts])
        theirs.self_attn.out_proj.load_state_dict(heads.out.state_dict())
        pairs = {"norm1": "norm1", "norm2": "norm2", "linear1": "fc1", "linear2": "fc2"}
        for name, own in pairs.items():
            getattr(theirs, name).load_state_dict(getattr(mine, own).state_dict())
    tokens = images[:, 0] @ model.embed.weight.T + model.embed.bias + model.position
    assert torch.allclose(model(images), model.head(encoder(tokens).mean(1)), atol=1e-5)
    with pytest.raises(ValueError, match="a width of 10 cannot be divided among 4 heads: give a multiple of the heads"):
        dlab.RowTransformer(width=10)


def test_simple_cnn_is_the_network_that_the_course_names():
    torch.manual_seed(0)
    model, images = dlab.SimpleCNN(), torch.randn(5, 1, 28, 28)
    layers = [
        *(torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Dropout(0.25)),
        *(torch.nn.Flatten(), torch.nn.Linear(3136, 128), torch.nn.ReLU(), torch.nn.Dropout(0.5)),
        *(torch.nn.Linear(128, 10), torch.nn.LogSoftmax(1)),
    ]
    written_out = torch.nn.Sequential(*layers)
    for mine, theirs in zip(written_out.parameters(), model.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    for network in (model, written_out):
        network.eval()
    assert torch.allclose(model(images), written_out(images), atol=1e-6)
    scores, labels = model(images), torch.arange(5)
    nll, entropy = torch.nn.functional.nll_loss(scores, labels), torch.nn.functional.cross_entropy(scores, labels)
    assert torch.allclose(nll, entropy)
    torch.manual_seed(1)
    first = model.train()(images)
    torch.manual_seed(1)
    assert torch.allclose(first, written_out.train()(images), atol=1e-6)  # the same dropout
    assert not torch.allclose(first, model(images))


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
    with pytest.raises(ValueError, match="all of them of one type and on one device"):
        flatten_gradients(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double()))
