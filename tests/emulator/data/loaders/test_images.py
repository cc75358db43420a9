from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import ConfigError
from emulator.data.loaders import images
from tests.support.raw_data_files import unknown, write_idx, write_mnist


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_and_fashion_mnist_are_read_as_they_are_published(tmp_path: Path, suffix: str) -> None:
    for home, read in (("mnist", images.mnist), ("fashion-mnist", images.fashion_mnist)):
        write_mnist(tmp_path, home, suffix=suffix)
        data = read(unknown(tmp_path))
        assert data.test is not None
        assert (data.train.x.shape, data.test.x.shape) == ((40, 1, 28, 28), (10, 1, 28, 28))
        assert data.train.x.dtype == np.dtype(np.uint8)
        assert data.train.y.tolist() == [i % 10 for i in range(40)]
        held = data.dataset(data.train)
        assert held.x.dtype == np.dtype(np.float32)
        assert (held.x.min(), held.x.max()) == (-1.0, 1.0)


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, "mnist")
    for wrong in (np.arange(39) % 10, np.full(40, 10)):
        write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", wrong.astype(np.uint8))
        with pytest.raises(ConfigError, match="labels"):
            images.mnist(unknown(tmp_path))


def writers_of(n: int, first: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    i = np.arange(n)
    columns = [i % 10, np.where(i % 4 < 2, 0, 4), first + i % 4, i, i, i, 0 * i, 0 * i]
    return np.stack(columns, axis=1).astype(np.int32)


def test_the_writers_of_mnist_are_users_and_their_series_is_their_domain(tmp_path: Path) -> None:
    write_mnist(tmp_path, "mnist")
    write_idx(tmp_path / "mnist" / "qmnist-train-labels-idx2-int.gz", writers_of(40, 100))
    write_idx(tmp_path / "mnist" / "qmnist-test-labels-idx2-int.gz", writers_of(60, 200))  # MNIST has the first ten
    data = images.mnist_writers(unknown(tmp_path))
    assert data.test is None
    assert len(data.train) == 50
    assert data.train.user is not None
    assert data.train.domain is not None
    assert sorted(set(data.train.user.tolist())) == [100, 101, 102, 103, 200, 201, 202, 203]
    assert set(data.train.domain[data.train.user % 4 < 2].tolist()) == {0}
    assert set(data.train.domain[data.train.user % 4 > 1].tolist()) == {1}


def test_extended_labels_of_other_images_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, "mnist")
    for part in ("train", "test"):
        write_idx(tmp_path / "mnist" / f"qmnist-{part}-labels-idx2-int.gz", writers_of(40, 0)[::-1].copy())
    with pytest.raises(ConfigError, match="extended labels"):
        images.mnist_writers(unknown(tmp_path))


@pytest.mark.parametrize("packed", [True, False])
def test_emnist_letters_are_upright_and_know_their_case(tmp_path: Path, *, packed: bool) -> None:
    labels = np.array([3, 10, 35, 36, 61], np.uint8)  # a digit, A, Z, a, z
    stored = np.zeros((5, 28, 28), np.uint8)
    stored[:, 2, 20] = 255  # the file is transposed: really row 20, column 2
    home = tmp_path / ("gzip" if packed else "emnist")
    for part in ("train", "test"):
        write_idx(home / f"emnist-byclass-{part}-images-idx3-ubyte.gz", stored)
        write_idx(home / f"emnist-byclass-{part}-labels-idx1-ubyte.gz", labels)
    if packed:
        shutil.make_archive(str(tmp_path / "emnist" / "gzip"), "zip", tmp_path, "gzip")
    data = images.emnist_letters(unknown(tmp_path))
    assert data.train.y.tolist() == [0, 25, 0, 25]
    assert data.train.domain is not None
    assert data.train.domain.tolist() == [1, 1, 0, 0]
    assert np.argwhere(data.train.x[0, 0]).tolist() == [[20, 2]]


def write_cifar(folder: Path, name: str, labels: list[int]) -> None:
    path = folder / "cifar10" / "cifar-10-batches-bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = np.repeat(np.array([10, 20, 30], np.uint8), 1024).tobytes()
    path.write_bytes(b"".join(bytes([label]) + planes for label in labels))


def test_cifar_is_read_from_its_binary_batches(tmp_path: Path) -> None:
    for i in range(1, 6):
        write_cifar(tmp_path, f"data_batch_{i}.bin", [i, 0])
    write_cifar(tmp_path, "test_batch.bin", [9])
    data = images.cifar10(unknown(tmp_path))
    assert data.train.y.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert data.train.x.shape == (10, 3, 32, 32)
    assert data.train.x[0, :, 5, 7].tolist() == [10, 20, 30]
    assert data.test is not None
    assert data.test.y.tolist() == [9]
    assert data.note == ""


@pytest.mark.parametrize("wrong", [b"", b"\0" * 3072, bytes([10]) + b"\0" * 3072])
def test_batches_of_another_length_or_class_are_refused(tmp_path: Path, wrong: bytes) -> None:
    write_cifar(tmp_path, "data_batch_1.bin", [0])
    (tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(wrong)
    with pytest.raises(ConfigError, match=r"records|ten classes"):
        images.cifar10(unknown(tmp_path))


def test_the_python_version_of_cifar_is_refused_unopened(tmp_path: Path) -> None:
    path = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_1"
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(ConfigError, match="pickles") as wrong:
        images.cifar10(unknown(tmp_path))
    assert "binary version" in wrong.value.hint


def test_differenced_planes_give_the_pictures_back_and_say_that_they_went_through_jpeg(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(256, size=(4, 3, 32, 32), dtype=np.uint8)
    red, green, blue = pictures.transpose(1, 0, 2, 3)
    planes = np.stack([green, red - green, blue - green])  # modulo 256, as uint8 is
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=np.uint8(0))
    (tmp_path / "cifar10").mkdir()
    arrays = {"q_train": planes, "q_test": planes[:, :2], "y_train": np.arange(4), "y_test": np.arange(2)}
    np.savez(tmp_path / "cifar10" / "cifar10_from_jpeg_delta.npz", **arrays)  # type: ignore[arg-type]
    data = images.cifar10(unknown(tmp_path))
    np.testing.assert_array_equal(data.train.x, pictures)
    assert "JPEG" in data.note
