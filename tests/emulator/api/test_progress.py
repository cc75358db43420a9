"""The bar of a run: its text, and that it is silent where no person looks."""

from __future__ import annotations

import pytest

import fedcenters as fc
from emulator.api.progress import RunProgress


def test_the_bar_has_method_rounds_accuracy_and_the_seconds_that_remain(capsys: pytest.CaptureFixture[str]) -> None:
    method = fc.FedAvg(local_steps=2)
    runs = list(fc.rounds(method, fleet=fc.fleets.digits(devices=3), rounds=2))
    bar = RunProgress(repr(method), 4, shown=False)
    first, second = bar.text(runs[0]), bar.text(runs[1])
    assert first.startswith("FedAvg(local_steps=2)  ██████░░░")
    assert first.endswith(f"1/4  accuracy {runs[0].accuracy:.1%}")  # the first round is no measure of the others
    assert "2/4" in second
    assert second.endswith(" s left")
    assert not bar.text(runs[1]).startswith("FedAvg(local_steps=2)  ████████████████████████")
    whole = RunProgress(repr(method), 2, shown=False).text(runs[1])
    assert "█" * 24 in whole
    assert "left" not in whole
    assert capsys.readouterr() == ("", "")  # no terminal, no notebook
