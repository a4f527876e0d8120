"""Warm worker processes: `Cluster` keeps them, `Run` is one function on all of them. Taught in `00_tour.ipynb`.

`parent` is what runs in the notebook's process: read `cluster` and `run` first (what a user holds), then `supervisor`
(the thread that looks after runs) and `pool` (the workers, as they come and go). `worker` is what runs in a worker:
`main` (its life) and `context` (what a function can ask there). `between` is what both sides know.
"""
