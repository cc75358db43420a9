from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.stats import skellam

from coordinator.aggregation.privacy import INSTALL_HINT, epsilon_spent
from coordinator.aggregation.skellam_accounting import ORDERS, epsilon_of, skellam_rdp, sum_cost
from edge_client.errors import ConfigError
from edge_client.protocol.summed_task import SumScale


@pytest.mark.parametrize(("variance", "shift"), [(4.0, 1), (25.0, 1), (25.0, 5), (400.0, 10)])
def test_the_bound_is_above_the_divergence_of_two_shifted_skellam_numbers(variance: float, shift: int) -> None:
    far = int(12 * np.sqrt(variance)) + shift
    x = np.arange(-far, far + 1)
    one, other = (skellam.logpmf(x - moved, variance / 2, variance / 2) for moved in (0, shift))
    bound = skellam_rdp(variance, shift, shift)
    for at in np.flatnonzero(ORDERS <= 6):
        order = ORDERS[at]
        divergence = np.log(np.exp(order * one + (1 - order) * other).sum()) / (order - 1)
        assert divergence <= bound[at] * (1 + 1e-6)  # the accuracy of logpmf


@pytest.mark.parametrize(("noise", "sums"), [(1.0, 1), (2.0, 10), (8.0, 100)])
def test_epsilon_is_that_of_gaussian_noise_where_words_are_fine(noise: float, sums: int) -> None:
    """dp-accounting's own accountant, Gaussian noise of the same multiplier and as many sums."""
    scale = SumScale(bits=32, devices=100, clip=1.0, noise=noise / np.sqrt(90))  # ten of the hundred tell theirs
    gaussian = RdpAccountant(orders=ORDERS.tolist())
    gaussian.compose(dp_accounting.GaussianDpEvent(noise), sums)
    found = epsilon_of(sums * sum_cost(scale, 100, 1_000), 1e-5)
    assert found == pytest.approx(gaussian.get_epsilon(1e-5), rel=1e-3)  # rounding of 1,000 words: 3e-6 of the bound


def sum_epsilon(noise: float, *, sums: int = 1, bits: int = 32, devices: int = 30, parameters: int = 4_810) -> float:
    """The epsilon of sums to which every device came."""
    scale = SumScale(bits=bits, devices=devices, clip=1.0, noise=noise / np.sqrt(devices))
    return epsilon_of(sums * sum_cost(scale, devices, parameters), 1e-5)


def test_the_page_on_privacy_tells_how_far_epsilon_is_above_that_of_gaussian_noise() -> None:
    page = (Path(__file__).parents[3] / "docs/privacy.md").read_text(encoding="utf-8")
    exact = {noise: epsilon_spent(noise, 1, 1e-5) for noise in np.geomspace(0.36, 12, 40)}
    above = [100 * (sum_epsilon(noise) / gaussian - 1) for noise, gaussian in exact.items()]
    assert min(exact.values()) < 0.3
    assert max(exact.values()) > 15
    inside = [share for share, gaussian in zip(above, exact.values(), strict=True) if 0.3 <= gaussian <= 15]
    assert f"{min(inside):.0f} to {max(inside):.0f} % higher" in page
    assert epsilon_spent(1, 394, 1e-5) == pytest.approx(280, abs=5)
    assert f"where it is 280, {100 * (sum_epsilon(1, sums=394) / epsilon_spent(1, 394, 1e-5) - 1):.0f} %" in page
    large = sum_epsilon(1, bits=16, devices=1_000, parameters=1_150_000)
    assert f"{sum_epsilon(1, bits=16):.1f} for 4,810" in page
    assert f"{large:,.0f} for 1.15 million" in page
    assert f"{sum_epsilon(1):.1f} for both" in page


def test_fewer_devices_and_coarser_words_cost_more() -> None:
    costs = [
        epsilon_of(sum_cost(SumScale(bits=bits, devices=100, clip=1.0, noise=0.1), devices, 10_000), 1e-5)
        for bits, devices in [(32, 100), (32, 50), (16, 50)]
    ]
    assert costs[0] < costs[1] < costs[2]


def test_without_the_accountant_a_cost_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dp_accounting", "dp_accounting.rdp"):
        monkeypatch.setitem(sys.modules, name, None)
    for cost in (partial(epsilon_of, np.ones(len(ORDERS)), 1e-5), partial(epsilon_spent, 1.0, 1, 1e-5)):
        with pytest.raises(ConfigError, match="needs an accountant") as refused:
            cost()
        assert refused.value.hint == INSTALL_HINT
    assert epsilon_of(np.zeros(len(ORDERS)), 1e-5) == epsilon_spent(1.0, 0, 1e-5) == 0.0  # nothing to be counted


def test_nothing_summed_costs_nothing() -> None:
    assert epsilon_of(np.zeros(len(ORDERS)), 1e-5) == 0.0


def test_the_orders_are_those_whose_costs_stored_runs_have() -> None:
    """A run that goes on adds the costs of its new sums to the stored ones, order by order."""
    assert (len(ORDERS), ORDERS.sum(), ORDERS[0], ORDERS[-1]) == (102, 65_881, 2, 4_096)


def test_the_bound_is_that_of_the_theorem_at_a_low_and_at_a_high_order() -> None:
    low, high = (int(np.flatnonzero(order == ORDERS)[0]) for order in (2, 4096))
    bound = skellam_rdp(4.0, 3.0, 5.0)  # mu, D2, D1
    assert bound[low] == pytest.approx(2 * 9 / 8 + (3 * 9 + 6 * 5) / 64)
    assert bound[high] == pytest.approx(4096 * 9 / 8 + 15 / 8)
    fine = skellam_rdp(1_000.0, 3.0, 5.0)
    assert fine[low] == pytest.approx(2 * 9 / 2_000 + (3 * 9 + 6 * 5) / 4e6)


def test_a_sum_costs_what_the_noise_of_its_honest_devices_and_the_norms_of_its_words_say() -> None:
    scale = SumScale(bits=16, devices=20, clip=1.0, noise=2.0)
    levels = (2**15 - 1) // (20 + math.ceil(12 * 2 * math.sqrt(20)))
    l2 = levels + 3.0  # nine words
    wanted = skellam_rdp(9 * (2 * levels) ** 2, l2, 3.0 * l2)  # of 11 devices two tell theirs
    np.testing.assert_array_equal(sum_cost(scale, 11, 9), wanted)
