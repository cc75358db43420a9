"""Passes over a traced graph: plain operators for writes in place, nothing computed twice, sizes from the batch size."""
