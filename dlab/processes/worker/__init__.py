"""The side of a worker: its life, what a function can ask and tell, and how it is stopped."""
