"""The notebook's side: clusters and runs, the thread that supervises them, and the integration with Jupyter."""
