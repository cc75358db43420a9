"""`attack-drill` says which bounds held, and fails when one did not."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from coordinator import cli
from coordinator.attack_drill import drill, played_round
from coordinator.attack_drill.loopback_copy import HOSTILE
from coordinator.attack_drill.message_attacks import MESSAGE_ATTACKS
from coordinator.attack_drill.page_attacks import PAGE_ATTACKS
from coordinator.attack_drill.played_device import PlayedDevice
from coordinator.attack_drill.played_round import PlayedRound
from coordinator.attack_drill.round_attacks import ROUND_ATTACKS
from coordinator.attack_drill.sum_attacks import SUM_ATTACKS
from coordinator.attack_drill.transfer_attacks import TRANSFER_ATTACKS
from coordinator.rounds import secure_recovery
from coordinator.rounds.exchange_rules import CREDIT_IDLE_S, OpenExchange
from coordinator.rounds.update_validation import AskedStage
from edge_client.protocol.secure import device_stages, device_sums
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.sum_messages import MAX_SUM_MESSAGE_BYTES, UPLOAD_HEADER, DealtShares
from edge_client.protocol.task import Reply

ON_A_DEVICE = ("ask a device for both kinds of share", "send a device an old roster", "use a device's prekey twice")
Only = Callable[..., None]  # of what is tried
IN_ROUNDS = (*ROUND_ATTACKS, *TRANSFER_ATTACKS)
ALL = (*MESSAGE_ATTACKS, *PAGE_ATTACKS, *IN_ROUNDS, *SUM_ATTACKS)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Only:
    """Lets the drill play these attacks only."""

    def choose(*tried: str) -> None:
        for name in ("MESSAGE_ATTACKS", "PAGE_ATTACKS", "ROUND_ATTACKS", "TRANSFER_ATTACKS", "SUM_ATTACKS"):
            monkeypatch.setattr(drill, name, [a for a in getattr(drill, name) if a.tried in tried])

    return choose


def names(attacks: Sequence[Any]) -> list[str]:
    return [attack.tried for attack in attacks]


def play(*arguments: str) -> tuple[list[tuple[str, bool | None]], int]:
    """-> each attack and whether its bound held, and the exit code."""
    found = CliRunner().invoke(cli.app, ["attack-drill", "--json", *arguments])
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    return [(line["tried"], line["held"]) for line in lines], found.exit_code


@pytest.mark.broker
@pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # paho leaves a failed handshake's socket
def test_every_bound_holds_on_a_copy_of_what_is_provisioned() -> None:
    assert play() == ([(tried, True) for tried in names(ALL)], 0)


@pytest.mark.broker
def test_a_bound_that_does_not_hold_is_named_and_is_an_error(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    """Its access list gives every device every right."""
    monkeypatch.setattr("coordinator.identity.revocation.broker_acl.mosquitto_acl", lambda *_: "pattern readwrite #\n")
    wanted = ("write to topics of others", "wills on topics of others")
    only(*wanted)
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert [f"BROKEN  {tried}" in found.stdout for tried in wanted] == [True, True]
    assert "0 of 2 bounds held" in found.stdout
    assert found.exit_code == 1


@pytest.mark.broker
def test_messages_without_a_pace_are_named(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    monkeypatch.setattr("coordinator.runtime.catalog_server.CatalogServer._is_in_time", lambda *_: True)
    monkeypatch.setattr("coordinator.runtime.catalog_server.NEWS_BURST", 2_000.0)
    monkeypatch.setattr("coordinator.runtime.dispatcher.REQUESTS_PER_S", 200.0)  # of all kinds: else few get through
    wanted = ("2,000 reports of a center", "2,000 questions for a center")
    only(*wanted)
    assert play()[0] == [(tried, False) for tried in wanted]


@pytest.mark.broker
def test_each_bound_of_a_page_that_is_taken_away_is_named(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    async def unpacked(request: Request, *_: object) -> object:
        body = await request.body()
        return json.loads(gzip.decompress(body) if body[:1] == b"\x1f" else body)

    any_file = SimpleNamespace(path=lambda _: Path(__file__), entries=list)
    monkeypatch.setattr("coordinator.dashboard.server.MAX_CONNECTIONS_PER_ADDRESS", 512)
    monkeypatch.setattr("coordinator.identity.enrolment_server.MAX_OPEN_REQUESTS_PER_ADDRESS", 32)
    monkeypatch.setattr("coordinator.dashboard.access.AccessControl.refuse", lambda *_: None)
    monkeypatch.setattr("coordinator.dashboard.app.read_json", unpacked)
    monkeypatch.setattr("coordinator.dashboard.side_panels.SidePanels.files", lambda _: any_file)
    only(*names(PAGE_ATTACKS))
    assert play()[0] == [(tried, False) for tried in names(PAGE_ATTACKS)]


@pytest.mark.broker
def test_each_bound_of_an_answer_that_is_taken_away_is_named(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    validation = "coordinator.rounds.update_validation"
    monkeypatch.setattr("coordinator.runtime.exchange.task_messages.max_samples", lambda *_: 2**40)
    monkeypatch.setattr(f"{validation}._check_shape", lambda *_: None)
    monkeypatch.setattr(f"{validation}.bounded_buffers", lambda update, *_: update)
    monkeypatch.setattr(f"{validation}.update_moves", lambda *_: {})
    told = OpenExchange.status
    monkeypatch.setattr(OpenExchange, "status", lambda *a: told(*a).replace("superseded", "dup"))
    only(*names(ROUND_ATTACKS))
    assert play()[0] == [(tried, False) for tried in names(ROUND_ATTACKS)]


@pytest.mark.broker
def test_each_bound_of_a_transfer_that_is_taken_away_is_named(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    exchange, counted = "coordinator.runtime.exchange", itertools.count()
    monkeypatch.setattr(f"{exchange}.uploads.OpenUploads.blocks", lambda *_: next(counted))  # each block looks new
    monkeypatch.setattr("edge_client.transport.blobs.BlobFolder.drop_partials", lambda *_, **__: None)
    monkeypatch.setattr("coordinator.attack_drill.transfer_attacks.HUGE", 1 << 22)
    monkeypatch.setattr(f"{exchange}.task_messages.SIZE_SLACK_BYTES", 1 << 30)
    monkeypatch.setattr(f"{exchange}.task_messages.max_reply_bytes", lambda *_: 1 << 30)
    monkeypatch.setattr("coordinator.runtime.arrival_marks.ArrivalMarks.may_send", lambda *_: True)
    monkeypatch.setattr(f"{exchange}.live_exchange.silent_devices", lambda *_: frozenset())
    only(*names(TRANSFER_ATTACKS))
    assert play()[0] == [(tried, False) for tried in names(TRANSFER_ATTACKS)]


@pytest.mark.broker
def test_the_copy_has_a_users_own_model_method_and_limits(tmp_path: Path, only: Only) -> None:
    """Its small model travels in one block, and its program is compiled, which takes seconds."""
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "mine"\nbroker = "mqtts://broker.example"\nfolder = "run"\nmax-samples-ratio = 3\n'
        'model = { name = "linear-regression" }\nruns = [{ method = "fesem", num-rounds = 9, clusters = 2 }]\n'
    )
    only("answer with 2^31 samples", "hold the only credit with one block", "be on and say nothing")
    found = CliRunner().invoke(cli.app, ["attack-drill", str(path)])
    assert found.exit_code == 0
    assert "compiling model linear-regression" in found.stderr
    assert "weighs 120 samples" in found.stdout  # three times the others' 40
    assert "3 of 3 bounds held" in found.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.broker
def test_of_a_run_without_rounds_the_copy_has_rounds(tmp_path: Path, only: Only) -> None:
    """What bounds a round was called broken where none was played."""
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "mine"\nbroker = "mqtts://broker.example"\nfolder = "run"\nconcurrency = 4\nbuffer = 2\n'
        'max-staleness = 9\nmodel = { name = "linear-regression" }\nruns = [{ method = "fedavg", num-rounds = 9 }]\n'
    )
    only("answer with 2^31 samples")
    assert play(str(path)) == ([("answer with 2^31 samples", True)], 0)


@pytest.mark.broker
def test_a_round_whose_honest_devices_never_answer_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, only: Only
) -> None:
    """The drill waited for the round's deadline."""
    monkeypatch.setattr(played_round, "TASK_PATIENCE_S", 1.0)
    monkeypatch.setattr(played_round.PlayedRound, "_live", lambda *_: None)
    only("answer with 2^31 samples")
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert "BROKEN  answer with 2^31 samples\n        the others do not answer; bound:" in found.stdout
    assert found.exit_code == 1


