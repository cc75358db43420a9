from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.strategies.base import Exchange
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.task import OWN_MODEL, Fit, OwnModel, Probe, Task
from emulator.simulation.codec_channel import STATISTICS_BYTES, channel_factory, reply_bytes
from emulator.simulation.device_profiles import DEVICE_PROFILES, DeviceProfile
from emulator.simulation.emulated_devices import round_through_f32_delta
from emulator.simulation.virtual_network import VirtualNetwork
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

LOCAL = grouped_fleet(3, 1)
W = start_of()
TASK = Fit(start=W, steps=5, lr=0.1, batch=8, seed=0)
PROBE = Probe(models=[W], want=frozenset({"confusion"}), batch=8, seed=0, split="test")


def network(
    profile: DeviceProfile = DEVICE_PROFILES[0], *, deadline_s: float = 600.0, local: dict[str, DeviceData] = LOCAL
) -> VirtualNetwork:
    return VirtualNetwork(devices_of(local), dict.fromkeys(local, profile), deadline_s=deadline_s)


def test_everybody_answers_as_they_would_alone_and_time_passes() -> None:
    net = network()
    replies = net.ask(dict.fromkeys(LOCAL, TASK))
    assert list(replies) == sorted(LOCAL)
    for c in LOCAL:
        np.testing.assert_array_equal(replies[c].update, devices_of(LOCAL).answer(c, TASK).update)
    board, size = DEVICE_PROFILES[0], 4 * W.size
    # The update is small enough to travel inside its message.
    assert net.now_s == pytest.approx(board.down_s(size) + 5 * board.step_s + board.up_s(size))
    assert (net.bytes_down, net.bytes_up) == (3 * size, 3 * size)


def test_who_misses_the_deadline_is_missing_from_the_replies() -> None:
    slow = DeviceProfile(name="slow", step_s=100.0, evaluate_s=1, down_bytes_s=1e6, up_bytes_s=1e6, latency_s=0)
    net = VirtualNetwork(devices_of(LOCAL), {**dict.fromkeys(LOCAL, DEVICE_PROFILES[0]), "d01": slow}, deadline_s=60.0)
    assert list(net.ask(dict.fromkeys(LOCAL, TASK))) == ["d00", "d02"]
    assert net.now_s == 60.0
    assert list(net.ask(dict.fromkeys(LOCAL, PROBE))) == sorted(LOCAL)


def test_what_an_update_that_came_too_late_lost_is_not_kept_by_a_later_answer(tmp_path: Path) -> None:
    far = replace(DEVICE_PROFILES[0], step_s=1.0, latency_s=3.0)
    profiles = {**dict.fromkeys(LOCAL, DEVICE_PROFILES[0]), "d01": far}
    channel = channel_factory("i8")(devices_of(LOCAL).program.schema)
    net = VirtualNetwork(devices_of(LOCAL), profiles, deadline_s=10.0, channel=channel)
    assert list(net.ask(dict.fromkeys(LOCAL, TASK))) == ["d00", "d02"]
    assert list(net.ask(dict.fromkeys(LOCAL, PROBE))) == sorted(LOCAL)
    assert [who for who, _, _ in channel.keep(tmp_path)] == ["d00", "d02"]


def test_a_refusal_is_an_answer_so_nobody_waits_for_it() -> None:
    net = network(local={**LOCAL, "d09": DeviceData(train=LOCAL["d00"].train)})
    assert list(net.ask({**dict.fromkeys(LOCAL, PROBE), "d09": PROBE})) == sorted(LOCAL)
    assert net.now_s < 60.0


def test_asking_nobody_takes_no_time() -> None:
    net = network()
    assert net.ask({}) == {}
    assert net.now_s == 0.0


def test_a_devices_own_model_is_kept_by_slot() -> None:
    devices = devices_of(LOCAL)
    first = devices.answer("d00", TASK)
    resumed = devices.answer("d00", Fit(start=OWN_MODEL, init=W, steps=1, lr=0.0, batch=8, seed=0))
    fresh = devices.answer("d00", Fit(start=OWN_MODEL, init=W, steps=1, lr=0.0, batch=8, seed=0, slot="other"))
    np.testing.assert_array_equal(resumed.update, first.update)
    np.testing.assert_array_equal(fresh.update, W)


def test_updates_are_rounded_as_float32_differences_are() -> None:
    task = Fit(start=np.array([1.0, 1e8], np.float32), steps=1, lr=0.1, batch=8, seed=0)
    arrived = round_through_f32_delta(task, np.array([1.0 + 1e-9, 0.1]))
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
    fit = Fit(start=OWN_MODEL, init=W, steps=1, lr=0.1, batch=8, seed=0)
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
    replies = net.ask(
        dict.fromkeys(LOCAL, Fit(start=OWN_MODEL, init=W, steps=1, lr=0.1, batch=8, seed=0, upload=False))
    )
    assert net.bytes_up == 3 * STATISTICS_BYTES
    assert all(reply.update is None and reply.losses is not None for reply in replies.values())


