"""`fedcenters-export` in this process."""

from __future__ import annotations

from export import cli


def run_export(*args: str) -> int:
    """One command -> its exit code."""
    try:
        cli.app(args, prog_name="fedcenters-export")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
