"""The watched folder of `fedcenters-export serve`, and the site beside it.

An I/O error is told once, and the next look tries again; what is half copied is taken when it is whole.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from edge_client.protocol.signing import public_key
from export.bundle.bundle_contents import make_signer
from export.bundle.reader import MANIFEST_FILE, SIGNATURE_FILE
from export.serve import app, generations, site
from export.serve.access import ServeAccess
from export.serve.generations import ROLLOUT_FILE, GenerationManager
from export.serve.rate_limits import RateLimiter
from export.serve.rollout import Rollout, RolloutPlan
from export.serve.site import INDEX_FILE
from tests.support.served_bundle import write_bundle

PLACES = ((shutil, "copyfile"), (generations, "replace_file"), (site, "replace_file"))  # copy, roll-out, index


class FullDisk:
    """While it is full, the function in whose place it stands fails."""

    def __init__(self, works: Callable[..., object]) -> None:
        self._works, self.full, self.failed = works, False, threading.Semaphore(0)

    def __call__(self, *args: object) -> object:
        if not self.full:
            return self._works(*args)
        self.failed.release()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=PLACES, ids=["copy", "roll-out", "index"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    where, name = request.param
    made = FullDisk(getattr(where, name))
    monkeypatch.setattr(where, name, made)
    monkeypatch.setattr(app, "WATCH_INTERVAL_S", 0.001)
    return made


@pytest.fixture
def served(tmp_path: Path, disk: FullDisk) -> Iterator[GenerationManager]:
    """A server of the bundle `b` that watches it."""
    del disk  # it stands in its place before the server begins
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=1.0))
    with TestClient(app.create_serve_app(manager, ServeAccess(rate=RateLimiter(0)))):
        yield manager


def told_of_space(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of the full disk; a bundle that is swapped while it is copied is told, too."""
    return [text for text in (record.getMessage() for record in list(caplog.records)) if "No space left" in text]


def until(true: Callable[[], bool]) -> None:
    """The server looks at its folder in a thread of its own: wait for what follows, a minute at most."""
    end = time.monotonic() + 60
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        threading.Event().wait(0.005)


def test_a_bundle_that_came_while_the_disk_was_full_is_served_when_there_is_room(
    tmp_path: Path, disk: FullDisk, served: GenerationManager, caplog: pytest.LogCaptureFixture
) -> None:
    first = served.rollout.stable
    with caplog.at_level(logging.WARNING):
        disk.full = True
        write_bundle(tmp_path / "b", "two")
        for _ in range(3):
            assert disk.failed.acquire(timeout=60)
        assert served.rollout.stable == first
        disk.full = False
        until(lambda: served.rollout.stable != first)
    assert told_of_space(caplog) == [
        f"the bundle in {tmp_path / 'b'} is not served yet, and is tried again: [Errno 28] No space left on device"
    ]
    second = served.rollout.stable
    assert served.generation(None).centers[0]["card"]["mark"] == "two"
    for file, key in ((ROLLOUT_FILE, "stable"), (INDEX_FILE, "generation")):
        assert json.loads((tmp_path / "site" / file).read_bytes())[key] == second
    write_bundle(tmp_path / "b", "three")
    until(lambda: served.rollout.stable != second)


def test_a_bundle_for_which_memory_was_short_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch had ended, and no later bundle was served."""
    monkeypatch.setattr(app, "WATCH_INTERVAL_S", 0.001)
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=1.0))
    first, copy, short = manager.rollout.stable, shutil.copyfile, [MemoryError()]

    def copied(*given: Path) -> object:
        if short:
            raise short.pop()
        return copy(*given)

    monkeypatch.setattr(shutil, "copyfile", copied)
    with TestClient(app.create_serve_app(manager, ServeAccess(rate=RateLimiter(0)))):
        write_bundle(tmp_path / "b", "two")
        until(lambda: manager.rollout.stable != first)
    assert "is tried again: there is not enough memory" in caplog.text


def test_another_bundle_that_cannot_be_served_either_is_told_too(
    tmp_path: Path, disk: FullDisk, served: GenerationManager, caplog: pytest.LogCaptureFixture
) -> None:
    del served
    disk.full = True
    with caplog.at_level(logging.WARNING):
        write_bundle(tmp_path / "b", "two")
        until(lambda: len(told_of_space(caplog)) == 1)
        write_bundle(tmp_path / "b", "three")
        until(lambda: len(told_of_space(caplog)) == 2)
    disk.full = False


def test_a_candidate_is_told_with_what_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`fedcenters-edge nearest` posts no reports: without any, the other devices keep the old bundle."""
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=0.05, pairs=200))
    write_bundle(tmp_path / "b", "two")
    found = manager.fetch_generation()
    assert found is not None
    with caplog.at_level(logging.INFO):
        manager.accept(found)
    assert "for 0.05 of the devices, until 200 pairs of reports have come" in caplog.text


