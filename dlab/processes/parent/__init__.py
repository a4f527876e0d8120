"""The side of the notebook: clusters and runs, the thread that supervises them, and what a notebook needs."""
