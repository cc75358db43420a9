"""The console script fedcenters-export, and `python -m export`; see edge_client/console_script.py."""

from __future__ import annotations

from typing import NoReturn

from edge_client.console_script import run_console_script


def start() -> NoReturn:
    """Import the command line, run it, and end this process with its code."""
    run_console_script("export.cli")


if __name__ == "__main__":
    start()
