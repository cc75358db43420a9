"""The console script fedcenters-edge, and `python -m edge_client`; see edge_client/console_script.py."""

from __future__ import annotations

from typing import NoReturn

from edge_client.console_script import run_console_script


def start() -> NoReturn:
    """Import the command line, run it, and end this process with its code."""
    run_console_script("edge_client.cli")


if __name__ == "__main__":
    start()
