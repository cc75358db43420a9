"""Private centers: clipped, noisy as promised, the same noise in a replay, and what an accountant says about it."""

from __future__ import annotations

import stat
from dataclasses import replace
from functools import partial
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from coordinator.aggregation.privacy import epsilon_spent, release_centers, seeded_normals
from coordinator.config_sections import RunConfig
from coordinator.rounds.privacy_accounting import RELEASES_KEY, count_releases, privacy_spent, with_noise_key
from coordinator.storage.privacy_noise_key import open_noise_key
from coordinator.strategies.base import Exchange, Replies, RepliesWithLate, State, Strategy, drive
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.baselines.fedavg_late import FedAvgLate
from coordinator.strategies.clove import CLoVE
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.common.updates import unpack_by_client
from coordinator.strategies.fedsoft import FedSoft
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.held_out.fedcenters import FedCenters
from coordinator.strategies.ifca import IFCA
from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, Probe, Reply
from tests.support.methods import build, world
from tests.support.softmax_program import grouped_fleet, start_of
from tests.support.virtual_federation import Federation

SECRET, OTHER = bytes(range(32)), bytes(32)
RNG = np.random.default_rng(0)
ROWS, CENTERS = RNG.standard_normal((40, 6)), RNG.standard_normal((2, 6))
R: Array = np.eye(2)[np.arange(40) % 2]
NOISY = ServerOptions(privacy_noise=1.0)
SILENT = 1e-12  # noise that can be neglected
COUNT_SHARE = 0.3  # b of the formula


def released(
    rows: Array = ROWS, *, R: Array = R, noise: float = SILENT, clip: float = 1.0, secret: bytes = SECRET
) -> Array:
    return release_centers(CENTERS, rows, R, clip=clip, noise=noise, secret=secret)


# ---- what is released ----


def test_with_a_wide_bound_and_hardly_any_noise_it_is_the_mean() -> None:
    for k in (0, 1):
        np.testing.assert_allclose(released(clip=1e6, noise=1e-15)[k], ROWS[R[:, k] == 1].mean(axis=0), atol=1e-6)


@given(far=st.floats(0.1, 1e9), who=st.integers(0, 39))
def test_no_device_pulls_the_sum_of_its_center_further_than_the_bound(far: float, who: int) -> None:
    rows = ROWS.copy()
    rows[who] = CENTERS[who % 2] + far
    moved = 20 * (released(rows) - CENTERS)  # the sums: 20 devices each
    rows[who] = CENTERS[who % 2]
    assert np.linalg.norm(moved - 20 * (released(rows) - CENTERS)) <= 1.0 + 1e-6


@given(seed=st.integers(0, 999))
def test_sums_and_count_together_change_by_at_most_what_the_noise_is_made_for(seed: int) -> None:
    """One device that shares its weight among all centers, as in FedSoft; without it, everything else is the same."""
    rng = np.random.default_rng(seed)
    shares = rng.random((1, 2)) * 3
    mine = ROWS[:1] * rng.choice([0.1, 1.0, 100.0])
    given_ = shares / max(1.0, float(np.linalg.norm(shares)))
    pulled = [
        released(mine, R=np.eye(2)[[k]], noise=1e-13)[k] - CENTERS[k] for k in (0, 1)
    ]  # each clipped to the bound
    change = np.concatenate([given_[0, k] * np.append(pulled[k], COUNT_SHARE) for k in (0, 1)])
    assert np.linalg.norm(change) <= np.sqrt(1 + COUNT_SHARE**2) + 1e-9
    together = released(mine, R=shares, noise=1e-13)
    np.testing.assert_allclose(together, CENTERS + np.array(pulled), atol=1e-9)


def test_a_device_that_weighs_more_than_one_counts_as_one_beside_others() -> None:
    """Of a device alone its weight does not matter: it is in the sum and in the count."""
    one, three = (released(ROWS[:2], R=np.array([[weight, 0.0], [1.0, 0.0]])) for weight in (1.0, 3.0))
    np.testing.assert_allclose(three, one, atol=1e-9)


