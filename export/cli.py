"""fedcenters-export: check a bundle, or make one from a run. stdout is data, stderr is talk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as missing:  # a device's installation has no typer
    from edge_client.errors import missing_extra

    raise SystemExit(missing_extra(missing)) from None

from edge_client.errors import FedcentersError, foreseen

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None
)
EXAMPLE = "Example: fedcenters-export verify runs/demo/bundle"


@app.command(epilog=EXAMPLE)
@foreseen
def verify(
    bundle: Annotated[Path, typer.Argument(help="folder with manifest.json")],
    samples: Annotated[Path | None, typer.Option(help="npz with x [n, *input]; default: the bundle's own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,  # noqa: FBT002
) -> None:
    """Check every hash and compare every file with torch."""
    from export.checks import verify_bundle

    rows = verify_bundle(bundle, samples)
    if as_json:
        print(json.dumps({"bundle": str(bundle), "ok": all(r["ok"] for r in rows), "files": rows}))
    else:
        for r in rows:
            mark = "ok  " if r["ok"] else "FAIL"
            name = f"center {r['center']} {r['format']}"
            print(f"{mark} {name:16} largest difference {r['difference']:.1e} over {r['samples']} samples")
    if not all(r["ok"] for r in rows):
        raise FedcentersError("a file differs from torch", hint="export the bundle again; report the model")


@app.command(epilog="Example: fedcenters-export bundle runs/demo --method fedavg --out global")
@foreseen
def bundle(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    method: Annotated[str, typer.Option(help="whose centers; default: the run's only or first method")] = "",
    formats: Annotated[list[str] | None, typer.Option("--format", help="onnx, tflite; may be repeated")] = None,
) -> None:
    """Write a bundle from the centers of a finished run."""
    from export.checks import bundle_run

    manifest: dict[str, Any] = bundle_run(run, out, method, formats or ["onnx", "tflite"])
    print(json.dumps({"bundle": str(out), "centers": len(manifest["centers"])}))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