def test_responsibilities_stay_until_the_round_is_over() -> None:
    devices = devices_of(LOCAL)
    net = VirtualNetwork(devices, dict.fromkeys(LOCAL, DEVICE_PROFILES[0]))
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
    big = DeviceProfile(name="big", step_s=0.0, evaluate_s=0.0, down_bytes_s=1e9, up_bytes_s=10.0, latency_s=0.0)
    net = VirtualNetwork(many_devices, dict.fromkeys(many, big), inline_bytes=0)
    assert len(net.ask(dict.fromkeys(many, TASK))) == 40
    # 32 credits: the last eight upload after the first 32 have finished.
    assert net.now_s == pytest.approx(2 * 4 * W.size / 10.0, rel=1e-3)
    # Each upload takes more than the 8 s after which it is told to go on; it is still sent once only.
    assert net.bytes_up == 40 * 4 * W.size


# ---- who is away, who drops out, and what time does meanwhile ----

PROFILE = st.builds(
    DeviceProfile,
    name=st.just("any"),
    step_s=st.floats(0, 5),
    evaluate_s=st.floats(0, 5),
    down_bytes_s=st.floats(1, 1e6),
    up_bytes_s=st.floats(1, 1e6),
    latency_s=st.floats(0, 5),
)
UNSTEADY = st.builds(
    replace, PROFILE, availability=st.floats(0, 1), dropout=st.floats(0, 1), cycle_s=st.floats(1, 1_000)
)
NAMES = sorted(LOCAL)


class OneWay(VirtualNetwork):
    """Remembers every moment that was now."""

    @property
    def moments(self) -> list[float]:
        return self.__dict__.setdefault("_moments", [])  # type: ignore[no-any-return]  # what __setattr__ puts there

    def __setattr__(self, name: str, value: object) -> None:
        if name == "now_s" and isinstance(value, float):
            self.moments.append(value)
        super().__setattr__(name, value)


def net_of(*profiles: DeviceProfile, seed: int = 0, inline_bytes: int = 2_048) -> OneWay:
    fleet = dict(zip(NAMES, profiles, strict=True))
    return OneWay(devices_of(LOCAL), fleet, deadline_s=60.0, seed=seed, inline_bytes=inline_bytes)


def told(net: VirtualNetwork, rounds: int = 2) -> list[object]:
    """What is seen of some rounds: who answered, and when each exchange ended."""
    seen: list[object] = []
    tasks: list[Exchange] = [dict.fromkeys(LOCAL, TASK), dict.fromkeys(LOCAL, PROBE)]
    for number in range(1, rounds + 1):
        net.open_round(number)
        for exchange in tasks:
            replies = net.ask(exchange)
            seen += [list(replies), net.now_s, net.bytes_down, net.bytes_up, net.local_steps, net.answered / net.asked]
    return seen


def test_reliable_devices_take_the_time_that_they_took_before_there_were_others() -> None:
    local = grouped_fleet(40, 2, n=6)
    kinds = np.random.Generator(np.random.PCG64(5)).integers(len(DEVICE_PROFILES), size=len(local))  # any fixed mixture
    fleet = {who: DEVICE_PROFILES[kind] for who, kind in zip(local, kinds, strict=True)}
    net = VirtualNetwork(devices_of(local), fleet, inline_bytes=0, deadline_s=2.0)
    probe = Probe(models=[W], want=frozenset({"confusion"}), batch=8, seed=0, split="test")
    for number, until_s in ((1, 2.5905600000000004), (2, 5.181119999999999)):
        net.open_round(number)
        fits = {c: Fit(start=W, steps=7 + 3 * i, lr=0.1, batch=8, seed=i) for i, c in enumerate(local)}
        assert (len(net.ask(fits)), len(net.ask(dict.fromkeys(local, probe)))) == (30, 40)
        assert (net.now_s, net.bytes_down, net.bytes_up, net.local_steps) == (until_s, 7680, 43840, 1728)
        assert (net.asked, net.answered) == (80, 70)


@given(st.tuples(UNSTEADY, UNSTEADY, UNSTEADY), st.integers(0, 3), st.sampled_from([0, 2_048]))
@settings(max_examples=25)
def test_the_same_seed_gives_the_same_timeline_and_time_never_goes_back(
    profiles: tuple[DeviceProfile, ...], seed: int, inline_bytes: int
) -> None:
    net, again = (net_of(*profiles, seed=seed, inline_bytes=inline_bytes) for _ in range(2))
    assert told(net) == told(again)
    assert all(earlier <= later for earlier, later in zip(net.moments, net.moments[1:], strict=False))
    assert net.now_s <= 4 * 60.0  # four exchanges, each until its deadline at most


