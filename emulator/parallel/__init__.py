"""Worker processes that share the work of one simulation, on this machine or on Ray."""
