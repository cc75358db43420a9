"""Two commands that enrol one device at once, as `enrol` by hand and a service that begins with `join`."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from edge_client.runtime import enrolment
from edge_client.transport.keys import open_private_key
from edge_client.transport.tls import read_certificate
from tests.coordinator.identity.test_enrolment_over_https import config_of, listening
from tests.support.guarded_broker import provision_federation


def test_two_that_enrol_a_device_at_once_leave_a_key_and_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins when the first has found no key; it enrols to the end, or waits for the first."""
    work, told = provision_federation(tmp_path / "keys"), list[str]()
    work.add_token("d1")
    began, make, lock = threading.Event(), ec.generate_private_key, fcntl.flock
    with listening(work, []) as server:
        config = config_of(work, "d1", server)

        def enrol_too() -> None:
            try:
                enrolment.enrol(config, tell=told.append)
            finally:
                began.set()

        second = threading.Thread(target=enrol_too)

        def slow_make(curve: ec.EllipticCurve) -> ec.EllipticCurvePrivateKey:
            if second.ident is None:
                second.start()
                began.wait()
            return make(curve)

        def told_lock(file: int, how: int) -> None:
            if threading.current_thread() is second:
                began.set()
            lock(file, how)

        monkeypatch.setattr(ec, "generate_private_key", slow_make)
        monkeypatch.setattr(fcntl, "flock", told_lock)
        enrolment.enrol(config, tell=told.append)
        second.join()
    assert config.certificate is not None
    assert config.key is not None
    assert read_certificate(config.certificate).public_key() == open_private_key(config.key).public_key()
    assert len(told) == 1


def test_a_device_whose_folder_lies_where_files_have_no_locks_enrols_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks no file that is open to be read alone."""
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    lock = fcntl.flock

    def lock_like_nfs(file: int, how: int) -> None:
        if threading.current_thread() is threading.main_thread():  # of the device; the server has threads of its own
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, how)

    with listening(work, []) as server:
        config = config_of(work, "d1", server)
        monkeypatch.setattr(fcntl, "flock", lock_like_nfs)
        enrolment.enrol(config)
    assert config.certificate is not None
    assert config.certificate.is_file()