def test_a_center_of_nobody_is_not_told_from_one_of_few() -> None:
    few = np.zeros((40, 2))
    few[:, 0] = 1
    few[:2] = [0, 1]
    kept = [release_centers(CENTERS, ROWS, by, clip=1.0, noise=5.0, secret=SECRET)[1] for by in (few, few * [1, 0])]
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[0], CENTERS[1])


def test_the_noise_has_the_variance_that_was_promised() -> None:
    """20,000 coordinates of one center, 200 devices that did not move: all that moves it is noise."""
    center = np.zeros((1, 20_000))
    rows = np.zeros((200, 20_000), np.float32)
    new = release_centers(center, rows, np.ones((200, 1)), clip=0.5, noise=2.0, secret=SECRET)[0]
    spread = 2.0 * np.sqrt(1 + COUNT_SHARE**2)
    # The count is noisy too: 200 give or take a few deviations of 7.
    assert new.std() == pytest.approx(0.5 * spread / 200, rel=4 * spread / COUNT_SHARE / 200 + 0.02)
    assert kstest(new / new.std(), norm.cdf).pvalue > 0.01
    assert abs(new.mean()) < 5 * new.std() / np.sqrt(20_000)


def test_the_noise_of_sums_and_counts_is_as_great_as_the_formula_says() -> None:
    """s C of each coordinate of a sum, to a percent; s / b of a count, to a tenth."""
    rows, small = np.zeros((10, 30_000), np.float32), 0.01  # so small that the count is 10 to half a percent
    new = release_centers(np.zeros((1, 30_000)), rows, np.ones((10, 1)), clip=0.5, noise=small, secret=SECRET)[0]
    assert new.std() * 10 == pytest.approx(small * 0.5 * np.sqrt(1.09), rel=0.015)
    counts = [100 / one - 100 for one in _many(np.ones((100, 1)), 1.0, 400)]
    assert np.std(counts) == pytest.approx(np.sqrt(1.09) * np.sqrt(1 + 1 / 0.09), rel=0.12)  # that of the sum, too


def test_a_center_is_released_where_its_noisy_count_is_two_deviations_or_more() -> None:
    """Of 35 devices and a deviation of 17.4 that is so in half of all releases."""
    moved = [one != 0 for one in _many(np.ones((35, 1)), 5.0, 400)]
    assert np.mean(moved) == pytest.approx(0.5, abs=0.1)


def _many(rows: Array, noise: float, times: int) -> list[float]:
    """Releases of one center at 0, of which all devices stand at 1, each with a key of its own."""
    one = np.ones((len(rows), 1))
    keys = (i.to_bytes(32, "big") for i in range(times))
    return [float(release_centers(np.zeros((1, 1)), rows, one, clip=1.0, noise=noise, secret=k)[0, 0]) for k in keys]


def test_a_step_moves_part_of_the_way_and_devices_are_aligned_with_their_center() -> None:
    whole, half = (
        release_centers(CENTERS, ROWS, R, clip=1e6, noise=SILENT, secret=SECRET, step=step) for step in (1.0, 0.5)
    )
    np.testing.assert_allclose(half - CENTERS, 0.5 * (whole - CENTERS), atol=1e-6)
    stays = release_centers(
        CENTERS, ROWS, R, clip=1.0, noise=SILENT, secret=SECRET, align=lambda rows, center: 0 * rows + center
    )
    np.testing.assert_allclose(stays, CENTERS, atol=1e-9)


def test_normals_are_normal_and_follow_from_the_key_and_what_they_are_for() -> None:
    drawn = seeded_normals(SECRET, b"this", 100_000)
    assert kstest(drawn, norm.cdf).pvalue > 0.01
    assert drawn.var() == pytest.approx(1.0, abs=0.02)  # 100,000 of them: 4 deviations of their variance
    np.testing.assert_array_equal(drawn, seeded_normals(SECRET, b"this", 100_000))
    for other in (seeded_normals(SECRET, b"that", 100_000), seeded_normals(OTHER, b"this", 100_000)):
        assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.02


