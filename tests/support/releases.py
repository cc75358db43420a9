"""Releases of a client that says its version."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
OLD, NEW = "0.1.0", "0.2.0"


def site(version: str, *, works: bool = True) -> dict[str, bytes]:
    """A client that says its version, and reports in, if it works."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom edge_client import __version__\n"
        "folder = Path(os.environ['FEDCENTERS_RELEASES'])\nprint(__version__)\n"
    )
    if works:
        code += (
            f"sys.path.append({str(ROOT)!r})\n"
            "import importlib.util\n"
            f"file = {str(ROOT / 'edge_client/update/launcher.py')!r}\n"
            "spec = importlib.util.spec_from_file_location('launcher', file)\n"
            "launcher = importlib.util.module_from_spec(spec)\nsys.modules['launcher'] = launcher\n"
            "spec.loader.exec_module(launcher)\nrecord = launcher.read_record(folder)\n"
            "if record.trial == __version__: launcher.write_record(folder, launcher.ReleaseRecord(good=__version__))\n"
        )
    return {"edge_client/__init__.py": f'__version__ = "{version}"\n'.encode(), "edge_client/cli.py": code.encode()}
