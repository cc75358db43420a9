"""`python -m fedcenters`: the version, and the commands of this installation."""

from __future__ import annotations

from edge_client import __version__

COMMANDS = {
    "fedcenters-edge": "a device: train, find the nearest center, diagnose",
    "fedcenters-coordinator": "the server: clusters the devices and trains one center per cluster",
    "fedcenters-emulator": "a fleet on this machine: demo, simulate, experiment, report",
    "fedcenters-export": "a torch model, or a run's centers, as files for other runtimes",
}


def main() -> None:
    """Print the version and the commands."""
    print(f"fedcenters {__version__}\n\nIn Python: import fedcenters as fc\n\nCommands:")
    width = max(map(len, COMMANDS))
    for name, words in COMMANDS.items():
        print(f"  {name:{width}}  {words}")


if __name__ == "__main__":
    main()
