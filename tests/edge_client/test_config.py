"""The configuration: right values are read, wrong ones are named with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.config import load_config
from edge_client.errors import ConfigError

KEY = "ab" * 32
GOOD = {
    "federation": '"demo"',
    "device-id": '"dev-1"',
    "broker": '"mqtt://127.0.0.1:1883"',
    "data": '"data"',
    "state": '"/var/lib/x"',
    "signing-keys": f'["{KEY}"]',
}


def write(folder: Path, **changes: str | None) -> Path:
    table = GOOD | {key.replace("_", "-"): value for key, value in changes.items()}
    path = folder / "client.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in table.items() if value is not None))
    return path


def test_a_complete_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, engine='"litert"', threads="2"), {})
    assert (config.federation, config.device_id, config.engine, config.threads) == ("demo", "dev-1", "litert", 2)
    assert config.data == tmp_path / "data"
    assert config.state == Path("/var/lib/x")
    assert config.signing_keys == (bytes.fromhex(KEY),)


def test_a_file_of_a_windows_editor_is_read_as_any_other(tmp_path: Path) -> None:
    path = write(tmp_path)
    usual = load_config(path, {})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(path, {}) == usual


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environment = {
        "FEDCENTERS_BROKER": "mqtts://broker.example",
        "FEDCENTERS_THREADS": "4",
        "FEDCENTERS_SIGNING_KEYS": f"{'cd' * 32},{KEY}",
        "FEDCENTERS_UNRELATED": "x",
    }
    config = load_config(write(tmp_path), environment)
    assert (config.broker, config.threads, len(config.signing_keys)) == ("mqtts://broker.example", 4, 2)


def test_a_mistyped_variable_is_told_with_the_nearest_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_config(write(tmp_path), {"FEDCENTERS_MIN_BATERY_PERCENT": "0"})
    assert caplog.messages == [
        "FEDCENTERS_MIN_BATERY_PERCENT is not read: did you mean FEDCENTERS_MIN_BATTERY_PERCENT?"
    ]


def test_the_folder_of_samples_has_a_variable_of_its_own_and_the_emulators_does_not_replace_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data-sets" / "mnist").mkdir(parents=True)
    emulators = {"FEDCENTERS_DATA": str(tmp_path / "data-sets")}
    assert load_config(write(tmp_path), emulators).data == tmp_path / "data"
    assert load_config(write(tmp_path), emulators | {"FEDCENTERS_DEVICE_DATA": "/other"}).data == Path("/other")
    with pytest.raises(ConfigError, match="'data' is missing") as wrong:
        load_config(write(tmp_path, data=None), emulators)
    assert "or FEDCENTERS_DEVICE_DATA" in wrong.value.hint
    assert not caplog.messages


def test_a_device_whose_samples_the_emulators_variable_names_is_told_which_are_read_and_of_its_own_variable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "former").mkdir()
    (tmp_path / "former" / "train.npz").touch()
    config = load_config(write(tmp_path), {"FEDCENTERS_DATA": "former"})
    (told,) = caplog.messages
    assert told == (
        f"FEDCENTERS_DATA is the emulator's and not read here: this device's samples are in {config.data}; "
        "FEDCENTERS_DEVICE_DATA names another folder"
    )


def test_an_unknown_key_is_named_with_the_nearest_valid_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'signing-key'") as wrong:
        load_config(write(tmp_path, signing_key='"x"'), {})
    assert "did you mean 'signing-keys'?" in wrong.value.hint


def test_a_key_like_no_other_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as wrong:
        load_config(write(tmp_path, xyzzy="1"), {})
    assert "federation, device-id" in wrong.value.hint


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named_with_what_belongs_there(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is missing") as wrong:
        load_config(write(tmp_path, **{key.replace("-", "_"): None}), {})
    assert wrong.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation", '"Demo"'),
        ("device-id", '"a/b"'),
        ("device-id", '"+"'),
        ("broker", '"http://x"'),
        ("broker", '"mqtt://x:port"'),
        ("broker", '"mqtt://"'),
        ("engine", '"tensorflow"'),
        ("signing-keys", "[]"),
        ("signing-keys", '["zz"]'),
        ("signing-keys", '["' + "z" * 64 + '"]'),
        ("threads", "0"),
        ("threads", "true"),
        ("threads", '"two"'),
        ("data", "7"),
        ("min-battery-percent", "101"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_a_hint(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"client.toml: {key} = ") as wrong:
        load_config(write(tmp_path, **{key.replace("-", "_"): value}), {})
    assert wrong.value.hint


def test_an_absent_file_and_a_file_that_is_no_toml_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*\n\nhint: check the path"):
        load_config(tmp_path / "absent.toml", {})
    (tmp_path / "x.toml").write_text("federation = ")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "x.toml", {})
