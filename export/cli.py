"""fedcenters-export: check a bundle, or make one from a run. stdout is data, stderr is talk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_client.errors import EXIT_INTERRUPTED, FedcentersError, RuntimeMissing

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
EXAMPLE = "Example: fedcenters-export verify runs/demo/bundle"


@app.command(epilog=EXAMPLE)
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


@app.command(epilog="Example: fedcenters-export bundle runs/demo --method fedavg --out /tmp/global")
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
    """Entry point; foreseen errors end with a hint and their own exit code."""
    try:
        app(standalone_mode=False)
    except FedcentersError as foreseen:
        print(f"error: {foreseen}", file=sys.stderr)
        sys.exit(foreseen.exit_code)
    except ImportError as missing:
        print(f"error: {missing}\n\nhint: pip install 'fedcenters[export]'", file=sys.stderr)
        sys.exit(RuntimeMissing.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except Exception as wrong:  # typer's usage errors; anything else is our bug and shows its trace
        if not hasattr(wrong, "show"):
            raise
        wrong.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
