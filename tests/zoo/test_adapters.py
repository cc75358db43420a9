"""Adapters of peft through the compiler: peft itself loads what a bundle holds. `make models` runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_client.engines.base import open_engine
from edge_client.protocol.program import FROZEN
from edge_client.training.learner import EngineLearner
from export.bundle.bundle_contents import BundleSource
from export.bundle.reader import read_bundle
from export.bundle.verify_centers import file_logits
from export.bundle.writer import BundleOptions, write_bundle
from export.compiler.program import CompilerOutput, compile_program, vector_of
from tests.zoo.rows import without_torchvisions_own_operators
from tests.zoo.texts import ADAPTERS, GROUPED, TOKENS

peft = pytest.importorskip("peft", reason="peft is not installed: make models installs it")
without_torchvisions_own_operators()
pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that other projects keep
KINDS = ("LoRA on Llama", "DoRA on Llama", "IA3 on Llama")


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest) -> tuple[nn.Module, CompilerOutput]:
    torch.manual_seed(0)
    module = ADAPTERS[request.param]()
    engines = ("onnx", "pt2")
    return module, compile_program(module, (TOKENS,), engines=engines, progress=lambda _: None)


def test_only_the_adapter_is_trained_and_the_base_is_a_file(adapted: tuple[nn.Module, CompilerOutput]) -> None:
    module, made = adapted
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {t.name for t in made.program.schema.tensors} == trained
    assert made.program.frozen is not None
    base = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    assert made.program.frozen.size == base
    files = made.program.containers["onnx"]
    assert files[FROZEN].size > 4 * base > 10 * made.program.schema.size


def test_peft_loads_the_adapters_of_a_bundle(adapted: tuple[nn.Module, CompilerOutput], tmp_path: Path) -> None:
    import transformers

    module, made = adapted
    rng, start = np.random.default_rng(0), vector_of(module, made.program.schema)
    centers = [start + 0.2 * rng.standard_normal(start.shape).astype(np.float32) for _ in range(2)]
    source = BundleSource(program=made.program, files=made.files, centers=centers, cards=[{}, {}])
    write_bundle(tmp_path / "b", source, BundleOptions(formats=("onnx",)))
    bundle = read_bundle(tmp_path / "b")
    x = rng.integers(GROUPED["vocab_size"], size=(3, TOKENS))
    answers = []
    for k in range(2):
        torch.manual_seed(0)  # the base's random weights, as the maker drew them
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "b" / f"centers/center-{k}/adapter").eval()
        with torch.no_grad():
            told = theirs(torch.from_numpy(x)).logits[:, -1].numpy()
        ours = file_logits(bundle.read(bundle.manifest["centers"][k]["files"]["onnx"]), "onnx", x.astype(np.float32))
        np.testing.assert_allclose(ours, told, atol=1e-4)
        answers.append(told)
    assert np.abs(answers[0] - answers[1]).max() > 1e-2  # one base, two models


def test_a_device_with_the_base_evaluates_every_center(
    adapted: tuple[nn.Module, CompilerOutput], tmp_path: Path
) -> None:
    module, made = adapted
    files: dict[str, Any] = {}
    for name, file in made.program.files("onnx", ("step", "evaluate")).items():
        files[name] = tmp_path / file.sha256
        files[name].write_bytes(made.files[file.sha256])
    learner = EngineLearner(open_engine("onnx", made.program, files, device="cpu"), made.program)
    x = np.random.default_rng(1).integers(GROUPED["vocab_size"], size=(4, TOKENS)).astype(np.float32)
    with torch.no_grad():
        told = module.eval()(torch.from_numpy(x)).numpy()
    from edge_client.data.dataset import Dataset

    labels = np.zeros(len(x), np.int64)
    losses = learner.evaluate([vector_of(module, made.program.schema)], Dataset(x, labels), batch=4)[0]
    wanted = nn.functional.cross_entropy(torch.from_numpy(told), torch.from_numpy(labels), reduction="none")
    np.testing.assert_allclose(np.ravel(losses), wanted.numpy(), atol=1e-4)
