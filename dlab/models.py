"""The networks of the course. Only `SimpleCNN` has dropout; without it N workers can equal one to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn


class SimpleCNN(nn.Module):
    """The network of many first lessons on MNIST: 421,642 parameters, with dropout and log-probabilities as output.

    Train it with `nll_loss`. `cross_entropy` gives the same result, because log-softmax leaves log-probabilities
    unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, 28, 28) to log-probabilities (batch, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # (batch, 32, 14, 14)
        x = self.dropout1(F.max_pool2d(F.relu(self.conv2(x)), 2))  # (batch, 64, 7, 7)
        x = self.dropout2(F.relu(self.fc1(x.flatten(1))))  # (batch, 128)
        return F.log_softmax(self.fc2(x), dim=1)


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers, 80,202 parameters, for lessons that must be quick or exact."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5)
        self.fc1 = nn.Linear(512, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, 28, 28) to scores (batch, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # (batch, 16, 12, 12)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (batch, 32, 4, 4)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class MLP(nn.Sequential):
    """784-512-512-10, 669,706 parameters: little arithmetic for its size, so that communication dominates."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )


class TwoLayer(nn.Sequential):
    """784-100-10: the smallest network of the course, for slice tables that fit on a page."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


class SelfAttention(nn.Module):
    """Attention of tokens to each other in several heads; query, key and value are separate layers, so that a cut of
    their outputs is a cut of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {heads} heads: give a multiple of the heads")
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, tokens, width) to tokens of the same shape."""
        shape = *x.shape[:2], -1, x.shape[-1] // self.heads  # -1: where PyTorch cuts it, a rank has fewer heads
        parts = [layer(x).reshape(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*parts)  # (batch, heads, tokens, width of a head)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention, then two linear layers with GELU between them; each gets normalised tokens and is added to them."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), SelfAttention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, tokens, width) to tokens of the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RowEmbedding(nn.Module):
    """Makes a token of each row of an image, and adds what its position adds."""

    def __init__(self, embed: nn.Linear, position: nn.Parameter) -> None:
        super().__init__()
        self.embed, self.position = embed, position

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, 28, 28) to tokens (batch, 28, width)."""
        return self.embed(images.reshape(len(images), 28, 28)) + self.position


class MeanHead(nn.Module):
    """Scores classes by the mean of all tokens."""

    def __init__(self, norm: nn.LayerNorm, head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, tokens, width) to scores (batch, 10)."""
        return self.head(self.norm(tokens).mean(dim=1))


class RowTransformer(nn.Module):
    """A transformer whose tokens are the 28 rows of an image, with 28 pixels each: 54,410 parameters.

    `width` is the length of a token inside, `heads` the number of attention heads, `depth` that of blocks. It has no
    dropout. `dlab.megatron_layouts` cuts it over ranks, and `dlab.split` into stages.
    """

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.position = nn.Parameter(torch.randn(28, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, 28, 28) to scores (batch, 10)."""
        tokens = self.embed(images.reshape(len(images), 28, 28)) + self.position  # (batch, 28, width)
        return self.head(self.norm(self.blocks(tokens)).mean(dim=1))

    def sequence(self) -> list[nn.Module]:
        """Return the blocks that it runs one after another, with its own weights, for `dlab.split`."""
        return [RowEmbedding(self.embed, self.position), *self.blocks, MeanHead(self.norm, self.head)]


class FlatBuffer:
    """Parameters that are consecutive views of a flat tensor, which may be a different one at each call."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._views: dict[int, list[torch.Tensor]] = {}  # by the tensor's address

    def view_in(self, flat: torch.Tensor) -> None:
        """Make every parameter a view of its part of this tensor; copies nothing."""
        if flat.data_ptr() not in self._views:
            parts = flat.split([parameter.numel() for parameter in self._parameters])
            views = [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]
            self._views[flat.data_ptr()] = views
        for parameter, view in zip(self._parameters, self._views[flat.data_ptr()], strict=True):
            parameter.data = view


def flatten_gradients(model: nn.Module, empty: Callable[..., torch.Tensor] = torch.empty) -> torch.Tensor:
    """Place all gradients of a model one after another in one tensor, and return that tensor, filled with zeros.

    Each `parameter.grad` is a view of it: the backward pass fills it, and one all-reduce averages all gradients. With
    `empty=dlab.shared_empty`, on every rank, it lies in memory that `dlab.allreduce` need not copy. Keep the views: use
    `optimizer.zero_grad(set_to_none=False)`, or `flat.zero_()` for all of them.

    >>> flat = flatten_gradients(model, empty=dlab.shared_empty)
    >>> loss.backward()
    >>> dlab.allreduce(flat, op="mean")
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if len({(parameter.dtype, parameter.device) for parameter in parameters}) != 1:
        raise ValueError("a flat gradient needs at least one parameter, and all of them of one type and on one device")
    device, dtype = parameters[0].device, parameters[0].dtype
    flat = empty(sum(parameter.numel() for parameter in parameters), dtype=dtype).to(device).zero_()
    for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
