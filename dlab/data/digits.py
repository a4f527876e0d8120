"""MNIST as a Dataset that returns whole batches: one gather and vector arithmetic, no Python code per image.

Taught in `01_data_partitioning.ipynb`.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from .batches import Index, Samples, as_positions, names_many, out_of_range
from .files import SHA256, data_directory, unpacked

MEAN, STD = 0.1307, 0.3081  # of all training pixels, on a scale from 0 to 1


@overload
def mnist(train: bool = True, as_torchvision: Literal[False] = False) -> MNIST: ...


@overload
def mnist(train: bool = True, *, as_torchvision: Literal[True]) -> Samples: ...


def mnist(train: bool = True, as_torchvision: bool = False) -> MNIST | Samples:
    """Return the 60,000 training or 10,000 test images, as `MNIST` or as torchvision's data set over the same files.

    Takes about half a second the first time, when the files are unpacked, and later milliseconds. Never downloads.

    >>> image, label = mnist()[7]
    >>> image.shape, label
    (torch.Size([1, 28, 28]), 3)
    """
    if not isinstance(train, bool):
        raise TypeError(
            f"mnist({train!r}): say mnist(train=True) for training images, mnist(train=False) for test images"
        )
    return _torchvision_mnist(train) if as_torchvision else MNIST(train)


class MNIST(Dataset[tuple[Tensor, int]]):
    """Handwritten digits: `.images` uint8 [N, 28, 28], memory-mapped; `.targets` int64 [N].

    `digits[7]` is (float32 1x28x28, int). A list, a slice, a tensor of positions or a boolean mask gives a batch
    (float32 Bx1x28x28, int64 B) by one gather: 0.1-0.2 ms for 128 images, over 100 times faster than torchvision's way
    through single images, with the same values as its ToTensor and Normalize, bit for bit. All processes share the
    pages of one file; pickling a data set sends only its name, so changes to the tensors stay in your process.

    >>> images, labels = MNIST(train=False)[:3]
    >>> images.shape, labels
    (torch.Size([3, 1, 28, 28]), tensor([7, 2, 1]))
    """

    def __init__(self, train: bool = True, directory: Path | str | None = None) -> None:
        self.train = train
        self.directory = Path(directory) if directory else data_directory()
        prefix = "train" if train else "t10k"
        names = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
        with unpacked(names, self.directory) as root:
            pixels, labels = (_map_bytes(root / "MNIST" / "raw" / name) for name in names)
        # The IDX format: a header of 16 bytes before images, of 8 before labels, then the values.
        self.images = pixels[16:].view(-1, 28, 28)
        self.targets = labels[8:].long()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> Any:
        if names_many(index):
            return self.take(index)
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise out_of_range(position, len(self))
        return _normalised(self.images.numpy()[position]).unsqueeze(0), int(self.targets[position])

    def take(self, index: Index) -> tuple[Tensor, Tensor]:
        """Return the batch (float32 Bx1x28x28, int64 B) at these positions, in this order."""
        positions = as_positions(index, len(self))
        images = self.images.numpy().take(positions.numpy(), axis=0)
        return _normalised(images).unsqueeze(1), self.targets[positions]

    def __reduce__(self) -> tuple[type[MNIST], tuple[bool, Path]]:
        return MNIST, (self.train, self.directory)

    def __repr__(self) -> str:
        return f"MNIST(train={self.train}): {len(self)} images of 28x28, 10 classes"


def _normalised(pixels: NDArray[np.uint8]) -> Tensor:
    """Compute (pixels / 255 - MEAN) / STD, with the same three roundings as torchvision's transforms.

    NumPy does it in this thread; torch would split so little work among threads and then wait for them.
    """
    values = pixels.astype(np.float32)
    values /= np.float32(255)
    values -= np.float32(MEAN)
    values /= np.float32(STD)
    return torch.from_numpy(values)


def _map_bytes(path: Path) -> Tensor:
    # A private mapping: writing changes this process's copy of a page, never the file.
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _torchvision_mnist(train: bool) -> Samples:
    _define_missing_operators()
    from torchvision import datasets, transforms  # imported here, because it takes two seconds

    usual = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    with unpacked(list(SHA256)) as root:  # all four, because torchvision looks for each of them
        return datasets.MNIST(str(root), train=train, transform=usual, download=False)


# A Library withdraws its definitions when it is collected, so it lives as long as this module.
_library: torch.library.Library | None = None


def _define_missing_operators() -> None:
    """Let `import torchvision` work where its compiled operators do not load (a CUDA wheel beside a CPU torch).

    Importing torchvision registers code for two operators and fails where they are not defined. Data sets and
    transforms never call them, so their schemas are enough. Where the compiled library loads, this function does
    nothing.
    """
    global _library
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return  # not installed: the import will say so
    with suppress(ImportError, OSError):
        for compiled in Path(spec.submodule_search_locations[0]).glob("_C.*"):
            torch.ops.load_library(str(compiled))
    if not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
