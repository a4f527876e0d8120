"""The worker's side: its main loop, the functions that user code can call, and how a function is stopped."""
