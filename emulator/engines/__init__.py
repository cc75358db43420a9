"""Who trains emulated devices: each file is one way to compute the same numbers (edge_client/training/learner.py)."""