def test_the_same_sums_get_the_same_noise_and_other_sums_another() -> None:
    np.testing.assert_array_equal(released(noise=3.0), released(noise=3.0))
    rows = ROWS.copy()
    rows[0] += 1e-9  # inside the bound or not, the sum differs
    apart = released(rows, noise=0.5) - released(noise=0.5)
    assert np.abs(apart).max() > 1e-3
    assert np.abs(released(noise=0.5) - released(noise=0.5, secret=OTHER)).max() > 1e-3


def test_without_a_key_nothing_is_released() -> None:
    for secret in (b"", SECRET[1:], SECRET + b"0"):
        with pytest.raises(ConfigError, match="secret") as refused:
            released(secret=secret)
        assert refused.value.hint


# ---- the accountant ----


@pytest.mark.parametrize(
    ("noise", "epochs", "published"),
    [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)],
)
def test_the_library_gives_the_published_figures_of_mnist(noise: float, epochs: int, published: float) -> None:
    """tensorflow/privacy, tutorials/README.md: 60,000 samples, batches of 256, delta 1e-5.

    They convert by epsilon = min over a of RDP(a) + log(1 / delta) / (a - 1) (Mironov 2017, proposition 3). The library
    has a better conversion by now (Canonne, Kamath and Steinke 2020), so that ours may only be smaller.
    """
    steps = epochs * 60_000 // 256
    accountant = RdpAccountant()
    one = dp_accounting.PoissonSampledDpEvent(256 / 60_000, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(one, steps)
    orders, divergences = np.array(accountant._orders), np.array(accountant._rdp)
    classic = float((divergences + np.log(1e5) / (orders - 1)).min())
    assert classic == pytest.approx(published, rel=0.01)  # two decimals, and their own set of orders
    ours = epsilon_spent(noise, steps, 1e-5, sampling=256 / 60_000)
    assert 0.7 * published < ours < published


@pytest.mark.parametrize(("noise", "delta"), [(1.0, 1e-5), (0.5, 1e-6), (4.0, 1e-3)])
def test_one_release_costs_what_the_exact_formula_of_a_gaussian_says(noise: float, delta: float) -> None:
    """Balle and Wang 2018, theorem 8: delta = Phi(1 / 2z - e z) - exp(e) Phi(-1 / 2z - e z)."""
    e = epsilon_spent(noise, 1, delta)
    found = norm.cdf(1 / (2 * noise) - e * noise) - np.exp(e) * norm.cdf(-1 / (2 * noise) - e * noise)
    assert found == pytest.approx(delta, rel=1e-3)


@given(noise=st.floats(0.5, 20.0), times=st.integers(1, 500))
def test_many_releases_cost_as_much_as_one_with_noise_over_their_root(noise: float, times: int) -> None:
    """Dong, Roth and Su 2022, corollary 3.3."""
    assert epsilon_spent(noise, times, 1e-5) == pytest.approx(epsilon_spent(noise / np.sqrt(times), 1, 1e-5), rel=1e-6)
    assert epsilon_spent(noise, times + 1, 1e-5) > epsilon_spent(noise, times, 1e-5)


def test_the_library_composes_to_no_less_and_secret_sampling_costs_less() -> None:
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(4.0), 50)
    assert epsilon_spent(4.0, 50, 1e-5) <= accountant.get_epsilon(1e-5)
    assert epsilon_spent(4.0, 50, 1e-5, sampling=0.1) < epsilon_spent(4.0, 50, 1e-5) / 3
    assert epsilon_spent(1.0, 0, 1e-5) == 0.0


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 4.0])
def test_the_epsilon_of_a_record_is_never_below_what_was_spent(noise: float) -> None:
    """It was rounded to the nearest fourth decimal: of a bound, a smaller number is no bound."""
    method = FedAvg(server=ServerOptions(privacy_noise=noise))
    for releases in range(1, 9):
        counts = {f"{RELEASES_KEY}/d00": np.array(releases)}
        told = privacy_spent(method, State(centers=np.zeros((1, 2)), extra=counts))
        assert told is not None
        spent = epsilon_spent(noise, releases, 1e-5)
        assert spent <= told["epsilon"] < spent + 1.001e-4
        assert told["epsilon"] == round(told["epsilon"], 4)


# ---- runs ----


