"""`python -m tests.benches.litert_apis`: a step on LiteRT's Interpreter beside one on its CompiledModel, batch 32.

Both train in one process and take turns (tests/benches/programs.py); memory is that of a fresh process each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from edge_client.engines import litert_compiled
from export.compiler.program import compile_program
from tests.benches.programs import TRAIN_ONE, inputs, machine, race, resident_mib, started
from tests.support.programs import model as model_named

MODELS = ("digits-mlp", "gn-cnn", "wecfl-cnn")
BATCH = 32
TRAIN_COMPILED = "from edge_client.engines import litert; litert.RUNTIMES = {}" + TRAIN_ONE


def main() -> None:
    """A line of Markdown for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each")
    asked = parser.parse_args()
    rows = []
    for name in MODELS:
        model = model_named(name)
        made = compile_program(
            model.module, name=name, input=model.input, classes=model.classes, batch=BATCH, engines=("litert",)
        )
        feeds = inputs(model, made.program, BATCH)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "litert"
            usual = started("litert", made, feeds, folder)
            files = {"step": folder / made.program.containers["litert"]["step"].sha256}
            update = litert_compiled.open_program(made.program, files, threads=1).update(feeds)
            times = race({"Interpreter": usual, "CompiledModel": lambda: lambda: update.step(feeds)}, asked.repeats)  # noqa: B023
            alone = [sys.executable, "-c", TRAIN_COMPILED, str(folder), "litert"]
            memory = {
                "Interpreter": resident_mib(folder, "litert"),
                "CompiledModel": float(subprocess.run(alone, capture_output=True, text=True, check=True).stdout),
            }
        figures = " | ".join(f"{times[api][0]:.3f} | {memory[api]:.1f}" for api in memory)
        rows.append(f"| {name} | {figures} |")
    sys.stdout.write(f"{machine()}; batch {BATCH}, one thread, medians of {asked.repeats} interleaved turns.\n\n")
    sys.stdout.write(
        "| model | Interpreter CPU ms | peak MiB | CompiledModel CPU ms | peak MiB |\n|---|--:|--:|--:|--:|\n"
    )
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