@pytest.mark.broker
def test_honest_devices_that_the_machine_delays_keep_their_turns(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    """The drill set the clock past the life of a credit before the device that held it had sent its blocks."""
    passes, sent, moved, passed_s = PlayedRound.pass_time, PlayedDevice.send, threading.Condition(), [0.0]

    def pass_time(played: PlayedRound, seconds: float) -> None:
        passes(played, seconds)
        with moved:
            passed_s[0] += seconds
            moved.notify_all()

    def send(device: PlayedDevice, go: dict[str, Any], *indices: int) -> None:
        with moved:
            over_s = passed_s[0] + CREDIT_IDLE_S
            moved.wait_for(lambda: device.name == HOSTILE or passed_s[0] >= over_s, 0.5)
        sent(device, go, *indices)

    monkeypatch.setattr(PlayedRound, "pass_time", pass_time)
    monkeypatch.setattr(PlayedDevice, "send", send)
    only("hold the only credit with one block")
    assert play() == ([("hold the only credit with one block", True)], 0)


@pytest.mark.broker
def test_each_bound_of_a_masked_sum_that_is_taken_away_is_named(monkeypatch: pytest.MonkeyPatch, only: Only) -> None:
    masked, summed = "coordinator.runtime.exchange.masked_sums", "coordinator.rounds.secure_sum"
    lenient = lambda *_: DealtShares.from_bytes(_[-1])  # noqa: E731 - used twice
    missing = secure_recovery.missing_shares

    def offer(newest: int) -> AskedStage:
        return AskedStage(stage="prekeys", after=newest, decode=lambda _: Reply(n=1), max_bytes=MAX_SUM_MESSAGE_BYTES)

    def none_may_drop_out(*args: Any, **sets: Any) -> Iterator[str]:  # noqa: ANN401
        return iter(sets["dropped"]) if sets["dropped"] else missing(*args, **sets)

    monkeypatch.setattr(f"{masked}.why_impossible", lambda *_: None)
    monkeypatch.setattr(f"{summed}.checked_reveal", lambda *_, **__: True)
    monkeypatch.setattr(f"{masked}.checked_shares", lenient)
    monkeypatch.setattr(f"{summed}.checked_shares", lenient)
    monkeypatch.setattr(f"{masked}.read_upload", lambda data, **_: data[UPLOAD_HEADER.size :])
    monkeypatch.setattr(f"{masked}._offer", offer)
    monkeypatch.setattr(f"{summed}.missing_shares", none_may_drop_out)
    wanted = [tried for tried in names(SUM_ATTACKS) if tried not in ON_A_DEVICE]
    only(*wanted)
    assert play()[0] == [(tried, False) for tried in wanted]


@pytest.mark.broker
def test_each_bound_of_a_device_in_a_masked_sum_that_is_taken_away_is_named(
    monkeypatch: pytest.MonkeyPatch, only: Only
) -> None:
    kept, shown = device_sums.on_roster, device_stages.show

    def keeps_its_root(state: DeviceSums, roster: bytes) -> tuple[DeviceSums, bytes]:
        after, dealt = kept(state, roster)
        return replace(after, roots=state.roots), dealt

    def forgets_what_it_showed(state: DeviceSums, message: bytes, key: device_stages.Place) -> tuple[DeviceSums, bytes]:
        _, answer = shown(state, message, key)
        return state, answer

    monkeypatch.setattr(device_sums, "on_roster", keeps_its_root)
    monkeypatch.setattr(device_stages, "show", forgets_what_it_showed)
    only(*ON_A_DEVICE)
    assert play()[0] == [(tried, False) for tried in ON_A_DEVICE]


@pytest.mark.broker
@pytest.mark.parametrize(("method", "secure"), [("fesem", "updates"), ("ifca", "updates+membership")])
def test_of_a_run_on_masked_sums_those_are_attacked_and_single_updates_are_not(
    tmp_path: Path, only: Only, method: str, secure: str
) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "mine"\nbroker = "mqtts://broker.example"\nfolder = "run"\n'
        '[model]\nname = "linear-regression"\n'
        f'[[runs]]\nmethod = "{method}"\nname = "sums"\nnum-rounds = 9\nclusters = 2\nsecure = "{secure}"\n'
        "least-members = 20\n"
    )
    in_sums = ["add masked words of garbage", "show shares that lie", "deal shares and never upload"]
    only("announce 2^40 samples", *names(IN_ROUNDS), *in_sums)
    untried = [(tried, None) for tried in names(IN_ROUNDS)]
    assert play(str(path)) == ([("announce 2^40 samples", True), *untried, *((tried, True) for tried in in_sums)], 0)


@pytest.mark.broker
def test_of_a_run_in_the_clear_no_bound_of_sums_is_said_to_hold(tmp_path: Path, only: Only) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "mine"\nbroker = "mqtts://broker.example"\nfolder = "run"\n'
        'model = { name = "linear-regression" }\nruns = [{ method = "fedavg", num-rounds = 9 }]\n'
    )
    only("announce 2^40 samples", *names(SUM_ATTACKS))
    found = CliRunner().invoke(cli.app, ["attack-drill", str(path)])
    assert (found.exit_code, f"1 of 1 bounds held, {len(SUM_ATTACKS)} attacks had no aim" in found.stdout) == (0, True)
    assert "this run makes no masked sums" in found.stdout


def test_without_mosquitto_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "find_mosquitto", lambda: None)
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert found.exit_code == 3
    assert "apt install mosquitto" in found.stderr
