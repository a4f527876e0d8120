"""The training loop that puts a model, a data set, a strategy and a cluster together; taught in `03_sync_sgd.ipynb`."""

from dlab.training.evaluation import Evaluation, evaluate
from dlab.training.plan import Training
from dlab.training.running import Result, train

__all__ = ["Evaluation", "Result", "Training", "evaluate", "train"]
