"""What `check_sealed` refuses before the first round: fleets and models that sums cannot protect or hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds.sealed_round import check_sealed
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.server_options import ServerOptions
from edge_client.errors import ConfigError
from edge_client.protocol.task import ClientId
from tests.support.softmax_program import schema

METHOD = FedAvg(server=ServerOptions(secure="updates"))
SCHEMA = schema()


def fleet_of(devices: int) -> dict[ClientId, int]:
    return {f"d{i}": 1 for i in range(devices)}


def test_a_fleet_or_a_model_that_sums_cannot_protect_is_refused() -> None:
    with pytest.raises(ConfigError, match="the fleet has 4"):
        check_sealed(METHOD, SCHEMA, fleet_of(4))
    check_sealed(METHOD, SCHEMA, fleet_of(5))
    buffers = replace(SCHEMA.tensors[0], name="running", role="b")
    with pytest.raises(ConfigError, match="batch norm") as refused:
        check_sealed(METHOD, type(SCHEMA)((*SCHEMA.tensors, buffers)), fleet_of(5))
    assert refused.value.hint
    check_sealed(FedAvg(), SCHEMA, {})  # in the clear nothing has to be protected


def test_a_fleet_or_noise_that_overflows_the_words_of_a_sum_is_refused() -> None:
    short = replace(METHOD.server, secure_bits=16)
    check_sealed(FedAvg(server=short), SCHEMA, fleet_of(32_767))
    check_sealed(FedAvg(server=short, fraction_train=0.5), SCHEMA, fleet_of(32_768))
    for server, devices in (short, 32_768), (replace(short, privacy_noise=3e3), 5):
        with pytest.raises(ConfigError, match=f"a sum of {devices} devices overflows words of 16 bits") as refused:
            check_sealed(FedAvg(server=server), SCHEMA, fleet_of(devices))
        assert "secure-bits" in refused.value.hint
