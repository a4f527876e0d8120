"""Memory that several processes share, and everything that writes into it.

Each structure says in its docstring who writes, who reads, and what makes it safe. `mapping` makes the memory and
`fence` keeps the order of what is written. On these stand the structures: rings for messages (`ring`), a barrier
(`plan_table`), counters, posted messages, a text, requests with their gradients (`request_queue`, `gradient_slot`) and
versions of weights. Who has to wait does so by `backoff` or a `semaphore`, and tells for whom in `waits`.
"""
