"""The cache of compiled containers: what counts as the same, what is compiled again, and how large it grows."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from export.compiler import container_cache, containers
from export.compiler.container_cache import cache_entries
from export.compiler.program import CompilerOutput, compile_program
from tests.support.size_limit import files_of_at_most


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCENTERS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "containers"


class Scaled(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.full((6,), constant), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def small(*, constant: float = 0.5, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(Scaled(constant), nn.Linear(6, 4), nn.Linear(4, 3))


def compile_small(**changes: Any) -> CompilerOutput:  # noqa: ANN401 - small's own
    return compile_program(small(**changes), (6,), engines=("pt2",))


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompilerOutput, Path]:
    """What compile_small() gives from an empty cache, and that cache."""
    cache = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCENTERS_CACHE", str(cache))
        return compile_small(), cache


@pytest.fixture
def first(compiled_once: tuple[CompilerOutput, Path], folder: Path) -> CompilerOutput:
    """What has been compiled; its containers are in the test's own cache."""
    made, cache = compiled_once
    shutil.copytree(cache, folder.parent)
    return made


@pytest.fixture
def no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> bytes:
        raise RuntimeError("a container is exported")

    monkeypatch.setattr(containers, "to_pt2", refuse)


def test_the_same_model_is_exported_once(first: CompilerOutput, no_exporter: None) -> None:
    again = compile_small()
    assert (again.program, again.files) == (first.program, first.files)


def test_trained_weights_are_no_part_of_a_container(first: CompilerOutput, no_exporter: None) -> None:
    assert compile_small(seed=2).files == first.files


@pytest.mark.usefixtures("first", "no_exporter")
@pytest.mark.parametrize("change", [{"constant": 0.25}, {}])
def test_other_constants_and_other_converters_are_compiled_anew(
    change: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not change:
        monkeypatch.setattr(container_cache, "_version", lambda package: f"another {package}")
    with pytest.raises(RuntimeError, match="a container is exported"):
        compile_small(**change)


class LargeBatches(nn.Linear):
    """Another step for large batches, so that it is compiled for one size; its inference is the same for every size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if self.training and x.shape[0] > 20 else x)


def test_a_file_for_one_batch_size_is_none_for_every_size() -> None:
    one_size = compile_program(LargeBatches(6, 3), (6,), engines=("pt2",), batch=containers.EXAMPLE_BATCH)
    every_size = compile_program(nn.Linear(6, 3), (6,), engines=("pt2",))
    assert (one_size.program.batch, every_size.program.batch) == ({"pt2": 13}, {"pt2": "any"})


def test_a_damaged_entry_is_compiled_anew(first: CompilerOutput, folder: Path) -> None:
    for entry in cache_entries(folder):
        entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    assert compile_small().files == first.files
    assert all(container_cache._read(entry) is not None for entry in cache_entries(folder))


def test_a_compiler_that_is_killed_keeps_the_containers_that_were_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_at_the_third(what: str) -> None:
        if what == "pt2 infer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_program(small(), (6,), engines=("pt2",), progress=die_at_the_third)
    assert len(cache_entries(folder)) == 2  # step and evaluate


@pytest.mark.usefixtures("first")
def test_the_least_recently_used_containers_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, entry in enumerate(cache_entries(folder)):
        os.utime(entry, (age, age))
    oldest, *others = cache_entries(folder)
    size = sum(entry.stat().st_size for entry in cache_entries(folder))
    monkeypatch.setattr(container_cache, "BUDGET_BYTES", size)
    container_cache.cached_file("f" * 64, lambda: b"one more")
    assert cache_entries(folder) == [*others, folder / ("f" * 64)]
    assert not oldest.exists()


@pytest.mark.usefixtures("first", "no_exporter")
def test_a_folder_that_others_have_filled_serves_who_cannot_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)  # the rights of files do not bind root
    compile_small()


class ScaledByHalf(nn.Linear):
    """Holds a tensor that is no buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.halves)

    halves = torch.full((6,), 0.5, dtype=torch.bfloat16)


def test_a_constant_that_numpy_has_no_name_for_is_cached_too(folder: Path) -> None:
    compile_program(ScaledByHalf(6, 3), (6,), engines=("pt2",))
    assert len(cache_entries(folder)) == 3


@pytest.mark.usefixtures("first", "no_exporter")
def test_off_reads_and_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_entries(folder)
    monkeypatch.setenv("FEDCENTERS_CACHE", "off")
    with pytest.raises(RuntimeError, match="a container is exported"):
        compile_small()
    assert cache_entries(folder) == before


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert compile_small().files


def test_a_full_disk_keeps_no_half_of_a_container_and_is_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=container_cache.__name__)
    with files_of_at_most(100):
        for key in ("a" * 64, "b" * 64):
            assert container_cache.cached_file(key, lambda: bytes(1000)) == bytes(1000)
    assert cache_entries(folder) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"what is compiled is not kept in {folder} (File too large): FEDCENTERS_CACHE may name another folder"
    ]


def test_a_user_without_a_home_compiles_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDCENTERS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number without an account, as in a container
    assert container_cache.cached_file("a" * 64, lambda: b"12345") == b"12345"


def test_the_command_shows_and_clears_the_cache(folder: Path) -> None:
    container_cache.cached_file("a" * 64, lambda: b"12345")

    def ask(*more: str) -> dict[str, object]:
        command = [sys.executable, "-m", "export", "cache", *more, "--json"]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    facts = {"folder": str(folder), "containers": 1, "bytes": 5 + container_cache.DIGEST_BYTES}
    assert ask() == facts | {"cleared": False}
    assert ask("--clear") == facts | {"cleared": True}
    assert ask() == {"folder": str(folder), "containers": 0, "bytes": 0, "cleared": False}
