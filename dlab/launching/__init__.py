"""Start any torch.distributed script in several processes on this machine, and end them together: `dlab run`.

Read in this order: `launcher` (one loop that waits for all events), `rank` (one process and its output), `keeper`
(hosts the store for the rendezvous, and ends the ranks if the launcher is killed), `logs`.
"""
