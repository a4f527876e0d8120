"""Operator-level parallelism: operators whose tensors are cut over ranks. Taught in `07_operator_parallel.ipynb`."""
