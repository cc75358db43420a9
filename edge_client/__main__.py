"""The console script fedcenters-edge: Ctrl-C ends it quietly from here on (edge_client/early_interrupts.py)."""

from __future__ import annotations

import sys

from edge_client.early_interrupts import leave_at_once


def start() -> int:
    """Import the command line and run it; -> its exit code."""
    leave_at_once()
    from edge_client.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
