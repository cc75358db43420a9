"""A method outside of the registry is held to what every method promises by `--method`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_pages import DOCS, blocks

ROOT = Path(__file__).parents[2]
OWN = """
from dataclasses import dataclass, replace

import numpy as np

import fedcenters as fc


@dataclass(frozen=True, kw_only=True, repr=False)
class Mean(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        center = state.centers[0]
        replies = yield {who: self.fit(start=center, seed=0) for who in self.asked(fleet, rng)}
        if not replies:
            return state
        return replace(state, centers=np.mean([reply.update for _, reply in sorted(replies.items())], axis=0)[None])

    def asked(self, fleet, rng):
        return self.cohort(fleet, rng)


class All(Mean):
    def asked(self, fleet, rng):
        return sorted(fleet)
"""
PAGE = "cosine:Cosine", "soft:Soft", "own_models:OwnModels", "checked:Checked"


@pytest.mark.timeout(600)
def test_own_methods_and_those_of_the_page_keep_the_promises_and_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "own_mean.py").write_text(OWN)
    for block in blocks(DOCS / "plug-ins.md"):
        if block.kind == "python":
            (tmp_path / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/conformance", "--method", "own_mean:Mean"]
    words += ["--method", "own_mean:All", "-k", "half_of_the_fleet or silent or replay"]
    for method in PAGE:
        words += ["--method", method]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1, done.stdout
    assert "half_of_the_fleet" in failed[0]
    assert "own_mean:All" in failed[0]
    assert "1 failed, 23 passed" in done.stdout
