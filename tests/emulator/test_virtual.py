from __future__ import annotations

import numpy as np
import pytest

from edge_client.dataset import Local
from edge_client.errors import Malformed
from edge_client.protocol.task import OWN, Fit, OwnModel, Probe, Task
from emulator.devices import PROFILES, Profile
from emulator.virtual import STATS_BYTES, VirtualNetwork, f32_delta, reply_bytes
from tests.softmax import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(3, 1)
W = start_of()
TASK = Fit(start=W, steps=5, lr=0.1, batch=8, seed=0)
PROBE = Probe(models=[W], want=frozenset({"confusion"}), batch=8, seed=0, split="test")


def network(
    profile: Profile = PROFILES[0], *, deadline_s: float = 600.0, local: dict[str, Local] = LOCAL
) -> VirtualNetwork:
    return VirtualNetwork(devices_of(local), dict.fromkeys(local, profile), deadline_s=deadline_s)


def test_everybody_answers_as_they_would_alone_and_time_passes() -> None:
    net = network()
    replies = net.ask(dict.fromkeys(LOCAL, TASK))
    assert list(replies) == sorted(LOCAL)
    for c in LOCAL:
        np.testing.assert_array_equal(replies[c].update, devices_of(LOCAL).answer(c, TASK).update)
    board, size = PROFILES[0], 4 * W.size
    # The update is small enough to travel inside its message.
    assert net.now_s == pytest.approx(board.down_s(size) + 5 * board.step_s + board.up_s(size))
    assert (net.bytes_down, net.bytes_up) == (3 * size, 3 * size)


def test_who_misses_the_deadline_is_missing_from_the_replies() -> None:
    slow = Profile(name="slow", step_s=100.0, evaluate_s=1, down_bytes_s=1e6, up_bytes_s=1e6, latency_s=0)
    net = VirtualNetwork(devices_of(LOCAL), {**dict.fromkeys(LOCAL, PROFILES[0]), "d01": slow}, deadline_s=60.0)
    assert list(net.ask(dict.fromkeys(LOCAL, TASK))) == ["d00", "d02"]
    assert net.now_s == 60.0
    assert list(net.ask(dict.fromkeys(LOCAL, PROBE))) == sorted(LOCAL)


def test_a_refusal_is_an_answer_so_nobody_waits_for_it() -> None:
    net = network(local={**LOCAL, "d09": Local(train=LOCAL["d00"].train)})
    assert list(net.ask({**dict.fromkeys(LOCAL, PROBE), "d09": PROBE})) == sorted(LOCAL)
    assert net.now_s < 60.0


def test_asking_nobody_takes_no_time() -> None:
    net = network()
    assert net.ask({}) == {}
    assert net.now_s == 0.0


def test_a_devices_own_model_is_kept_by_slot() -> None:
    devices = devices_of(LOCAL)
    first = devices.answer("d00", TASK)
    resumed = devices.answer("d00", Fit(start=OWN, init=W, steps=1, lr=0.0, batch=8, seed=0))
    fresh = devices.answer("d00", Fit(start=OWN, init=W, steps=1, lr=0.0, batch=8, seed=0, slot="other"))
    np.testing.assert_array_equal(resumed.update, first.update)
    np.testing.assert_array_equal(fresh.update, W)


def test_updates_are_rounded_as_float32_differences_are() -> None:
    task = Fit(start=np.array([1.0, 1e8], np.float32), steps=1, lr=0.1, batch=8, seed=0)
    arrived = f32_delta(task, np.array([1.0 + 1e-9, 0.1]))
    assert arrived.dtype == np.dtype(np.float32)
    assert arrived.tolist() == [1.0, 0.0]  # the difference 0.1 - 1e8 rounds to -1e8


def test_an_anchor_that_is_the_start_travels_once() -> None:
    devices = devices_of(LOCAL)

    def models(task: Task) -> int:
        return len(devices.fetched("d00", task))

    assert models(Fit(start=W, anchor=W, mu=0.1, steps=1, lr=0.1, batch=8, seed=0)) == 1
    assert models(Fit(start=W, anchor=W + 1, mu=0.1, steps=1, lr=0.1, batch=8, seed=0)) == 2
    assert models(PROBE) == 1
    assert reply_bytes(devices.answer("d00", TASK)) == 4 * W.size


def test_a_device_with_a_model_of_its_own_downloads_none_to_stand_in() -> None:
    devices = devices_of(LOCAL)
    fit = Fit(start=OWN, init=W, steps=1, lr=0.1, batch=8, seed=0)
    probe = Probe(models=[OwnModel(init=W)], want=frozenset({"loss"}), batch=8, seed=0)
    assert [len(devices.fetched("d00", task)) for task in (fit, probe)] == [1, 1]
    first = devices.answer("d00", probe).losses
    own = np.asarray(devices.answer("d00", fit).update)
    assert [len(devices.fetched("d00", task)) for task in (fit, probe)] == [0, 0]
    again = devices.answer("d00", probe).losses
    direct = devices.answer("d00", Probe(models=[W, own], want=frozenset({"loss"}), batch=8, seed=0)).losses
    np.testing.assert_array_equal(np.concatenate([first, again]), direct)


def test_what_is_not_uploaded_costs_a_message_and_answers_the_loss() -> None:
    net = network()
    replies = net.ask(dict.fromkeys(LOCAL, Fit(start=OWN, init=W, steps=1, lr=0.1, batch=8, seed=0, upload=False)))
    assert net.bytes_up == 3 * STATS_BYTES
    assert all(reply.update is None and reply.losses is not None for reply in replies.values())


def test_responsibilities_stay_until_the_round_is_over() -> None:
    devices = devices_of(LOCAL)
    net = VirtualNetwork(devices, dict.fromkeys(LOCAL, PROFILES[0]))
    probe = Probe(models=[W, W + 1], want=frozenset({"posterior"}), batch=8, seed=0)
    fit = Fit(start=W, steps=1, lr=0.1, batch=8, seed=0, rows="posterior:1")
    net.open_round(1)
    net.ask(dict.fromkeys(LOCAL, probe))
    assert len(net.ask(dict.fromkeys(LOCAL, fit))) == 3
    net.open_round(2)
    assert net.ask(dict.fromkeys(LOCAL, fit)) == {}
    with pytest.raises(Malformed) as refused:
        devices.answer("d00", fit)
    assert refused.value.code == "no_posterior"


def test_large_updates_queue_for_credits_and_all_arrive() -> None:
    many = grouped_fleet(40, 1, n=4)
    many_devices = devices_of(many)
    big = Profile(name="big", step_s=0.0, evaluate_s=0.0, down_bytes_s=1e9, up_bytes_s=10.0, latency_s=0.0)
    net = VirtualNetwork(many_devices, dict.fromkeys(many, big), inline_bytes=0)
    assert len(net.ask(dict.fromkeys(many, TASK))) == 40
    # 32 credits: the last eight upload after the first 32 have finished.
    assert net.now_s == pytest.approx(2 * 4 * W.size / 10.0, rel=1e-3)
    # Each upload takes more than the 8 s after which it is told to go on; it is still sent once only.
    assert net.bytes_up == 40 * 4 * W.size