@pytest.mark.parametrize(
    "name", sorted(name for name in METHODS if "privacy-noise" in method_settings(make_method(name)))
)
def test_every_method_counts_what_each_devices_updates_were_used_for(name: str) -> None:
    more: dict[str, Setting] = {"privacy-noise": 0.01, "privacy-clip": 10.0, "reduce": "mean"}
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            build(name, more)
        return
    method = with_noise_key(build(name, more), world(build(name), LOCAL).schema, lambda: SECRET)
    fleet = world(method, LOCAL)
    for _ in range(2):
        fleet.round(silent=["d03"])
    told = privacy_spent(method, fleet.state)
    assert told is not None
    assert told["releases"] >= 2
    assert told["epsilon"] > 0
    assert not any(key.endswith("/d03") for key in fleet.state.extra if key.startswith("private-releases"))
    assert np.isfinite(fleet.state.centers).all()


LOCAL = grouped_fleet(6, 1)
REFUSED = {  # method -> why it has no noise
    "nonfed": "nonfed makes no centers",
    "tkm": "reduce",
    "fedcenters": "privacy-noise with a trial",
    "fedrc": "label-prior device with privacy-noise",
    **dict.fromkeys(("cam", "cam-wecfl", "femam"), "privacy-noise with a sum of models"),
}


def test_updates_that_came_late_are_counted_too() -> None:
    fleet = world(FedAvg(), LOCAL)
    method = with_noise_key(FedAvgLate(server=ServerOptions(privacy_noise=1.0)), fleet.schema, lambda: SECRET)
    state, update = fleet.state, np.ones(fleet.schema.size)
    for times in (("d00", "d01"), ("d01", "d00")):
        now, late = ({who: Reply(n=10, update=update)} for who in times)
        exchanges = method.round(state, fleet.schema, fleet.fleet, np.random.default_rng(0))
        counted = count_releases(method, state, exchanges)
        state = drive(counted, lambda _, now=now, late=late: RepliesWithLate(now, late))  # type: ignore[misc]
    assert {c: int(n) for c, n in unpack_by_client(state.extra, RELEASES_KEY).items()} == {"d00": 2, "d01": 2}


@pytest.mark.parametrize("answering", [6, 1])  # of one, there are groups without a device
def test_private_starts_lie_about_the_common_model_and_not_about_what_was_drawn(answering: int) -> None:
    method = IFCA(clusters=3, local_steps=3, server=ServerOptions(privacy_noise=1e-6, privacy_clip=0.1, secret=SECRET))
    fleet = world(method, LOCAL)
    common, drawn = start_of(), fleet.state.centers.copy()
    told: list[Exchange] = []

    def ask(exchange: Exchange) -> Replies:
        told.append(exchange)
        return {c: fleet.devices.answer(c, task) for c, task in [*exchange.items()][:answering]}

    drive(method.round(fleet.state, fleet.schema, fleet.fleet, np.random.default_rng(0)), ask)
    question = next(iter(told[1].values()))
    assert isinstance(question, Probe)
    assert np.linalg.norm(drawn[1:] - common, axis=1).min() > 0.2
    assert max(float(np.linalg.norm(np.asarray(model) - common)) for model in question.models) < 0.101


@pytest.mark.parametrize(
    ("method", "given"),
    [
        *[(IFCA(start=start, server=NOISY), start == "k-means") for start in ("groups", "redraw", "loss", "k-means")],
        (CLoVE(server=NOISY), True),  # k-means of the devices' losses
        (FedCenters(trial_rounds=0, server=NOISY), False),  # which is FedAvg
        (FedSoft(server=NOISY), False),
        (FedSoft(select=2, server=NOISY), True),  # drawn by their shares of all devices' shares
    ],
)
def test_a_method_that_compares_devices_says_so(method: Strategy, given: bool) -> None:  # noqa: FBT001
    told = privacy_spent(method, State(centers=np.zeros((3, 1))))
    assert told is not None
    assert told["given_assignments"] is given


