from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.data.dataset import Dataset, DeviceData, batches, describe_misfit, load_folder
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.program import IGNORED
from tests.support import softmax_program


def write(folder: Path, name: str, **arrays: np.ndarray) -> None:
    np.savez(folder / name, **arrays)  # type: ignore[arg-type]  # numpy's stub takes no **dict


def test_what_was_written_is_read(tmp_path: Path) -> None:
    x, y = np.ones((3, 2), np.float32), np.array([0, 2, 1])
    write(tmp_path, "train.npz", x=x, y=y)
    write(tmp_path, "test.npz", x=x[:1], y=y[:1])
    local = load_folder(tmp_path)
    assert local.test is not None
    assert (local.train.x == x).all()
    assert (local.train.y == y).all()
    assert len(local.test) == 1


def test_samples_show_their_number_and_shape() -> None:
    x = np.ones((3, 1, 2), np.float32)
    train, test = Dataset(x, np.array([0, 2, 1])), Dataset(x[:1], np.ones((1, 4), np.float32))
    assert repr(train) == "Dataset(3 samples [1, 2], classes)"
    assert repr(DeviceData(train=train, test=test)) == (
        "DeviceData(train=Dataset(3 samples [1, 2], classes), test=Dataset(1 sample [1, 2], targets [4]))"
    )


def test_held_out_samples_are_optional(tmp_path: Path) -> None:
    write(tmp_path, "train.npz", x=np.ones((3, 2)), y=np.zeros(3, np.int8))
    assert load_folder(tmp_path).test is None


def test_whole_numbers_become_floating_point_samples_and_labels_64_bits(tmp_path: Path) -> None:
    write(tmp_path, "train.npz", x=np.ones((3, 2), np.uint8), y=np.zeros(3, np.uint8))
    train = load_folder(tmp_path).train
    assert train.x.dtype == np.dtype(np.float32)
    assert train.y.dtype == np.dtype(np.int64)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "does not exist"),
        ({"x": np.ones((2, 2))}, "lacks the array"),
        ({"x": np.ones((2, 2)), "y": np.zeros(3, int)}, "must agree"),
        ({"x": np.full((2, 2), np.nan), "y": np.zeros(2, int)}, "NaN"),
        ({"x": np.ones((2, 2)), "y": np.array([0, -1])}, "from 0"),
        ({"x": np.ones((2, 2)), "y": np.array(["a", "b"])}, "use integers"),
        ({"x": np.ones((2, 2)), "y": np.array([{}, {}], dtype=object)}, "holds objects, not numbers"),
    ],
)
def test_a_wrong_folder_is_named_with_a_hint(tmp_path: Path, arrays: dict[str, np.ndarray], says: str) -> None:
    if arrays:
        write(tmp_path, "train.npz", **arrays)
    with pytest.raises(ConfigError, match=says) as wrong:
        load_folder(tmp_path)
    assert "train.npz" in wrong.value.message
    assert wrong.value.hint


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones(3))
    for content in (b"", b"no zip", b"PK\x03\x04 broken", (tmp_path / "one.npy").read_bytes()):
        (tmp_path / "train.npz").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot use"):
            load_folder(tmp_path)


def test_labels_per_position_may_leave_some_out_and_are_else_from_0() -> None:
    x = np.zeros((2, 3), np.float32)
    assert len(Dataset(x, np.array([[0, IGNORED, 2], [1, 1, 1]]))) == 2
    with pytest.raises(ValueError, match="-100 to leave a position out"):
        Dataset(x, np.array([[0, -1, 2], [1, 1, 1]]))
    with pytest.raises(ValueError, match="one integer per sample, from 0"):
        Dataset(x, np.array([0, IGNORED]))


def test_targets_may_have_any_shape() -> None:
    assert len(Dataset(np.ones((2, 3)), np.ones((2, 4)))) == 2


@given(n=st.integers(1, 50), batch=st.integers(1, 60), seed=st.integers(0, 2**53 - 1), passes=st.integers(1, 3))
def test_every_pass_reads_every_sample_once(n: int, batch: int, seed: int, passes: int) -> None:
    per_pass = -(-n // batch)
    cut = list(batches(n, batch, seed, passes * per_pass, fixed=False))
    for p in range(passes):
        read = np.concatenate(cut[p * per_pass : (p + 1) * per_pass])
        assert sorted(read) == list(range(n))


@given(n=st.integers(1, 50), batch=st.integers(1, 50), steps=st.integers(1, 20))
def test_a_fixed_batch_is_always_full_and_never_repeats_within_a_pass(n: int, batch: int, steps: int) -> None:
    if n < batch:
        with pytest.raises(Malformed, match="no_data"):
            batches(n, batch, 0, steps, fixed=True)
        return
    cut = list(batches(n, batch, 0, steps, fixed=True))
    assert [len(b) for b in cut] == [batch] * steps
    first = np.concatenate(cut[: n // batch])
    assert len(set(first.tolist())) == len(first)


def test_batches_are_the_permutations_of_pcg64_cut_in_order() -> None:
    rng = np.random.Generator(np.random.PCG64(9))
    expected = [*np.split(rng.permutation(4), 2), *np.split(rng.permutation(4), 2)]
    assert [b.tolist() for b in batches(4, 2, 9, 3, fixed=False)] == [b.tolist() for b in expected[:3]]


def test_no_samples_is_refused_before_anything_runs() -> None:
    with pytest.raises(Malformed, match="no_data"):
        batches(0, 4, 0, 1, fixed=False)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_numbers_that_are_no_probabilities_are_no_soft_labels(kind: type) -> None:
    """Cross-entropy of numbers to predict has no end: its loss fell below any number, without a word."""
    program, x = softmax_program.program(), np.zeros((4, softmax_program.FEATURES), np.float32)
    soft: np.ndarray = np.random.default_rng(0).dirichlet(np.ones(softmax_program.CLASSES), size=4).astype(kind)
    assert describe_misfit(program, Dataset(x, soft)) == ""
    for numbers in (2 * soft, soft - np.eye(4, softmax_program.CLASSES, dtype=kind)):
        assert "save class labels as integers; numbers to predict need" in describe_misfit(program, Dataset(x, numbers))
    assert describe_misfit(replace(program, loss="squared-error"), Dataset(x, 2 * soft)) == ""
    assert describe_misfit(replace(program, own_loss=True), Dataset(x, soft)).startswith("y holds floating point")


def test_a_number_that_the_program_would_make_infinite_is_named_with_its_row(tmp_path: Path) -> None:
    program = replace(softmax_program.program(), dtype="float32")
    x = np.zeros((4, *program.input))
    x[2, 1] = 1e39
    write(tmp_path, "train", x=x, y=np.zeros(4, np.int64))
    data = load_folder(tmp_path).train
    assert describe_misfit(program, data) == "x[2, 1] is 1e+39, which float32 cannot hold: scale x"
    assert not describe_misfit(program, Dataset(np.minimum(x, 1e38), data.y))


def test_what_is_no_number_is_named_by_its_place_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name, last in (("a", 1.0), ("b", np.inf)):
        write(tmp_path / "train", name, x=np.array([[0.0, 1.0], [2.0, last]]), y=np.zeros(2, np.int64))
    with pytest.raises(ConfigError, match=r"cannot use train/b\.npz: x holds NaN or infinity, first in x\[1, 1\]"):
        load_folder(tmp_path)
