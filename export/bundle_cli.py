"""Commands on bundles, for fedcenters-export: bundle, verify, quantize, site, serve."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_client.errors import BeyondLimits, UsageError
from edge_client.printable import first_of
from edge_client.rare_collection import rare_collection
from export.command_line import GroupedCommand, difference_in_words, finite, handle_errors
from export.output_paths import check_output_folder
from export.silence import show_progress, write_stderr

CENTERS, FILES, SIGNATURE = "Whose centers, and their samples", "Files to write", "Signature"  # headings in --help
LISTEN, ROLLOUT = "The server", "Roll-out of a new bundle"
HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
PublicKeys = Annotated[
    list[Path] | None,
    typer.Option(
        help="file with a public key in hex that must have signed; may be repeated", rich_help_panel=SIGNATURE
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="the folder of data sets; default: the folder that FEDCENTERS_DATA names", rich_help_panel=CENTERS
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(help="a private signing key to sign the bundle with; needs --federation", rich_help_panel=SIGNATURE),
]
Federation = Annotated[str, typer.Option(help="whose bundle this is, in the signature", rich_help_panel=SIGNATURE)]


def register_commands(app: typer.Typer) -> None:
    """Add the commands to `app`, each with an example."""
    app.command(
        cls=GroupedCommand, epilog="Example: fedcenters-export bundle runs/demo --out centers --quantize fp16,int8"
    )(bundle)
    app.command(epilog="Example: fedcenters-export verify centers --run runs/demo")(verify)
    app.command(epilog="Example: fedcenters-export quantize centers --out small --run runs/demo")(quantize)
    app.command(epilog="Example: fedcenters-export site centers --out public --layout static")(site)
    app.command(cls=GroupedCommand, epilog="Example: fedcenters-export serve centers --port 8080 --canary 0.05")(serve)


@handle_errors
@rare_collection()
def bundle(  # noqa: PLR0913 - one parameter per option
    run: Annotated[Path, typer.Argument(help="folder of a run: of the coordinator, or of simulate")],
    *,
    out: Annotated[
        Path,
        typer.Option(
            help="folder to write; an older bundle there is replaced, anything else refused", rich_help_panel=FILES
        ),
    ],
    method: Annotated[
        str, typer.Option(help="whose centers; default: those that are published", rich_help_panel=CENTERS)
    ] = "",
    formats: Annotated[str, typer.Option(help="some of onnx,tflite,pt2", rich_help_panel=FILES)] = "onnx,tflite",
    quantize: Annotated[
        str, typer.Option(help="also smaller files: some of fp16,int8,int8-static", rich_help_panel=FILES)
    ] = "",
    stacked: Annotated[
        bool, typer.Option("--stacked", help="also one file per format with all centers", rich_help_panel=FILES)
    ] = False,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="at most so many held-out samples of a simulated run go into the bundle",
            rich_help_panel=CENTERS,
        ),
    ] = 64,
    data: Data = None,
    key: Key = None,
    federation: Federation = "",
) -> None:
    """Write the centers of a finished run as files.

    One per center and format, with cards and a manifest, which anyone can use. Every file is compared with torch
    before the folder gets its name. A coordinator's bundle is signed with the key of its
    signing-folder, where that can be read.
    """
    from export.bundle.reader import check_replaceable

    check_output_folder(out)
    if there := check_replaceable(out):  # before the run is read and exported, which takes a while
        write_stderr(there)
    from export.bundle.commands import bundle_run
    from export.bundle.writer import BundleOptions

    show_progress("export")
    options = BundleOptions(formats=_listed(formats), schemes=_listed(quantize), stacked=stacked)
    manifest = bundle_run(run, out, options, method=method, data=data, samples=samples, sign=_signer(key, federation))
    _tell_unsigned(out)
    _print_written(out, manifest)


def _tell_unsigned(out: Path) -> None:
    if not (out / "manifest.sig").exists():
        unsigned = "warning: the bundle is NOT signed, and devices refuse it"
        print(f"{unsigned}; --key SIGNING.KEY --federation NAME signs it", file=sys.stderr)


@handle_errors
@rare_collection()
def verify(  # noqa: PLR0913 - one parameter per option
    bundle: Annotated[Path, typer.Argument(help="folder with manifest.json")],
    *,
    run: Annotated[Path | None, typer.Option(help="measure on every held-out sample of this run's devices")] = None,
    samples: Annotated[Path | None, typer.Option(help="npz with x [n, *input], and y, device, center")] = None,
    data: Data = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, help="largest difference of a logit from torch, in parts of the logits' size"
        ),
    ] = 1e-4,
    loss: Annotated[
        float,
        typer.Option(
            min=0, max=1, callback=finite, help="of a quantized file: what its devices may lose in mean accuracy"
        ),
    ] = 0.02,
    public_key: PublicKeys = None,
    as_json: AsJson = False,
) -> None:
    """Check every hash and compare every file with torch.

    Says what each file gets right, its size and how long it takes. Measures on the bundle's own samples if neither
    --run nor --samples is given, and on random inputs, which have no accuracy, where it has none.
    """
    from export.bundle.bundle_contents import LabelledSamples, find_run_reader
    from export.bundle.commands import verify_bundle
    from export.bundle.reader import read_bundle

    if run is not None and samples is not None:
        raise UsageError("give either --run or --samples", hint="--run takes the run's own samples")
    given = None if samples is None else LabelledSamples.read(samples)
    if run is not None and (given := find_run_reader(run).held_out(run, data=data)) is None:
        raise UsageError(f"{run} keeps no samples", hint="devices keep theirs; give some with --samples")
    if public_key:
        read_bundle(bundle, [_public(path) for path in public_key])
    show_progress("export.bundle")
    _tell_rows(verify_bundle(bundle, given, tolerance=tolerance, loss=loss), bundle, loss, as_json=as_json)


@handle_errors
@rare_collection()
def quantize(  # noqa: PLR0913 - one parameter per option
    bundle: Annotated[Path, typer.Argument(help="folder with manifest.json; it stays as it is")],
    *,
    out: Annotated[Path, typer.Option(help="folder to write: the same bundle, with smaller files beside the others")],
    to: Annotated[str, typer.Option(help="some of fp16,int8,int8-static")] = "fp16,int8",
    run: Annotated[Path | None, typer.Option(help="calibrate and measure on the samples of this run")] = None,
    calibration: Annotated[Path | None, typer.Option(help="npz with training samples x, for int8-static")] = None,
    data: Data = None,
    key: Key = None,
    federation: Federation = "",
    as_json: AsJson = False,
) -> None:
    """Write smaller files, and measure what they lose. Give --key for a bundle that shall be signed again.

    A file that loses more than `verify` allows is written, too, and named at the end (exit code 1, as of `verify`).
    """
    from export.bundle.reader import check_replaceable

    check_output_folder(out)
    if there := check_replaceable(out):
        write_stderr(there)
    from export.bundle.bundle_contents import LabelledSamples, find_run_reader
    from export.bundle.commands import MAX_ACCURACY_LOSS, quantize_bundle, verify_bundle

    seen = held_out = None
    if run is not None:
        kind = find_run_reader(run)
        seen, held_out = kind.calibration(run, data=data), kind.held_out(run, data=data)
    if calibration is not None:
        seen = LabelledSamples.read(calibration)
    quantize_bundle(bundle, out, _listed(to), seen, _signer(key, federation))
    _tell_unsigned(out)  # also of a signed one: its signature is of other files
    show_progress("export.bundle")
    _tell_rows(verify_bundle(out, held_out), out, MAX_ACCURACY_LOSS, as_json=as_json)


class Layout(str, Enum):
    """The layout of a site's folder."""

    static = "static"
    triton = "triton"