@pytest.mark.parametrize("name", ["ifca", "fesem"])
def test_private_starts_by_loss_read_no_exact_number_of_devices(name: str) -> None:
    """The merge would weigh centers by their devices, and each sort is a release more."""
    server = ServerOptions(privacy_noise=1.0, secret=SECRET, least_members=2)
    settings: dict[str, Setting] = {"clusters": 2, "start": "loss", "local-steps": 1}
    method = make_method(name, **settings)
    assert isinstance(method, (FeSEM, IFCA))
    fleet = world(replace(method, server=server), grouped_fleet(12, 2))
    fleet.round()
    counted = unpack_by_client(fleet.state.extra, RELEASES_KEY)
    assert {int(n) for n in counted.values()} == {2}  # the groups' means, and the round's own


def test_a_private_method_still_learns_where_noise_is_small() -> None:
    method = with_noise_key(
        FedAvg(local_steps=6, server=ServerOptions(privacy_noise=0.02, privacy_clip=5.0)),
        world(FedAvg(), LOCAL).schema,
        lambda: SECRET,
    )
    fleet = world(method, LOCAL)
    accuracies = [fleet.round().accuracy.micro for _ in range(4)]
    assert accuracies[-1] is not None
    assert accuracies[-1] > 0.6


@pytest.mark.parametrize(("key", "value"), [("privacy-clip", 0.5), ("privacy-delta", 1e-6)])
def test_a_bound_without_noise_is_refused_because_nothing_would_be_clipped(key: str, value: float) -> None:
    settings: dict[str, Setting] = {key: value}
    with pytest.raises(ConfigError, match=f"{key} is set and privacy-noise is 0"):
        make_method("fedavg", **settings)
    make_method("fedavg", **settings, **{"privacy-noise": 1.0})


def test_what_cannot_be_private_is_refused_with_a_hint() -> None:
    schema = world(FedAvg(), LOCAL).schema
    buffers = replace(schema.tensors[0], name="running", role="b")
    with pytest.raises(ConfigError, match="running statistics"):
        with_noise_key(
            FedAvg(server=ServerOptions(privacy_noise=1.0)), type(schema)((*schema.tensors, buffers)), lambda: SECRET
        )
    with pytest.raises(ConfigError, match="reduce"):
        FedAvg(server=ServerOptions(privacy_noise=1.0, reduce="median"))
    for untouched in (FedAvg(), make_method("fedsgd")):  # without noise, and without the server's options
        assert with_noise_key(untouched, schema, lambda: pytest.fail("the secret is not needed")) is untouched
    plain = FedAvg()
    assert privacy_spent(plain, plain.begin(start_of(), schema, {}, np.random.default_rng(0))) is None


def test_a_restart_of_a_private_run_changes_no_bit_and_another_key_all(tmp_path: Path) -> None:
    run = RunConfig(method="fedavg", name="fedavg", rounds=2, settings={"local-steps": 2, "privacy-noise": 0.1})
    states = []
    for case in ("calm", "killed", "elsewhere"):
        fed = Federation.of(tmp_path / case, runs=(run,), devices=3)
        if case == "killed":  # with the key of the first, as a restored backup
            (fed.config.folder / "store").mkdir(parents=True)
            key = tmp_path / "calm" / "run" / "store" / "noise.key"
            (fed.config.folder / "store" / "noise.key").write_bytes(key.read_bytes())
            (fed.config.folder / "store" / "noise.key").chmod(0o600)
        fed.start_coordinator()
        fed.start_devices(3)
        if case == "killed":
            fed.world.run(partial(fed.happened, "round"))
            fed.world.kill("coordinator.0")
            fed.start_coordinator()
        fed.finish()
        fed.world.end()
        assert [r["privacy"]["releases"] for r in fed.rounds()] == [1, 2]
        assert 0 <= fed.rounds()[1]["privacy"]["epsilon"] - epsilon_spent(0.1, 2, 1e-5) < 1e-4
        states.append(fed.final_states()["fedavg"])
    assert states[0] == states[1]
    assert states[0] != states[2]


def test_the_key_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    key = open_noise_key(tmp_path)
    assert open_noise_key(tmp_path) == key
    assert len(set(key)) > 8
    path = tmp_path / "noise.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others"):
        open_noise_key(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="32"):
        open_noise_key(tmp_path)
    assert "secret" not in method_settings(make_method("fedavg"))
    assert repr(FedAvg(server=ServerOptions(secret=SECRET))).count("secret") == 0
