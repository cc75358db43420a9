from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import pwd
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import ConfigError
from emulator.data.loaders.folder import ARCHIVES, HOME_PAGES, SHA256, DataFolderReader, data_folder
from tests.support.raw_data_files import unknown


def test_the_folder_is_the_one_asked_for_else_the_variables_else_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDCENTERS_DATA", "/told")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder(Path("asked")) == Path("asked")
    assert data_folder() == Path("/told")
    monkeypatch.delenv("FEDCENTERS_DATA")
    assert data_folder() == tmp_path / "fedcenters" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert data_folder() == tmp_path / "me" / ".cache" / "fedcenters" / "data"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number without an account, as in a container
    with pytest.raises(ConfigError, match="no home folder"):
        data_folder()


def test_a_missing_file_is_named_with_its_folder_and_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train-images") as wrong:
        DataFolderReader(path=tmp_path).read("fashion-mnist/train-images-idx3-ubyte")
    assert str(tmp_path) in wrong.value.message
    assert "github.com/zalandoresearch" in wrong.value.hint
    assert "FEDCENTERS_DATA" in wrong.value.hint


@pytest.mark.parametrize("packed", [True, False])
def test_an_altered_file_does_not_pass_and_one_packed_again_does(tmp_path: Path, *, packed: bool) -> None:
    folder = DataFolderReader(path=tmp_path, known={"mnist/a": hashlib.sha256(b"published").hexdigest()})
    (tmp_path / "mnist").mkdir()
    path = tmp_path / "mnist" / ("a.gz" if packed else "a")
    for content in (b"published", b"altered"):
        path.write_bytes(gzip.compress(content, mtime=7) if packed else content)
        if content == b"published":
            assert folder.read("mnist/a") == content
        else:
            with pytest.raises(ConfigError, match="not the published file") as wrong:
                folder.read("mnist/a")
            assert "get it again" in wrong.value.hint


def test_a_gzip_bomb_ends_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        unknown(tmp_path).read("a", limit=1_000)


def test_a_damaged_gzip_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 1_000)[:-9])
    with pytest.raises(ConfigError, match="cannot read"):
        unknown(tmp_path).read("a")


def archive_of(path: Path, **members: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"gzip/{name}", content)
    return path


def test_what_is_published_in_an_archive_is_read_from_it_and_what_is_unpacked_beside_it_comes_first(
    tmp_path: Path,
) -> None:
    archive_of(tmp_path / "emnist" / "gzip.zip", **{"a.gz": gzip.compress(b"packed twice"), "b": b"packed"})
    folder = unknown(tmp_path)
    assert (folder.read("emnist/a"), folder.read("emnist/b")) == (b"packed twice", b"packed")
    assert not folder.has("emnist/c")
    with pytest.raises(ConfigError, match="emnist/c is not in the data folder") as missing:
        folder.read("emnist/c")
    assert "put it at emnist/gzip.zip" in missing.value.hint
    with pytest.raises(ConfigError) as packed:
        folder.read("mnist/t10k-labels-idx1-ubyte")
    assert "put it at mnist/t10k-labels-idx1-ubyte or mnist/t10k-labels-idx1-ubyte.gz in a folder" in packed.value.hint
    (tmp_path / "emnist" / "b").write_bytes(b"unpacked")
    assert folder.read("emnist/b") == b"unpacked"


def test_a_folder_that_is_not_there_is_told_beside_the_missing_file(tmp_path: Path) -> None:
    """A misspelled --data was told as a folder without the file."""
    with pytest.raises(ConfigError, match=r"mnist/a is not in the data folder .*/dta: there is no such folder\n"):
        unknown(tmp_path / "dta").read("mnist/a")
    with pytest.raises(ConfigError) as empty:
        unknown(tmp_path).read("mnist/a")
    assert "no such folder" not in str(empty.value)


def test_an_altered_archive_is_refused_before_anything_is_read_from_it(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "emnist" / "gzip.zip", a=b"published")
    known = {"emnist/gzip.zip": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert DataFolderReader(path=tmp_path, known=known).read("emnist/a") == b"published"
    archive_of(path, a=b"altered")
    with pytest.raises(ConfigError, match="not the published file") as wrong:
        DataFolderReader(path=tmp_path, known=known).read("emnist/a")
    assert "nist.gov" in wrong.value.hint


def test_a_bomb_in_an_archive_ends_at_the_limit_and_damage_is_a_config_error(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "emnist" / "gzip.zip", a=bytes(10_000_000))
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        unknown(tmp_path).read("emnist/a", limit=1_000)
    whole = bytearray(path.read_bytes())
    whole[60] ^= 0xFF  # within the packed content
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match="cannot read"):
        unknown(tmp_path).read("emnist/a")
    path.write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="cannot read"):
        unknown(tmp_path).has("emnist/a")


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was opened",))


def test_no_pickle_is_opened_whatever_the_archive_holds(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    (tmp_path / "bare.npz").write_bytes(pickle.dumps(Harmful()))
    with zipfile.ZipFile(tmp_path / "inside.npz", "w") as archive:
        archive.writestr("x.npy", pickle.dumps(Harmful()))
    for name in ("objects.npz", "bare.npz", "inside.npz"):
        with pytest.raises(ConfigError) as told:
            unknown(tmp_path).arrays(name)
        assert "allow_pickle" not in str(told.value)  # numpy's advice is to load it unsafely


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    held = io.BytesIO()
    np.savez_compressed(held, x=np.zeros(1_000_000))
    (tmp_path / "a.npz").write_bytes(held.getvalue())
    with pytest.raises(ConfigError, match="unpacks to"):
        unknown(tmp_path).arrays("a.npz", limit=100_000)


def test_every_file_with_a_checksum_says_where_to_get_it() -> None:
    assert {name.split("/")[0] for name in SHA256} <= HOME_PAGES.keys()
    assert {archive for archive, _ in ARCHIVES.values()} <= SHA256.keys()
