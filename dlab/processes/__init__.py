"""Warm worker processes: `Cluster` keeps them, `Run` is one function on all of them. Taught in `00_tour.ipynb`.

Read in this order: `cluster` and `run` (what a user holds), `supervisor` (the one thread that looks after runs) and its
`crew` (the workers, as they come and go), `worker` (what happens inside), then what carries them: `wire`, `board`,
`output`, `forkserver`. What only a notebook needs is in `notebook`, `waiting` and `tracebacks`.
"""
