"""Grouping devices by their updates, on the Gram matrix."""
