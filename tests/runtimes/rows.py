"""The Pythons and versions that we say we run on, as rows of `make runtimes`. A new version is a line here."""

from __future__ import annotations

from dataclasses import dataclass

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SERVERS = ("3.10", "3.11", "3.12", "3.13")  # where an interpreter is at hand, `make demo` is run as a user would
LOWEST_SERVER = "3.11"  # here the demo is run with the lowest of everything as well
NUMPY_1 = ("3.10", "3.11", "3.12")  # newer ones have no wheel of it


@dataclass(frozen=True, kw_only=True)
class Row:
    """A device's environment: our client with both runtimes, and what else pip is asked for."""

    python: str
    versions: str  # "lowest", "jetson" or "newest"
    asks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As in `--only`, and the folder's."""
        return f"{self.python}-{self.versions}"

    @property
    def lowest(self) -> bool:
        """Whether every version is the lowest that pyproject.toml allows and that has a wheel."""
        return self.versions == "lowest"


def _of(python: str) -> tuple[Row, ...]:
    # 1.23.2 is the newest onnxruntime for Python 3.10: JetPack 6 and Ubuntu 22.04. On 3.14 there is none.
    one = "<2" if python in NUMPY_1 else ">=2"
    jetson = Row(python=python, versions="jetson", asks=("onnxruntime==1.23.2", "ai-edge-litert<2.2", f"numpy{one}"))
    return (
        Row(python=python, versions="lowest"),
        *([jetson] if python != "3.14" else []),
        Row(python=python, versions="newest", asks=("numpy>=2",)),
    )


ROWS = tuple(row for python in PYTHONS for row in _of(python))