FASTER = st.fixed_dictionaries(
    {"step_s": st.floats(0, 1), "evaluate_s": st.floats(0, 1), "latency_s": st.floats(0, 1)}
    | {"down_bytes_s": st.floats(1, 100), "up_bytes_s": st.floats(1, 100)}
)


@given(st.tuples(PROFILE, PROFILE, PROFILE), FASTER, st.sampled_from([0, 2_048]), st.sampled_from([TASK, PROBE]))
@settings(max_examples=50)
def test_a_faster_link_or_device_never_ends_an_exchange_later(
    profiles: tuple[DeviceProfile, ...], times: dict[str, float], inline_bytes: int, task: Task
) -> None:
    """Below 32 uploads at a time: where some wait for a credit, who comes earlier may let a longer one wait."""
    faster = replace(profiles[0], **{name: getattr(profiles[0], name) * times[name] for name in times})
    before, after = (net_of(p, *profiles[1:], inline_bytes=inline_bytes) for p in (profiles[0], faster))
    replies = [set(net.ask(dict.fromkeys(LOCAL, task))) for net in (before, after)]
    assert after.now_s <= before.now_s
    assert replies[0] <= replies[1]


def test_who_always_drops_out_is_the_device_that_never_answers() -> None:
    steady = DEVICE_PROFILES[0]
    dropping = net_of(replace(steady, dropout=1.0), steady, steady)
    silent = net_of(replace(steady, step_s=1e9, evaluate_s=1e9), steady, steady)
    for task in (TASK, PROBE):
        one, other = (net.ask(dict.fromkeys(LOCAL, task)) for net in (dropping, silent))
        assert list(one) == list(other) == NAMES[1:]
        for c in one:
            np.testing.assert_equal(vars(one[c]), vars(other[c]))
        assert dropping.now_s == silent.now_s
    assert (NAMES[0], "main") not in dropping._devices.own
    assert 2 * TASK.steps <= dropping.local_steps < 3 * TASK.steps  # it was at work for a part of its task


def test_who_is_away_gets_its_task_when_it_is_back() -> None:
    steady, size = DEVICE_PROFILES[0], 4 * W.size
    now_and_then = replace(steady, availability=0.5, cycle_s=40.0)
    seed = next(s for s in range(100) if now_and_then.reachable_s(NAMES[0], 0.0, seed=s) > 5.0)
    back_s = now_and_then.reachable_s(NAMES[0], 0.0, seed=seed)
    net = net_of(now_and_then, steady, steady, seed=seed)
    assert list(net.ask(dict.fromkeys(LOCAL, TASK))) == NAMES
    assert net.now_s == pytest.approx(back_s + steady.down_s(size) + 5 * steady.step_s + steady.up_s(size))


def test_who_is_away_until_the_deadline_is_never_told() -> None:
    net = net_of(replace(DEVICE_PROFILES[0], availability=0.0), DEVICE_PROFILES[0], DEVICE_PROFILES[0])
    assert list(net.ask(dict.fromkeys(LOCAL, TASK))) == NAMES[1:]
    assert (net.now_s, net.bytes_down, net.local_steps) == (60.0, 2 * 4 * W.size, 2 * TASK.steps)


def test_who_leaves_at_work_tells_when_it_is_back() -> None:
    """Seeds and moments are searched: reachable at the beginning, away when the work ends."""
    slow = replace(DEVICE_PROFILES[0], availability=0.5, cycle_s=40.0, step_s=2.0)
    ends_s = slow.down_s(4 * W.size) + 5 * slow.step_s
    seed = next(
        s
        for s in range(100)
        if slow.reachable_s(NAMES[0], 0.0, seed=s) == 0.0 and slow.reachable_s(NAMES[0], ends_s, seed=s) > ends_s + 1
    )
    net = net_of(slow, DEVICE_PROFILES[0], DEVICE_PROFILES[0], seed=seed)
    assert list(net.ask(dict.fromkeys(LOCAL, TASK))) == NAMES
    assert net.now_s == pytest.approx(slow.reachable_s(NAMES[0], ends_s, seed=seed) + slow.up_s(4 * W.size))


@pytest.mark.parametrize("wrong", [{"dropout": 0.1}, {"availability": 0.0}])
def test_without_a_deadline_somebody_who_never_answers_is_refused(wrong: dict[str, float]) -> None:
    profile = replace(DEVICE_PROFILES[0], **wrong)  # type: ignore[arg-type]  # one field of its own type
    with pytest.raises(ConfigError, match="set a deadline"):
        network(profile, deadline_s=math.inf)
