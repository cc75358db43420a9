"""Passes over a traced graph: no writes in place, nothing computed twice, and every size from the batch size."""
