"""A site is plain files: generations never change, and the index points to whole ones only."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.signing import public_key
from export.bundle.bundle_contents import make_signer
from export.bundle.reader import SIGNATURE_FILE, encode_manifest
from export.serve.generations import GenerationManager
from export.serve.rollout import RolloutPlan
from export.serve.server import ServeOptions, run_server
from export.serve.site import MAX_KEPT_GENERATIONS, SiteFolder, only_server, publish_bundle, replace_file
from tests.support.served_bundle import write_bundle


def pointed(root: Path) -> str:
    """The generation that the index names."""
    return str(json.loads((root / "index.json").read_text())["generation"])


def test_what_the_index_names_is_the_bundle_byte_by_byte(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "b", "one")
    name = publish_bundle(tmp_path / "b", tmp_path / "site")
    index = json.loads((tmp_path / "site" / "index.json").read_text())
    assert index == {"v": 1, "generation": name, "manifest": f"/generations/{name}/manifest.json"}
    folder = tmp_path / "site" / "generations" / name
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(tmp_path / "b")) for p in (tmp_path / "b").rglob("*") if p.is_file())


def test_a_generation_is_on_the_disk_before_the_index_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut soon after leaves an index of empty files, which any web server serves."""
    write_bundle(tmp_path / "b", "one")
    flushed, sync = set[int](), os.fsync

    def noted(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    name = publish_bundle(tmp_path / "b", tmp_path / "site")
    generations = tmp_path / "site" / "generations"
    assert {path.stat().st_ino for path in (generations, *(generations / name).rglob("*"))} <= flushed


def test_publishing_the_same_bundle_again_changes_nothing(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    first, second = (publish_bundle(tmp_path / "b", tmp_path / "site") for _ in range(2))
    assert first == second
    assert SiteFolder(root=tmp_path / "site").names() == [first]


def test_a_bundle_that_was_signed_again_with_a_new_key_is_served_with_the_new_signature(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "b", "one")
    manager = None
    for key in (bytes(32), bytes([1]) * 32):
        (tmp_path / "b" / SIGNATURE_FILE).write_text(make_signer(key, "home")(encode_manifest(manifest)))
        manager = manager or GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
        found = manager.fetch_generation()
        assert found is not None
        manager.accept(found)
        served = manager.generation(None)
        assert served.files[SIGNATURE_FILE].path.read_bytes() == (tmp_path / "b" / SIGNATURE_FILE).read_bytes()
        assert served.files[SIGNATURE_FILE].sha256 == found.files[SIGNATURE_FILE].sha256
    (tmp_path / "b" / SIGNATURE_FILE).unlink()
    again = publish_bundle(tmp_path / "b", tmp_path / "site")
    assert (tmp_path / "site" / "generations" / again / SIGNATURE_FILE).exists()  # the same bundle, which was signed


def test_an_older_generation_stays_as_it_was_and_very_old_ones_go(tmp_path: Path) -> None:
    site, names = SiteFolder(root=tmp_path / "site"), []
    for mark in ("one", "two", "three", "four", "five"):
        write_bundle(tmp_path / "b", mark)
        names.append(publish_bundle(tmp_path / "b", site.root))
        assert site.open(names[-1]).bundle.manifest["centers"][0]["card"]["mark"] == mark
    assert len(site.names()) == MAX_KEPT_GENERATIONS
    assert pointed(site.root) == names[-1]
    assert (site.root / "generations" / names[-2] / "centers/center-0/model.onnx").read_bytes().startswith(b"four 0")


def test_a_changed_bundle_is_not_published_and_the_index_stays(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    name = publish_bundle(tmp_path / "b", tmp_path / "site")
    write_bundle(tmp_path / "b", "two")
    (tmp_path / "b" / "centers/center-0/model.onnx").write_bytes(b"changed")
    with pytest.raises(Malformed, match="bad_hash"):
        publish_bundle(tmp_path / "b", tmp_path / "site")
    assert pointed(tmp_path / "site") == name
    assert sorted(p.name for p in (tmp_path / "site").iterdir()) == ["generations", "index.json"]


def test_a_generation_that_was_changed_on_the_site_is_not_opened(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    name = publish_bundle(tmp_path / "b", tmp_path / "site")
    other = tmp_path / "site" / "generations" / ("0" * 64)
    shutil.copytree(tmp_path / "site" / "generations" / name, other)
    with pytest.raises(Malformed, match="another manifest"):
        SiteFolder(root=tmp_path / "site").open(other.name)


def test_an_unsigned_bundle_is_refused_where_keys_are_named(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    with pytest.raises(Malformed, match="not signed"):
        publish_bundle(tmp_path / "b", tmp_path / "site", [public_key(bytes(32))])


def test_what_no_manifest_names_is_not_published(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    (tmp_path / "b" / "secret.txt").write_text("mine")
    name = publish_bundle(tmp_path / "b", tmp_path / "site")
    assert not (tmp_path / "site" / "generations" / name / "secret.txt").exists()


@pytest.mark.parametrize("broken", [{"centers": []}, {"model": 3}, {"centers": [{"center": 0}]}, {"program": None}])
def test_a_manifest_that_lacks_something_is_not_published(tmp_path: Path, broken: dict[str, object]) -> None:
    manifest = write_bundle(tmp_path / "b", "one")
    (tmp_path / "b" / "manifest.json").write_text(json.dumps({**manifest, **broken}))
    with pytest.raises(Malformed, match="bad_field"):
        publish_bundle(tmp_path / "b", tmp_path / "site")


def test_a_folder_without_a_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be copied|is not a bundle"):
        publish_bundle(tmp_path / "nothing", tmp_path / "site")


def test_two_processes_that_publish_into_one_folder_do_not_remove_each_others_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write_bundle(tmp_path / name, name)
    copy, lock, waits, begun, published = shutil.copyfile, fcntl.flock, threading.Event(), threading.Event(), set[str]()

    def publish(name: str) -> None:
        try:
            published.add(publish_bundle(tmp_path / name, tmp_path / "site"))
        finally:
            waits.set()

    other = threading.Thread(target=publish, args=("two",))

    def locked(*given: int) -> None:
        if threading.current_thread() is other and given[1] == fcntl.LOCK_EX:  # as one of two writers
            waits.set()
        lock(*given)

    def copied(source: Path, to: Path) -> Path:
        made = copy(source, to)
        if not begun.is_set():  # in the middle of the first copy
            begun.set()
            other.start()
            waits.wait(30)
        return made

    monkeypatch.setattr(fcntl, "flock", locked)
    monkeypatch.setattr(shutil, "copyfile", copied)
    publish("one")
    other.join(30)
    assert len(published) == 2
    assert sorted(path.name for path in (tmp_path / "site" / "generations").iterdir()) == sorted(published)


def test_a_site_that_is_served_takes_no_bundle_but_its_servers(tmp_path: Path) -> None:
    """The index would name another bundle than the server gives, and the next roll-out would take it back."""
    write_bundle(tmp_path / "b", "one")
    with only_server(tmp_path / "site"), pytest.raises(ConfigError, match="site is served by another process") as told:
        publish_bundle(tmp_path / "b", tmp_path / "site")
    assert "where that server looks" in told.value.hint
    assert not (tmp_path / "site" / "index.json").exists()
    publish_bundle(tmp_path / "b", tmp_path / "site")


def test_a_server_that_starts_while_a_bundle_is_published_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "b", "one")
    point, told = SiteFolder.point, list[str]()

    def pointed(site: SiteFolder, name: str) -> None:
        with pytest.raises(ConfigError) as refused, only_server(site.root):
            pass
        told.append(refused.value.message)
        point(site, name)

    monkeypatch.setattr(SiteFolder, "point", pointed)
    publish_bundle(tmp_path / "b", tmp_path / "site")
    assert told == [f"{tmp_path / 'site'} is served by another process, or one publishes into it"]


def test_a_second_server_of_a_site_is_refused_since_each_keeps_the_roll_out_there(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    with only_server(tmp_path / "site"), pytest.raises(ConfigError, match="site is served by another process") as told:
        run_server(ServeOptions(bundle=tmp_path / "b", site=tmp_path / "site", port=0))
    assert "--site" in told.value.hint
    assert not (tmp_path / "site" / "index.json").exists()


def test_a_link_that_waits_where_a_file_is_renewed_is_not_written_through(tmp_path: Path) -> None:
    """As of another user of the folder, where root publishes."""
    ours = tmp_path / "of-root"
    ours.write_bytes(b"kept")
    (tmp_path / ".index.json.new").symlink_to(ours)
    replace_file(tmp_path / "index.json", b"new")
    assert (ours.read_bytes(), (tmp_path / "index.json").read_bytes()) == (b"kept", b"new")
    assert not (tmp_path / "index.json").is_symlink()
