"""Memory that several processes share, and everything that writes into it.

The docstring of each structure says who writes, who reads, and what makes it safe. `mapping` allocates the memory and
`fence` keeps the order of writes. The structures use both: rings for messages (`ring`), a barrier (`plan_table`),
counters, posted messages, a text, requests with their gradients (`request_queue`, `gradient_slot`) and versions of
weights. A process waits with `backoff` or a `semaphore`, and announces in `waits` for whom it waits.
"""
