"""The engines `stacked` and `graphs`: many devices at once on a GPU."""
