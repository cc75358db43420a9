"""`.models/bin/python -m tests.benches.adapters`: LoRA on a base of random weights, ours beside torch with peft.

A step on ONNX Runtime and one of eager torch with peft's layers get the same batch in one process, take turns, and use
one thread; the figures are medians of CPU time per step. A fresh process without torch then checks the base's hash,
makes the golden run and trains as a client does, and tells its peak memory. Markdown goes to stdout, progress to
stderr.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_client.protocol.program import FROZEN
from edge_client.protocol.task import Array
from export.compiler.program import CompilerOutput, compile_program, vector_of
from tests.benches.programs import LR, MOMENTUM, machine, race, say, started
from tests.zoo.rows import without_torchvisions_own_operators
from tests.zoo.texts import Text

SIZES: dict[str, dict[str, Any]] = {  # hidden size, layers, width of the feed-forward layer
    "34M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1376},
    "100M": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048},
}
COLUMNS = (
    *("base", "texts", "frozen / trained", "base's file, MB", "other files, kB", "an update, kB"),
    *("ONNX CPU ms", "eager CPU ms", "times eager", "client's peak MB", "golden run"),
)
VOCABULARY, POSITIONS, RANK = 8_192, 64, 8
TRAIN_AS_A_CLIENT = """
import json, sys
from pathlib import Path
import numpy as np
from edge_client.data.dataset import Dataset
from edge_client.engines.base import open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from edge_client.transport.blobs import BlobFolder
folder, batch = Path(sys.argv[1]), int(sys.argv[2])
program = Program.from_json(json.loads((folder / "program.json").read_text()))
blobs = BlobFolder(folder)
files = {name: blobs.verified(file.sha256) for name, file in program.files("onnx", ["step"]).items()}
engine = open_engine("onnx", program, files, device="cpu")
off = run_golden(engine, program, program.golden["onnx"])
feeds = np.load(folder / "feeds.npz")
start = np.concatenate([feeds["w/" + t.name].ravel() for t in program.schema.tensors])
data = Dataset(feeds["x"], feeds["y"].astype(np.int64))
fit_probe.run_fit(EngineLearner(engine, program), Fit(start=start, steps=10, lr=1e-3, batch=batch, seed=0), data)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
assert "torch" not in sys.modules
print(json.dumps({k: int(status[k].split()[0]) * 1024 / 1e6 for k in ("VmHWM", "VmRSS", "RssFile")} | {"off": off}))
"""


def adapted(size: str) -> nn.Module:
    """A Llama of random weights with LoRA on its queries and values."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256, **SIZES[size]
    )
    lora = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return Text(peft.get_peft_model(transformers.LlamaForCausalLM(config), lora), last=False)


def inputs(module: nn.Module, made: CompilerOutput, batch: int) -> dict[str, Array]:
    """All that a step reads: the model's own adapters, one batch of random tokens and the tokens after them."""
    rng, program = np.random.default_rng(0), made.program
    weights = program.schema.split(vector_of(module, program.schema))
    fixed = {"lr": LR, "momentum": MOMENTUM, "q": 1 / batch}
    feeds = {}
    for port in program.functions["step"].inputs:
        kind, _, name = port.name.partition("/")
        shape = tuple(batch if d == "batch" else d for d in port.shape)
        drawn = rng.integers(VOCABULARY, size=shape) if kind in {"x", "y"} else np.full(shape, fixed.get(kind, 0.0))
        feeds[port.name] = np.array(weights[name] if kind in {"w", "anchor"} else drawn, dtype=port.dtype)
    return feeds


def eager(module: nn.Module, feeds: Mapping[str, Array]) -> Callable[[], object]:
    """One step of the usual loop, on the same batch, from the same weights."""
    mine = copy.deepcopy(module).train()
    x, y = torch.from_numpy(feeds["x"].copy()), torch.from_numpy(feeds["y"].astype(np.int64))
    optimizer = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(mine(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def measure(size: str, codec: str, *, batches: list[int], repeats: int) -> list[str]:
    """A row of the table for each number of texts in a step."""
    module = adapted(size)
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    say(f"{size}, {codec}: compiling {frozen / 1e6:.1f} M frozen and {trained:,} trained parameters")
    facts = {"loss": "token-cross-entropy", "engines": ("onnx",), "frozen": codec}
    made = compile_program(module, (POSITIONS,), **facts)  # type: ignore[arg-type]  # each by its name
    return [_row(f"{size}, {codec}", module, made, batch, repeats) for batch in batches]


def _row(name: str, module: nn.Module, made: CompilerOutput, batch: int, repeats: int) -> str:
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    feeds = inputs(module, made, batch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "program"
        ours = started("onnx", made, feeds, folder)
        say(f"{name}, {batch} texts: {repeats} turns each")
        times = race({"eager": lambda: eager(module, feeds), "onnx": ours}, repeats)
        command = [sys.executable, "-c", TRAIN_AS_A_CLIENT, str(folder), str(batch)]
        told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    base, held = 4 * frozen / 1e6, made.program.containers["onnx"]
    figures = [
        name,
        f"{batch}",
        f"{frozen / 1e6:.1f} M / {trained:,}",
        f"{held[FROZEN].size / 1e6:.0f}",
        f"{sum(file.size for name, file in held.items() if name != FROZEN) / 1e3:.0f}",
        f"{4 * trained / 1e3:.0f}",
        f"{times['onnx'][0]:.0f}",
        f"{times['eager'][0]:.0f}",
        f"{times['onnx'][0] / times['eager'][0]:.2f}",
        f"{told['VmHWM']:.0f} ({told['VmHWM'] / base:.2f} of the base)",
        f"{told['off']:.0e}",
    ]
    return f"| {' | '.join(figures)} |"


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["34M"], metavar="SIZE")
    parser.add_argument("--codecs", nargs="+", choices=("f32", "f16", "i8"), default=["f32"], metavar="CODEC")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 2], help="texts per step")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contestant")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    without_torchvisions_own_operators()
    rows = [
        row
        for size in asked.sizes
        for codec in asked.codecs
        for row in measure(size, codec, batches=asked.batches, repeats=asked.repeats)
    ]
    print(f"{machine()}; texts of {POSITIONS} tokens, one thread, medians of {asked.repeats} turns.\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|--:|---|{'--:|' * (len(COLUMNS) - 3)}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
