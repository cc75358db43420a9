"""Tries to steer others with made-up losses: their choice of a center, the fleet's mean, the guide of newcomers."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.nearest.learn_from_replies import learn_from_replies, limits_from_tests
from coordinator.rounds.metrics import make_report
from coordinator.rounds.update_validation import ReplySpec, decode_reply
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.nearest.answer_moments import AnswerLook, AnswerMoments, answer_moments
from edge_client.protocol.nearest.input_moments import InputMoments, moments_of
from edge_client.protocol.nearest.router_file import read_router, write_router
from edge_client.protocol.task import Probe, Reply
from tests.support.virtual_federation import Federation, Spy, program

LIAR, HONEST = "d03", ("d00", "d01", "d02")
CLASSES = program().classes


def losses_of(rdy: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = codecs.decode_stats(base64.b64decode(rdy["update"]["inline"]), program().schema, rdy["n"]).losses
    assert found is not None
    return found


@pytest.mark.parametrize("lie", [(1e308, 1e308), (-1e308, 1e308), (0.0, 0.0), (5e-324, 0.0)])
def test_with_ifca_every_honest_device_trains_the_center_that_fits_itself(
    tmp_path: Path, lie: tuple[float, float]
) -> None:
    run = RunConfig(method="ifca", rounds=2, name="run", settings={"clusters": 2, "local-steps": 2, "batch-size": 8})
    fed = Federation.of(tmp_path, runs=(run,), quorum=0.5, deadline_s=20.0)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_mute_device(LIAR)
    fed.start_devices(len(HONEST))
    answered: set[str] = set()

    def lied() -> bool:
        for task in spy.said("task", cid=LIAR):
            if task["job"] == "probe" and task.get("split") != "test" and task["id"] not in answered:
                answered.add(task["id"])
                data = codecs.encode_stats(Reply(n=40, losses=np.array(lie)), program().schema)
                key = {name: task[name] for name in ("run", "round", "exchange")}
                update = manifest_of(data, "stats", inline=True)
                spy.say(LIAR, "rdy", **key, attempt=0, n=40, what="stats", update=update, seconds=1.0)
        return fed.catalog is not None

    fed.world.run(lied)
    fed.world.end()
    assert {"ok"} == {ack["status"] for ack in spy.said("ack", cid=LIAR)}
    chosen = {(t["round"], c): t["center"] for c in HONEST for t in spy.said("task", cid=c) if "center" in t}
    told = {
        (rdy["round"], c): int(losses_of(rdy).argmin())
        for c in HONEST
        for rdy in spy.said("rdy", cid=c)
        if (rdy["what"], rdy["exchange"]) == ("stats", chosen_from(spy, c, rdy["round"]))
    }
    assert len(chosen) == 2 * len(HONEST)
    assert chosen == told
    assert np.isfinite(fed.final_state("run").centers).all()
    json.dumps(fed.rounds(), allow_nan=False)


def chosen_from(spy: Spy, cid: str, number: int) -> int:
    """The exchange of a round before the one with the device's fit."""
    return min(int(t["exchange"]) for t in spy.said("task", cid=cid) if "center" in t and t["round"] == number) - 1


@pytest.mark.parametrize("lie", [1e29, -1e29, 1e300, 7e3])
def test_one_devices_loss_moves_the_fleets_mean_by_no_more_than_ten_times_that_of_guessing(lie: float) -> None:
    right = np.eye(CLASSES, dtype=np.int64)
    confusions = {f"d{i}": right for i in range(10)}
    honest = dict.fromkeys(confusions, 0.5)
    lied = make_report(confusions, {}, n_centers=1, losses=honest | {"d0": lie}).loss
    assert lied.micro is not None
    assert abs(lied.micro - 0.5) <= 10 * math.log(CLASSES) / len(confusions)


def guide(last: float) -> Any:  # noqa: ANN401 - the router
    """Learned from nine devices whose losses are about 0.4, and one more."""
    own = [0.36, 0.38, 0.4, 0.42, 0.44, 0.37, 0.39, 0.41, 0.43, last]
    replies = {f"d{i}": Reply(n=50, losses=np.array([loss, loss + 1.0])) for i, loss in enumerate(own)}
    return learn_from_replies(replies, dict.fromkeys(replies, 0), centers=2, round=None)


@pytest.mark.parametrize("lie", [0.0, 1e-300, 1e308, -1e308])
def test_a_loss_that_a_device_made_up_neither_turns_newcomers_away_nor_sends_them_to_another_center(lie: float) -> None:
    for losses, center in (([0.4, 1.4], 0), ([1.4, 0.4], 1)):
        told = guide(lie).predict("loss", {"loss": np.array(losses)}, 50)
        assert int(np.argmax(told.probabilities)) == center
        assert told.fit != "none"


