"""The console script fedcenters-coordinator: Ctrl-C ends it quietly from here on (edge_client/early_interrupts.py)."""

from __future__ import annotations

from edge_client.early_interrupts import leave_at_once


def start() -> None:
    """Import the command line and run it; it exits with its code."""
    leave_at_once()
    from coordinator.cli import main

    main()


if __name__ == "__main__":
    start()
