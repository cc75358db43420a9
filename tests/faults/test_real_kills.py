"""SIGKILL to real processes over a real mosquitto, as soon as something was heard: no bit of the outcome changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.transport.base import Message
from tests.support.live_federation import BALLAST, DEVICES, ROUNDS, nth, scene
from tests.support.tcp_proxy import breaking_proxy
from tests.support.virtual_federation import TOPICS, Federation

pytestmark = pytest.mark.broker

MOST_SCENES = 3  # a busy machine may hear of the moment when the last round is over
MOMENTS = {  # (kind of the topic, which of them, kind of the message)
    "a task goes out": ("t", 1, "task"),
    "a download is under way": ("b", 20, ""),
    "an upload is under way": ("in", 40, ""),
    "an update is acknowledged": ("t", 2, "ack"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """The same training in virtual time."""
    return Federation.of(tmp_path_factory.mktemp("undisturbed"), ballast=BALLAST, devices=DEVICES).play()


@pytest.mark.parametrize(
    ("victims", "moment", "persistent"),
    [
        ("coordinator", "a task goes out", False),
        ("coordinator", "a download is under way", False),
        ("coordinator", "an upload is under way", False),
        ("coordinator", "an update is acknowledged", False),
        ("broker", "an upload is under way", False),
        ("broker", "an upload is under way", True),
        ("broker", "an update is acknowledged", True),
        ("broker coordinator", "an upload is under way", False),
        ("coordinator broker", "an update is acknowledged", True),
        ("devices", "an upload is under way", False),
        ("devices coordinator broker", "an upload is under way", False),
    ],
)
def test_whoever_is_killed_in_the_middle_of_a_round_it_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: Federation, victims: str, moment: str, *, persistent: bool
) -> None:
    kind, count, says = MOMENTS[moment]
    for scene_number in range(MOST_SCENES):
        (folder := tmp_path / str(scene_number)).mkdir()
        with scene(folder, persistent=persistent) as (here, spy):
            here.start("coordinator")
            here.start("devices")
            here.listen_until(spy, nth(kind, count, says=says))
            for victim in victims.split():
                here.kill(victim)
            if len(here.rounds()) == ROUNDS:
                continue
            for victim in sorted(victims.split()):  # the broker first: a coordinator does not start without one
                here.start(victim)
            here.listen_until(spy, nth("cat", 1))
        assert here.outcome() == undisturbed.outcome()
        return
    pytest.fail(f"each of {MOST_SCENES} runs was over before {victims} could be killed")


def test_links_that_break_in_the_middle_of_a_block_go_on_where_they_were(
    tmp_path: Path, undisturbed: Federation
) -> None:
    """Twelve connections end after 50,001 bytes of a round's 130,000 in either direction."""
    with scene(tmp_path) as (here, spy), breaking_proxy(here.port, cuts=12, bytes_each=50_001) as broken:
        here.detour = broken.url
        here.start("coordinator")
        here.start("devices")
        here.listen_until(spy, nth("cat", 1))
        assert broken.made > 12
    assert here.outcome() == undisturbed.outcome()


SUMMED: dict[str, Any] = {"local-steps": 3, "batch-size": 8, "secure": "updates", "secure-clip": 10.0}
MASKED: dict[str, Any] = {
    "devices": 6,
    "ballast": 4_096,
    "run": {"method": "fedavg", "rounds": ROUNDS, "name": "fesem", "settings": SUMMED},
}


@pytest.mark.parametrize(
    "victim",
    ["coordinator", pytest.param("devices", marks=pytest.mark.slow), pytest.param("broker", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("same_rounding")
def test_masked_sums_end_with_the_same_bits_whoever_is_killed_among_their_stages(tmp_path: Path, victim: str) -> None:
    """One kill in each stage of the first sum."""
    (tmp_path / "virtual").mkdir()
    undisturbed = Federation.of(
        tmp_path / "virtual", ballast=MASKED["ballast"], devices=MASKED["devices"], runs=(RunConfig(**MASKED["run"]),)
    ).play()
    with scene(tmp_path, persistent=True, **MASKED) as (here, spy):
        here.start("coordinator")
        here.start("devices")
        for stage in ("shares", "add", "show"):
            here.listen_until(spy, asks_stage(stage))
            here.kill(victim)
            here.start(victim)
        here.listen_until(spy, nth("cat", 1))
    assert here.outcome() == undisturbed.outcome()


def asks_stage(stage: str) -> Callable[[Message], bool]:
    """True for a task of this stage of a sum."""

    def found(message: Message) -> bool:
        try:
            if TOPICS.parse(message.topic).kind != "t" or not message.payload:
                return False
            return bool(messages.read_message(message.payload, "t").get("stage") == stage)
        except Malformed:
            return False

    return found
