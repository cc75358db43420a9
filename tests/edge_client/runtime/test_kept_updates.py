"""What stays on a device between its tasks: its own models, and the responsibilities of a probe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_client.protocol import codecs
from edge_client.protocol.task import OWN_MODEL, Fit, Flat, OwnModel, Probe, Reply
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from tests.support.scripted_coordinator import BallastEngine, DeviceStage, Script

POSTERIOR = frozenset({"posterior"})


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path)


def probe(
    stage: DeviceStage, *models: Flat | OwnModel, want: frozenset[str] = POSTERIOR, split: str = "train"
) -> Probe:
    given = models or (stage.model(1), stage.model(2))
    return Probe(models=given, want=want, batch=8, seed=1, split=split)


def asked(stage: DeviceStage, task: Fit | Probe, *, round_: int, exchange: int, base: str = "zero") -> Script:
    """One task and what follows it; the last words are the stage's."""
    stage.ask(task, round_=round_, exchange=exchange, base=base)
    yield
    if stage.heard[-1]["k"] == "rdy":
        stage.go()
        yield
        stage.ack("ok")
        yield


def answer(stage: DeviceStage) -> Reply:
    return codecs.decode_stats(stage.uploaded(), stage.schema, stage.last("rdy")["n"])


def own_model(stage: DeviceStage, slot: str = "main") -> Flat:
    kept = stage.device().state.own_model("r1", slot, stage.schema)
    assert kept is not None
    return kept


def shares_of(stage: DeviceStage) -> Flat:
    """What the device must have kept after `probe`, by Bayes' rule on the losses."""
    learner = EngineLearner(BallastEngine(), stage.program)
    losses, _ = learner.evaluate([stage.model(1), stage.model(2)], stage.local.train, batch=8)
    likelihood = np.exp(-losses)
    return np.asarray(likelihood / likelihood.sum(axis=0))


def weighted(stage: DeviceStage, m: int) -> Fit:
    return stage.fit(rows=f"posterior:{m}", slot=f"c-{m}")


def test_a_fit_weighs_samples_as_the_rounds_probe_left_them_even_after_a_restart(stage: DeviceStage) -> None:
    def first() -> Script:
        yield
        yield from asked(stage, probe(stage), round_=1, exchange=0)

    def second() -> Script:
        yield
        for m in range(2):
            yield from asked(stage, weighted(stage, m), round_=1, exchange=1 + m, base="start")

    stage.play(first())
    shares = shares_of(stage)
    np.testing.assert_allclose(np.asarray(answer(stage).posterior), shares.mean(axis=1), rtol=1e-12)
    stage.play(second())  # a new process over the same folder
    for m in range(2):
        # The likelihood above is a ratio of exponentials, the device's a softmax: they agree to a rounding.
        np.testing.assert_allclose(
            own_model(stage, f"c-{m}"), stage.trained(weighted(stage, m), posterior=shares), rtol=1e-5
        )


@pytest.mark.parametrize("where", [{"round_": 2, "exchange": 1}, {"round_": 1, "exchange": 1}])
def test_without_the_shares_of_this_round_a_fit_is_refused_and_asked_again_after_a_probe(
    stage: DeviceStage, where: dict[str, int]
) -> None:
    """In another round the shares are out of date; in the same one the third candidate has none."""
    m = 0 if where["round_"] == 2 else 2

    stage.play_turns(
        asked(stage, probe(stage), round_=1, exchange=0), asked(stage, weighted(stage, m), **where, base="start")
    )
    assert stage.last("nack")["code"] == "no_posterior"

    stage.play_turns(
        asked(stage, probe(stage), round_=3, exchange=0),
        asked(stage, weighted(stage, 0), round_=3, exchange=1, base="start"),
    )
    assert (stage.last("rdy")["round"], stage.last("rdy")["exchange"]) == (3, 1)