@handle_errors
def site(
    bundle: Annotated[Path, typer.Argument(help="folder with manifest.json")],
    *,
    out: Annotated[Path, typer.Option(help="folder that a web server, a CDN or Triton is pointed at")],
    layout: Annotated[Layout, typer.Option(help="for any web server, or a model repository")] = Layout.static,
    public_key: PublicKeys = None,
) -> None:
    """Publish a bundle as plain files. Publishing the next one into the same folder never mixes the two."""
    check_output_folder(out)
    keys = [_public(path) for path in public_key or ()]
    if layout is Layout.static:
        from export.serve.site import publish_bundle

        print(json.dumps({"site": str(out), "generation": publish_bundle(bundle, out, keys)}))
        return
    from export.serve.triton import write_repository

    print(json.dumps({"repository": str(out), "models": write_repository(bundle, out, keys)}))


@handle_errors
def serve(  # noqa: PLR0913 - one parameter per option
    bundle: Annotated[Path, typer.Argument(help="folder with manifest.json; a new bundle there is noticed")],
    *,
    host: Annotated[
        str, typer.Option(help="the address to listen on; 0.0.0.0 for all", rich_help_panel=LISTEN)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="0 takes a free one and says which", rich_help_panel=LISTEN)
    ] = 8080,
    site: Annotated[
        Path | None,
        typer.Option(
            help="where served generations are kept; by default beside the bundle, as NAME.site", rich_help_panel=LISTEN
        ),
    ] = None,
    canary: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1,
            callback=finite,
            help="the share of devices that get a new bundle first; 1: all, where none posts reports",
            rich_help_panel=ROLLOUT,
        ),
    ] = 0.05,
    canary_pairs: Annotated[
        int,
        typer.Option(
            min=1, help="pairs of reports, old and new, after which all others get it", rich_help_panel=ROLLOUT
        ),
    ] = 200,
    rate: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, help="requests per second and address; 0: no limit", rich_help_panel=LISTEN
        ),
    ] = 50.0,
    name: Annotated[
        list[str] | None,
        typer.Option(help="a host name of this server, repeated; addresses need none", rich_help_panel=LISTEN),
    ] = None,
    token: Annotated[
        Path | None, typer.Option(help="file with a token that every request must bear", rich_help_panel=LISTEN)
    ] = None,
    report_token: Annotated[
        Path | None,
        typer.Option(help="file with a token for reports; other machines report with one only", rich_help_panel=LISTEN),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file: speak TLS", rich_help_panel=LISTEN)] = None,
    key: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate's key", rich_help_panel=LISTEN)
    ] = None,
    public_key: PublicKeys = None,
) -> None:
    """Serve a bundle over HTTP: files, nearest, reports.

    /openapi.json describes it.
    """
    from export.serve.rollout import RolloutPlan
    from export.serve.server import ServeOptions, run_server

    show_progress("export.serve")
    here = bundle.absolute()  # "." has no name
    run_server(
        ServeOptions(
            bundle=bundle,
            site=site or here.with_name(f"{here.name}.site"),
            host=host,
            port=port,
            plan=RolloutPlan(share=canary, pairs=canary_pairs),
            rate=rate,
            token=token,
            report_token=report_token,
            names=[_host_name(each) for each in name or ()],
            certificate=certificate,
            key=key,
            trusted=[_public(path) for path in public_key or ()],
        )
    )


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _signer(key: Path | None, federation: str) -> Any:  # noqa: ANN401 - a signer or None; nothing heavy is imported for its type
    if key is None:
        return None
    if not federation:
        raise UsageError("--key needs --federation", hint="the signature says whose bundle it is: --federation home")
    from export.bundle.bundle_contents import make_signer
    from export.bundle.commands import read_private_key

    return make_signer(read_private_key(key), federation)