@pytest.mark.parametrize("devices", [4, 6, 10, 20, 21])
@pytest.mark.parametrize("lie", [1e308, 10.0, 3.0])
def test_a_tenth_of_the_devices_with_made_up_losses_and_entropies_send_no_newcomer_to_another_center(
    devices: int, lie: float
) -> None:
    """They fit the center that they are on the worst, and all others best. Entropies of honest devices tell little."""
    rng, replies, assignment = np.random.default_rng(0), {}, {}
    scores = answer_moments(rng.normal(size=(50, CLASSES)))
    for device in range(devices):
        own = np.arange(2) == device % 2
        loss, entropy = np.where(own, 0.4, 1.4), np.where(own, 0.3, 0.5)
        loss, entropy = loss + 0.05 * rng.random(2), entropy + 0.05 * rng.random(2)
        if device >= devices - max(1, devices // 10):
            loss, entropy = np.where(own, lie, 0.0), np.where(own, math.log(CLASSES), 0.0)
        answers = [AnswerLook(entropy=one, train=scores, test=scores).to_vector() for one in entropy.tolist()]
        replies[f"d{device:02}"] = Reply(n=50, losses=loss, answers=np.stack(answers))
        assignment[f"d{device:02}"] = device % 2
    router = read_router(write_router(learn_from_replies(replies, assignment, centers=2, round=None)))
    for own in range(2):
        here = np.arange(2) == own
        told = {"loss": np.where(here, 0.4, 1.4), "entropy": np.where(here, 0.3, 0.5)}
        for way in ("loss", "entropy", "labelled"):
            found = router.predict(way, told, 50)
            assert found.best == own, way
            assert found.fit != "none"
        against = told | {"entropy": np.where(here, 0.33, 0.3)}  # what labels say counts for more
        assert router.predict("labelled", against, 50).best == own


@pytest.mark.parametrize("lie", [1e308, 1e5])
def test_a_made_up_loss_of_targets_that_are_no_classes_makes_no_guide_that_takes_any_device(lie: float) -> None:
    honest = dict(zip("abcdefghi", (0.36, 0.38, 0.4, 0.42, 0.44, 0.37, 0.39, 0.41, 0.43), strict=True))
    tested = limits_from_tests(honest | {"j": lie}, samples=50, centers=2)
    replies = {c: Reply(n=50, losses=np.array([loss, 2 * loss])) for c, loss in (honest | {"j": lie}).items()}
    taught = learn_from_replies(replies, dict.fromkeys(replies, 0), centers=2, round=None)
    for router in (tested, taught):
        assert router.fits({"loss": 50.0}, 50) == {"loss": "none"}


@pytest.mark.parametrize("lie", [9.9e6, 1e6, 1e3])
def test_inputs_that_a_device_made_up_leave_the_guide_readable_and_its_limits_as_they_were(lie: float) -> None:
    """The means and squares are those of samples that could be; one feature of the honest ones hardly varies."""
    rng = np.random.default_rng(0)
    honest = {f"d{i:02}": moments_of(rng.normal(size=(40, 4)) * [1, 1, 1, 1e-3]) for i in range(12)}
    first, second = np.zeros_like(honest["d00"].first), np.zeros_like(honest["d00"].second)
    first[3], second[3, 3] = 40 * lie, 40 * lie**2
    limits = []
    for told in (honest, honest | {"d12": InputMoments(n=40, first=first, second=second)}):
        replies = {c: Reply(n=10, losses=np.array([0.4, 1.0]), inputs=m.to_vector()) for c, m in told.items()}
        router = learn_from_replies(replies, dict.fromkeys(replies, 0), centers=2, round=None)
        usual = read_router(write_router(router)).usual["inputs"]
        limits.append([float(usual.well[0]), float(usual.none[0]), float(usual.spread[0])])
    assert limits[0] == limits[1]


def test_answers_that_no_samples_have_once_they_are_cut_to_those_that_count_leave_the_others_their_guide() -> None:
    """A count next to nothing became nothing, beside a sum that did not; then no device's guide was learned at all."""
    rng = np.random.default_rng(0)
    scores = [answer_moments(rng.normal(size=(40, CLASSES))) for _ in range(2)]
    honest = np.stack([AnswerLook(entropy=0.5, train=one, test=one).to_vector() for one in scores])
    counts, first, zero = np.full(CLASSES, 2.0**30), np.zeros((CLASSES, CLASSES)), np.zeros((CLASSES, CLASSES))
    counts[0], first[0, 0] = 5e-324, 1e-300
    made_up = AnswerMoments(counts=counts, first=first, second=zero)
    lie = np.stack([AnswerLook(entropy=0.0, train=made_up, test=made_up).to_vector()] * 2)
    schema, want = program().schema, frozenset({"loss", "answers"})
    models = [np.zeros(schema.size, np.float32)] * 2
    asked = ReplySpec(
        task=Probe(models=models, want=want, split="test", batch=8, seed=0), schema=schema, samples=40, codec="f32",
        base="", base_vector=None, max_update_rms=10.0, max_samples=400, classes=CLASSES,
    )  # fmt: skip
    replies = {}
    for device in range(6):
        said = Reply(n=40, losses=np.array([0.4, 1.4 + device]), answers=honest if device else lie)
        replies[f"d{device}"] = decode_reply(asked, codecs.encode_stats(said, schema), said.n)
    router = learn_from_replies(replies, dict.fromkeys(replies, 0), centers=2, round=None)
    assert {"loss", "entropy", "labelled"} <= read_router(write_router(router)).ways.keys()
    assert router.answers is not None
