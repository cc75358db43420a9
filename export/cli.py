"""fedcenters-export: compile a model; make, check, shrink and serve bundles. stdout is data, stderr is talk."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as missing:  # a device's installation has no typer
    from edge_client.run_cli import report_missing_extra

    raise SystemExit(report_missing_extra(missing)) from None

from edge_client.errors import ConfigError, ProgramRefused, UsageError
from edge_client.protocol.program import Loss, Origin
from edge_client.rare_collection import rare_collection
from export import bundle_cli
from export.command_line import GroupedCommand, finite, handle_errors, make_app
from export.output_paths import check_output_folder
from export.silence import show_progress

app = make_app("fedcenters-export", __doc__)
MAX_BATCH = 65_536
MODEL, FILES, CHECK = "The model", "Files to write", "Check files"  # in --help


class LossName(str, Enum):
    """The losses by their usual names."""

    cross_entropy = "cross-entropy"
    token_cross_entropy = "token-cross-entropy"  # noqa: S105 - the name of a loss
    pixel_cross_entropy = "pixel-cross-entropy"
    mse = "mse"


@app.command(
    cls=GroupedCommand,
    epilog="Example: fedcenters-export program --model mynet:Net --input-shape 1,28,28 --classes 10 --out program",
)
@handle_errors
@rare_collection()
def program(  # noqa: PLR0913 - one parameter per option
    *,
    model: Annotated[
        str, typer.Option(help="package.module:Class, a torch module or what makes one", rich_help_panel=MODEL)
    ] = "",
    model_args: Annotated[
        str, typer.Option(metavar="JSON", help="its arguments: an object, or a list", rich_help_panel=MODEL)
    ] = "",
    input_shape: Annotated[
        str, typer.Option(metavar="1,28,28", help="one sample, without the batch", rich_help_panel=MODEL)
    ] = "",
    samples: Annotated[
        Path | None,
        typer.Option(
            metavar="train.npz",
            help="instead of --input-shape: a file of samples with x, or with x.NAME for each parameter of forward",
            rich_help_panel=MODEL,
        ),
    ] = None,
    classes: Annotated[
        int, typer.Option(help="how many logits, or targets, it gives per sample", rich_help_panel=MODEL)
    ] = 0,
    target_shape: Annotated[
        str,
        typer.Option(metavar="3,4", help="instead of --classes: one sample's output", rich_help_panel=MODEL),
    ] = "",
    loss: Annotated[
        LossName, typer.Option(help="token- and pixel-: labels per position; mse: squared error", rich_help_panel=MODEL)
    ] = LossName.cross_entropy,
    batch: Annotated[
        int,
        typer.Option(min=1, max=MAX_BATCH, help="batch size of TFLite, which needs a fixed one", rich_help_panel=FILES),
    ] = 32,
    out: Annotated[Path | None, typer.Option(help="new folder to write", rich_help_panel=FILES)] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx/--no-onnx", help="files for ONNX Runtime", rich_help_panel=FILES)
    ] = True,
    tflite: Annotated[
        bool, typer.Option("--tflite", help="a file for LiteRT and tflite-runtime", rich_help_panel=FILES)
    ] = False,
    pt2: Annotated[bool, typer.Option("--pt2", help="files for torch", rich_help_panel=FILES)] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="of the model's weights, 0 if not given", rich_help_panel=MODEL)
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="check this folder against torch instead of writing one. Imports the model's module, so the code in "
            "it runs: the one that program.json names, with its arguments and seed, unless --model and the others say "
            "otherwise",
            rich_help_panel=CHECK,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="of --check, relative; default: 1e-4, as in compiling", rich_help_panel=CHECK
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Compile a torch model, or check compiled files.

    The files train it without torch. Writes program.json, step, evaluate and infer for each runtime asked for, and
    weights.npz into --out.
    """
    either = UsageError("give either --out or --check", hint="--out DIR compiles into DIR, --check DIR checks DIR")
    if out is not None and check is not None:
        raise either
    arguments = _arguments(model_args) if model_args else None
    if check is not None:
        if input_shape or samples or classes or target_shape:
            raise UsageError("--check reads the shapes from program.json", hint="give --check and the folder alone")
        _check_program(check, model, arguments, seed, tolerance, as_json=as_json)
        return
    if out is None:
        raise either
    check_output_folder(out)
    if not model:
        raise UsageError("--model is missing", hint="give package.module:Class, like mynet:Net for mynet.py")
    if tolerance is not None:
        raise UsageError("--tolerance belongs to --check", hint="compiling has a fixed limit")
    wanted = {"onnx": onnx, "litert": tflite, "pt2": pt2}
    engines = [name for name, yes in wanted.items() if yes]
    if not engines:
        raise UsageError("no format is left to write", hint="add --tflite or --pt2, or leave --no-onnx out")
    _write_program(
        out,
        Origin(model=model, args=[] if arguments is None else arguments, seed=seed or 0),
        example=_shape("--input-shape", input_shape) if samples is None else _example(samples),
        target=_target(classes, target_shape),
        loss="squared-error" if loss is LossName.mse else loss.value,
        batch=batch,
        engines=engines,
        as_json=as_json,
    )