def _host_name(name: str) -> str:
    if HOST_NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no host name", hint="give it without https://, port and path: centers.example")
    return name


def _public(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as wrong:
        raise UsageError(f"{path} holds no public key: {wrong}", hint="give signing.pub of the coordinator") from None


def _print_written(out: Path, manifest: Mapping[str, Any]) -> None:
    files = [file for center in manifest["centers"] for file in center["files"].values()]
    files += manifest["stacked"].values()
    written = {"bundle": str(out), "centers": len(manifest["centers"]), "files": len(files)}
    print(json.dumps({**written, "bytes": sum(file["size"] for file in files)}))


SHOWN_FILES = 3  # that an error names
COLUMNS = (
    "ms: the time of one sample; difference: the largest between an output (logit) of the file and torch's, of so many "
    "values"
)
ACCURACIES = "accuracy: of the median device, and in brackets of the device with the lowest where that differs"
NO_SAMPLES = (
    "accuracy is not measured, because the bundle holds no samples: files were compared with torch on random inputs.\n"
    "--samples FILE.npz (x, and labels y) measures it; `reference` in coordinator.toml puts such a file's samples into "
    "later bundles"
)


def _tell_rows(rows: Sequence[Mapping[str, Any]], bundle: Path, loss: float, *, as_json: bool) -> None:
    """Print what was measured of each file of a bundle. Raises BeyondLimits for files that are beyond the limits."""
    if as_json:
        finite = [{**r, "difference": r["difference"] if math.isfinite(r["difference"]) else None} for r in rows]
        print(json.dumps({"bundle": str(bundle), "ok": all(r["ok"] for r in rows), "files": finite}))
    else:
        _print_rows(rows)
    failed = [r for r in rows if not r["ok"]]
    if not failed:
        return
    named = first_of([f"{r['format']} of center {r['center']}" for r in failed], SHOWN_FILES)
    if all("-" in r["format"] for r in failed):
        told = f"quantized, and more than {loss:g} worse than torch on {failed[0]['samples']} samples: {named}"
        hint = "measure on more samples (--run or --samples), take another scheme, or allow more with --loss"
        raise BeyondLimits(told, hint=hint)
    raise BeyondLimits(f"too far from torch: {named}", hint="export the bundle again; report the model")


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{'':4} {'center':>6} {'file':18} {'bytes':>10} {'ms':>8} {'difference':>10} {'values':>7} "
        f"{'samples':>7}  {'accuracy in torch':18}  accuracy of the file"
    )
    for r in rows:
        mark = "ok" if r["ok"] else "FAIL"
        print(
            f"{mark:4} {r['center']:>6} {r['format']:18} {r['size']:>10,} {r['latency_ms']:>8.3f} "
            f"{difference_in_words(r['difference']):>10} {r['values']:>7} {r['samples']:>7}  {_format_accuracy(r)}"
        )
    print(COLUMNS, file=sys.stderr)
    if any(r["torch"] is not None for r in rows):
        print(ACCURACIES, file=sys.stderr)
    if any(r["random_inputs"] for r in rows):
        print(NO_SAMPLES, file=sys.stderr)


def _format_accuracy(row: Mapping[str, Any]) -> str:
    if row["torch"] is None:
        return f"not measured: {'random inputs' if row['random_inputs'] else 'samples without class labels'}"
    return f"{_format_measurement(row['torch']):18}  {_format_measurement(row['accuracy'])}"


def _format_measurement(found: Mapping[str, float]) -> str:
    lowest = f" ({found['min']:.2%})" if found["min"] != found["median"] else ""
    return f"{found['median']:.2%}{lowest}"