def test_shares_that_the_disk_lost_are_refused_not_invented(stage: DeviceStage) -> None:
    stage.play_turns(asked(stage, probe(stage), round_=1, exchange=0))
    folder = stage.config().state
    named = json.loads((folder / "state.json").read_bytes())["posterior"][0]
    (folder / "kept" / named).write_bytes(b"rot")

    stage.play_turns(asked(stage, weighted(stage, 0), round_=1, exchange=1, base="start"))
    assert stage.last("nack")["code"] == "no_posterior"


def test_a_probe_of_held_out_samples_leaves_nothing(stage: DeviceStage) -> None:
    stage.play_turns(asked(stage, probe(stage, split="test"), round_=1, exchange=0))
    assert json.loads((stage.config().state / "state.json").read_bytes())["posterior"] is None


def test_a_model_that_is_not_uploaded_stays_and_only_its_loss_is_told(stage: DeviceStage) -> None:
    task = stage.fit(upload=False, slot="personal")

    stage.play_turns(asked(stage, task, round_=1, exchange=0))
    result = fit_probe.run_fit(EngineLearner(BallastEngine(), stage.program), task, stage.local.train)
    assert stage.last("rdy")["what"] == "stats"
    losses = answer(stage).losses
    assert losses is not None
    assert losses.tolist() == [result.loss]
    np.testing.assert_array_equal(own_model(stage, "personal"), result.vector.astype(np.float32))


def test_a_device_evaluates_the_model_that_it_kept(stage: DeviceStage) -> None:
    """The model that would stand in is not even fetched."""
    spare = stage.model(9)
    wanted = probe(stage, OwnModel(slot="personal", init=spare), stage.model(1), want=frozenset({"loss"}))
    task = stage.fit(upload=False, slot="personal")

    stage.play_turns(asked(stage, task, round_=1, exchange=0), asked(stage, wanted, round_=1, exchange=1))
    own = stage.trained(task)
    losses, _ = EngineLearner(BallastEngine(), stage.program).evaluate(
        [own, stage.model(1)], stage.local.train, batch=8
    )
    found = answer(stage).losses
    assert found is not None
    np.testing.assert_allclose(found, losses.mean(axis=1), rtol=1e-12)
    assert stage.put(spare, "model").sha256 not in {get["sha256"] for get in stage.said("get")}


def test_a_device_without_such_a_model_evaluates_the_one_that_stands_in(stage: DeviceStage) -> None:
    def script(*models: OwnModel) -> Script:
        yield
        yield from asked(stage, probe(stage, *models, want=frozenset({"loss"})), round_=1, exchange=0)

    stage.play(script(OwnModel(init=stage.model(9))))
    losses, _ = EngineLearner(BallastEngine(), stage.program).evaluate([stage.model(9)], stage.local.train, batch=8)
    found = answer(stage).losses
    assert found is not None
    np.testing.assert_allclose(found, losses.mean(axis=1), rtol=1e-12)


def test_a_device_without_such_a_model_and_without_another_says_so(stage: DeviceStage) -> None:
    stage.play_turns(asked(stage, probe(stage, OwnModel(), want=frozenset({"loss"})), round_=1, exchange=0))
    assert stage.last("nack")["code"] == "no_own_model"


def test_an_own_model_that_the_disk_lost_gives_way_to_the_one_that_stands_in(stage: DeviceStage) -> None:
    task = stage.fit(upload=False)

    stage.play_turns(asked(stage, task, round_=1, exchange=0))
    folder = stage.config().state
    named = json.loads((folder / "state.json").read_bytes())["own"]["r1/main"][0]
    (folder / "kept" / named).write_bytes(b"rot")
    later = stage.fit(start=OWN_MODEL, init=stage.model(4), upload=False)

    stage.play_turns(asked(stage, later, round_=2, exchange=0))
    np.testing.assert_array_equal(own_model(stage), stage.trained(stage.fit(4)))
