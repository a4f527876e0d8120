"""Start any torch.distributed script in several processes on this machine, and end them together: `dlab run`.

Read in this order: `launcher` (one loop that waits for everything at once), `rank` (one process and what it prints),
`keeper` (where the ranks find each other, and who ends them if the launcher is killed), `logs`.
"""