@app.command(epilog="Example: fedcenters-export cache --clear")
@handle_errors
def cache(
    *,
    clear: Annotated[bool, typer.Option("--clear", help="remove every cached container")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Show the cache of compiled containers, or clear it. FEDCENTERS_CACHE=off compiles without it."""
    from export.compiler.container_cache import VARIABLE, cache_entries, chosen_folder

    folder, why_none = None, "the cache is off"
    try:
        folder = chosen_folder()
    except ConfigError as wrong:
        why_none = f"nothing is cached, as {wrong.message}: {wrong.hint}, or name a folder by {VARIABLE}"
    entries = [] if folder is None else cache_entries(folder)
    size = sum(entry.stat().st_size for entry in entries)
    for entry in entries if clear else ():
        entry.unlink(missing_ok=True)
    if as_json:
        told = {"folder": None if folder is None else str(folder), "containers": len(entries), "bytes": size}
        print(json.dumps({**told, "cleared": clear}))
    elif folder is None:
        print(why_none)
    else:
        print(f"{folder}: {len(entries)} containers, {_size(size)}{', removed' if clear else ''}")


def _write_program(  # noqa: PLR0913 - the facts of a program
    out: Path,
    origin: Origin,
    *,
    example: Any,  # noqa: ANN401 - a shape, or arrays by name
    target: tuple[int, ...],
    loss: Loss,
    batch: int,
    engines: Sequence[str],
    as_json: bool,
) -> None:
    from export.compiler.program_folder import check_unused

    check_unused(out)  # before torch, which takes seconds
    with redirect_stdout(sys.stderr):  # stdout has the results only, so the user's own prints go to stderr
        module = _load(origin)
        show_progress("export")
        print(f"compiling {origin.model} for {', '.join(engines)}", flush=True)

        from export.bundle.commands import write_program
        from export.compiler.program import compile_program
        from export.compiler.user_model import refusing_errors_of

        with refusing_errors_of(origin.model):
            made = compile_program(
                module,
                example,
                name=origin.model,
                target=target,
                loss=loss,
                batch=batch,
                engines=engines,
                origin=origin,
            )
        written = write_program(out, module, made)
    if as_json:
        print(json.dumps(written))
        return
    print(f"{'file':16} {'size':>10}  {'batch':>5}  largest difference from torch")
    for row in written["files"]:
        about = f"{row['batch']:>5}  {row['difference']:.1e}" if "engine" in row else ""
        print(f"{row['file']:16} {_size(row['size']):>10}  {about}".rstrip())


def _check_program(
    folder: Path,
    model: str,
    arguments: Any,  # noqa: ANN401 - JSON
    seed: int | None,
    tolerance: float | None,
    *,
    as_json: bool,
) -> None:
    from export.compiler.program_folder import read_folder

    recorded = read_folder(folder).program.origin  # before torch, which takes seconds
    if recorded is None and not model:
        raise UsageError(f"{folder} does not say which model it was made from", hint="name it with --model")
    origin = Origin(
        model=model or (recorded.model if recorded else ""),
        args=(recorded.args if recorded else []) if arguments is None else arguments,
        seed=(recorded.seed if recorded else 0) if seed is None else seed,
    )
    with redirect_stdout(sys.stderr):
        module = _load(origin, recorded=not model)
        show_progress("export")

        from export.compiler.check_program import check_folder
        from export.compiler.program_parity import MAX_RELATIVE_DIFFERENCE

        limit = MAX_RELATIVE_DIFFERENCE if tolerance is None else tolerance
        rows = check_folder(folder, module, tolerance=limit, seed=origin.seed + 2)
    ok = all(r["ok"] for r in rows)
    if as_json:
        files = [{**r, "difference": r["difference"] if math.isfinite(r["difference"]) else None} for r in rows]
        print(json.dumps({"program": str(folder), "ok": ok, "tolerance": limit, "files": files}))
    else:
        for r in rows:
            batches = " and ".join(str(b) for b in r["batches"])
            mark = "ok  " if r["ok"] else "FAIL"
            print(f"{mark} {r['file']:16} {r['function']:9} largest difference {r['difference']:.1e}, batch {batches}")
    if not ok:
        raise ProgramRefused(
            f"a file differs from torch by more than {limit:.0e}", hint="compile the program again; report the model"
        )


def _load(origin: Origin, *, recorded: bool = False) -> Any:  # noqa: ANN401 - a torch module; torch is not imported here
    from export.compiler.user_model import load_model

    return load_model(origin.model, origin.args, seed=origin.seed, recorded=recorded)


def _arguments(text: str) -> Any:  # noqa: ANN401 - JSON
    hint = """like '{"width": 16}' by name, or '[16]' in order"""
    try:
        found = json.loads(text)
    except ValueError as wrong:
        raise UsageError(f"--model-args is not JSON: {wrong}", hint=hint) from None
    if not isinstance(found, dict | list):
        raise UsageError(f"--model-args is {text}, which is neither an object nor a list", hint=hint)
    return found


def _target(classes: int, text: str) -> tuple[int, ...]:
    """The shape of one sample's output: from --classes, or from --target-shape."""
    if text and classes:
        raise UsageError("give either --classes or --target-shape", hint="--classes 10 is --target-shape 10")
    if not text and classes < 1:
        hint = "give how many logits the model gives per sample, like 10, or --target-shape"
        raise UsageError("--classes is missing", hint=hint)
    return _shape("--target-shape", text) if text else (classes,)


def _example(path: Path) -> Any:  # noqa: ANN401 - a shape, or arrays by name
    """What the compiler takes of a device's file: the shape of x, or arrays by forward's parameters."""
    import numpy as np

    from edge_client.data.readers import reading_arrays
    from edge_client.protocol.samples.input_parts import FROM_PARTS

    try:
        with reading_arrays(), np.load(path, allow_pickle=False) as file:
            if "x" in file:
                return tuple(file["x"].shape[1:])
            found = {name.removeprefix(FROM_PARTS): file[name] for name in file if name.startswith(FROM_PARTS)}
    except (OSError, ValueError, AttributeError, TypeError) as wrong:
        raise UsageError(f"cannot read {path}: {wrong}", hint="give an .npz file of numpy") from None
    if not found:
        raise UsageError(f"{path} has neither x nor x.NAME", hint="save it as a device's train.npz")
    return found


def _shape(option: str, text: str) -> tuple[int, ...]:
    hint = "give the sizes of one sample without the batch, like 1,28,28"
    if not text:
        raise UsageError(f"{option} is missing", hint=hint)
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r} is no list of numbers", hint=hint) from None
    if min(shape) < 1:
        raise UsageError(f"{option} {text!r} has a size below 1", hint=hint)
    return shape


def _size(count: int) -> str:
    return f"{count / 1000:.1f} kB" if count < 1_000_000 else f"{count / 1e6:.1f} MB"  # noqa: PLR2004 - kilo, mega


bundle_cli.register_commands(app)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
