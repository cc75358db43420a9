"""A sum of models through the whole chain: trained over a real broker as in one process, exported, found again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import fedcenters as fc

pytestmark = [pytest.mark.broker, pytest.mark.slow]

FLEET = fc.fleets.digits(devices=6)


def test_a_center_of_cam_is_one_file_with_the_sum_that_its_devices_trained(tmp_path: Path) -> None:
    with fc.federation(fleet=FLEET, out=tmp_path) as home:
        over_mqtt = home.run(fc.CAM(3), rounds=2)
    alone = fc.simulate(fc.CAM(3), fleet=FLEET, rounds=2, engine="onnx", out=tmp_path, name="alone")
    np.testing.assert_array_equal(over_mqtt.run.state.centers, alone.run.state.centers)
    assert over_mqtt.run.state.assignment == alone.run.state.assignment

    again = fc.load(tmp_path / "alone")
    assert again.args.model == "digits-mlp+digits-mlp"
    again.export(tmp_path / "bundle", formats=["onnx"])
    who, local = next(iter(alone.split.devices.items()))
    assert local.test is not None
    k = alone.run.state.assignment[who]
    file = tmp_path / "bundle" / "centers" / f"center-{k}" / "model.onnx"
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: local.test.x})[0]
    module = alone.module(k)
    with torch.no_grad():
        x = torch.from_numpy(local.test.x)
        common, group = (member(x) for member in module.members)  # type: ignore[union-attr]
    np.testing.assert_allclose(found, (common + group).numpy(), atol=1e-4)
    assert again.nearest(local.test.x, local.test.y).center == k