def test_a_report_that_cannot_be_stored_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=0.5))
    write_bundle(tmp_path / "b", "two")
    found = manager.fetch_generation()
    assert found is not None
    manager.accept(found)
    before = manager.rollout
    assert before.candidate == found.name
    disk = FullDisk(site.replace_file)
    disk.full = True
    monkeypatch.setattr(generations, "replace_file", disk)
    after = before.add_report("d1", manager.generation("d1").name, 0.5, manager.plan)
    assert after != before
    with pytest.raises(OSError, match="No space left"):
        manager.store_rollout(after)
    assert manager.rollout is before
    server = TestClient(app.create_serve_app(manager, ServeAccess(rate=RateLimiter(0), is_local=True)))
    report = {"device": "d1", "generation": manager.generation("d1").name, "accuracy": 0.5}
    answer = server.post("/reports", json=report, headers={"Host": "127.0.0.1"})
    assert (answer.status_code, list(answer.json())) == (503, ["error"])
    assert int(answer.headers["retry-after"]) > 0
    assert "a report does not count: [Errno 28] No space left on device" in caplog.text
    disk.full = False
    assert server.post("/reports", json=report, headers={"Host": "127.0.0.1"}).json()["counted"]


def test_a_bundle_whose_manifest_was_copied_first_is_served_when_its_files_have_come(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=1.0))
    write_bundle(tmp_path / "new", "two")
    shutil.copyfile(tmp_path / "new" / MANIFEST_FILE, tmp_path / "b" / MANIFEST_FILE)
    assert manager.has_changed()
    assert manager.fetch_generation() is None
    assert [manager.has_changed() for _ in range(3)] == [False] * 3  # no file has changed since
    manifest = shutil.ignore_patterns(MANIFEST_FILE)
    shutil.copytree(tmp_path / "new", tmp_path / "b", dirs_exist_ok=True, ignore=manifest)
    assert [manager.has_changed() for _ in range(2)] == [False, True]  # the first look may see half of a copy
    found = manager.fetch_generation()
    assert found is not None
    manager.accept(found)
    assert manager.generation(None).centers[0]["card"]["mark"] == "two"
    assert not manager.has_changed()


def damage(manager: GenerationManager, name: str | None) -> None:
    (manager.site.root / "generations" / str(name) / "centers/center-0/model.onnx").write_bytes(b"cut")


