"""Data sets, and how a fleet of devices shares them."""
