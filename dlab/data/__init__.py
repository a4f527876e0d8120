"""MNIST from the files in `data/`, and ways to split a data set among ranks; taught in `01_data_partitioning.ipynb`."""

from .batches import Batches
from .digits import MNIST, mnist
from .files import describe, download
from .partition import DataPartitioner, Partition, partition_dataset
from .table import ShardTable

__all__ = [
    "MNIST",
    "Batches",
    "DataPartitioner",
    "Partition",
    "ShardTable",
    "describe",
    "download",
    "mnist",
    "partition_dataset",
]