def test_a_generation_that_is_damaged_on_the_site_is_taken_from_the_bundle_again(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    first = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    damage(first, first.rollout.stable)
    again = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    assert again.rollout == first.rollout
    assert again.site.open(again.generation(None).name).centers[0]["card"]["mark"] == "one"


@pytest.mark.parametrize("lost", ["stable", "candidate", "kept"])
def test_the_server_starts_without_a_generation_that_the_site_has_lost(
    tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan, names = RolloutPlan(share=1.0 if lost == "kept" else 0.05), []
    for mark in ("one", "two"):
        write_bundle(tmp_path / "b", mark)
        manager = GenerationManager(tmp_path / "site", tmp_path / "b", plan)
        names.append(manager.rollout.candidate or manager.rollout.stable)
    damage(manager, names[lost == "candidate"])
    write_bundle(tmp_path / "b", "three")
    with caplog.at_level(logging.WARNING):
        again = GenerationManager(tmp_path / "site", tmp_path / "b", plan)
    told = {record.getMessage().split(" in ")[0] for record in caplog.records if record.levelno == logging.WARNING}
    assert told == {f"generation {names[lost == 'candidate']:.16}"}
    marks = [
        name and again.generations[name].centers[0]["card"]["mark"]
        for name in (again.rollout.stable, again.rollout.candidate)
    ]
    assert marks == {"stable": ["three", None], "candidate": ["one", "three"], "kept": ["three", None]}[lost]


def test_a_server_that_now_wants_signatures_does_not_stop_at_what_it_served_without(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    key = bytes(32)
    signature = make_signer(key, "home")((tmp_path / "b" / MANIFEST_FILE).read_bytes())
    (tmp_path / "b" / SIGNATURE_FILE).write_text(signature)
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(), [public_key(key)])
    assert SIGNATURE_FILE in manager.generation(None).files


def test_a_withdrawn_bundle_is_told_when_it_is_withdrawn_and_when_it_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mark in ("one", "two"):
        write_bundle(tmp_path / "b", mark)
        manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    stable, candidate = manager.rollout.stable, manager.rollout.candidate
    assert stable is not None
    assert candidate is not None
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="export.serve"):
        manager.store_rollout(Rollout(stable=stable, withdrawn=(candidate,)))
        again = manager.fetch_generation()
        assert again is not None
        manager.accept(again)
    assert [record.getMessage() for record in caplog.records] == [
        f"stable {stable:.16}, candidate none; {candidate:.16} was withdrawn, since its devices report less accuracy",
        f"the bundle in {tmp_path / 'b'} is not served: {candidate:.16} was withdrawn; {stable:.16} stays",
    ]


def test_a_signature_that_comes_after_its_manifest_is_noticed(tmp_path: Path) -> None:
    """As of a copy that ends with manifest.sig, and of a bundle that is signed again with a new key."""
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    assert not manager.has_changed()
    manifest = (tmp_path / "b" / MANIFEST_FILE).read_bytes()
    for key in (bytes(32), bytes([1]) * 32):
        (tmp_path / "b" / SIGNATURE_FILE).write_text(make_signer(key, "home")(manifest))
        assert manager.has_changed()
        found = manager.fetch_generation()
        assert found is not None
        manager.accept(found)
        assert not manager.has_changed()
        signature = manager.generation(None).files[SIGNATURE_FILE]
        assert signature.path.read_bytes() == (tmp_path / "b" / SIGNATURE_FILE).read_bytes()
    web = TestClient(app.create_serve_app(manager, ServeAccess(rate=RateLimiter(0))), base_url="http://127.0.0.1")
    folder = f"/generations/{manager.generation(None).name}"
    asked = {name: web.get(f"{folder}/{name}") for name in (MANIFEST_FILE, SIGNATURE_FILE)}
    caches = {name: answer.headers["cache-control"] for name, answer in asked.items()}
    assert caches == {MANIFEST_FILE: "public, max-age=31536000, immutable", SIGNATURE_FILE: "no-cache"}
    assert asked[SIGNATURE_FILE].text == signature.path.read_text()


def test_what_is_served_stays_whole_while_it_gets_a_new_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    manifest = (tmp_path / "b" / MANIFEST_FILE).read_bytes()
    (tmp_path / "b" / SIGNATURE_FILE).write_text(make_signer(bytes(32), "home")(manifest))
    removed = list[Path]()
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path))
    manager.site.add(tmp_path / "b")
    assert {path.parent for path in removed} == {tmp_path / "site"}


def test_the_index_names_what_is_served_after_a_kill_between_the_two(tmp_path: Path) -> None:
    """The roll-out's state is written first; another web server may host the same folder."""
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=1.0))
    index = (tmp_path / "site" / INDEX_FILE).read_bytes()
    write_bundle(tmp_path / "b", "two")
    found = manager.fetch_generation()
    assert found is not None
    manager.accept(found)
    (tmp_path / "site" / INDEX_FILE).write_bytes(index)
    again = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan(share=1.0))
    assert json.loads((tmp_path / "site" / INDEX_FILE).read_bytes())["generation"] == again.rollout.stable == found.name


def test_what_a_killed_server_was_copying_is_removed(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    for left in (".centers.partial", ".generation-4711.partial"):  # a bundle that is being written, and a leftover
        (tmp_path / "site" / left / "centers").mkdir(parents=True)
    GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    assert sorted(p.name for p in (tmp_path / "site").iterdir()) == [
        ".centers.partial",
        ROLLOUT_FILE,
        "generations",
        INDEX_FILE,
    ]
