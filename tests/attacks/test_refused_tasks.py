"""Tries to use up a run that waits for no device: a device that refuses each task, and connects again for the next."""

from __future__ import annotations

from pathlib import Path

from coordinator.config_sections import RunConfig
from edge_client.protocol import messages
from tests.support.virtual_federation import TOPICS, Federation, Spy

LIAR = "d03"


def test_a_device_that_refuses_each_task_and_connects_again_gets_two_in_the_time_of_one(tmp_path: Path) -> None:
    """Tasks that it used up would empty the buffers early and make the tasks of slower devices too old."""
    run = RunConfig(method="fedavg", rounds=3, name="run", settings={"local-steps": 2, "batch-size": 8})
    fed = Federation.of(tmp_path, runs=(run,), devices=4, concurrency=4, buffer=4, keep_rounds=0, deadline_s=300.0)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    for honest in ("d00", "d01", "d02"):
        fed.start_mute_device(honest)
    fed.start_mute_device(LIAR)
    births, refused = 1, set[str]()

    def attacked() -> bool:
        nonlocal births
        for task in spy.said("task", cid=LIAR):
            if task["id"] not in refused:
                refused.add(task["id"])
                spy.say(LIAR, "nack", re=task["id"], code="no_data")
                births += 1
                caps = {"engine": "onnx", "n": 40}
                again = messages.write_message("st", ident="again", t_ms=0, s="on", bd=births, caps=caps)
                spy.publish(TOPICS.state(LIAR), again)
        return fed.world.clock.time_s > 250.0

    fed.world.run(attacked)
    given = {(task["round"], task["exchange"]) for task in spy.said("task", cid=LIAR)}
    fed.world.end()
    assert 1 <= len(given) <= 2
