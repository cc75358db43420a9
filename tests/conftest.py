"""Fixtures that several rooms share: brokers, a free port, a browser, and how hard hypothesis looks."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from coordinator import local_broker as brokers
from tests.support import ports
from tests.support.patience import patience
from tests.support.requirements import IN_CI, skip_without

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
pytest_plugins = ["tests.support.browser", "tests.support.virtual_time"]

# "ci" draws the same examples every time; "long" is for looking by hand: HYPOTHESIS_PROFILE=long make test.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=2_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("ci"), max_examples=15)  # make mutants looks with these first
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# A shell that starts `make test` in the background lets its children ignore SIGINT, and ours would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Read when torch is imported: the workers of a test run use all cores, and more threads wait for each other, spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SLOW_TIMEOUT_S = 3_000  # ResNet-18 for three engines, on a busy machine


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there after the collection stays: the garbage collector does not look at millions of objects in it.

    It still finds what a test leaves behind, but seldom looks through everything: imports and recorded steps grow.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 1_000)


def pytest_collection_finish() -> None:
    """pytest gives its handlers to each of torch's forty loggers that do not propagate, six times in each test.

    And torch makes a record with a stack of each step that it compiles for one of them, if that has a handler.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked slow may take its time. Files that may take longest come first: none is left for one worker."""
    longest: dict[Path, float] = {}
    for item in items:
        given = item.get_closest_marker("timeout")
        if item.get_closest_marker("slow"):
            if not given:
                item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
        elif given:
            longest[item.path] = max([longest.get(item.path, 0.0), *given.args])
        if (factor := patience(1)) != 1:
            limit = item.get_closest_marker("timeout")
            most_s = float(limit.args[0] if limit else item.config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(factor * most_s), append=False)
    items.sort(key=lambda item: -longest.get(item.path, 0.0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `broker` needs mosquitto, one marked `browser` a browser: without, it skips, and fails in CI.

    One marked `gpu` skips without a CUDA device everywhere.
    """
    seed_by_name(item.nodeid)
    from tests.support.browser import find_chromium  # not before pytest has loaded the plugin

    if item.get_closest_marker("broker") and brokers.find_mosquitto() is None:
        skip_without("mosquitto is not installed (apt install mosquitto)")
    if item.get_closest_marker("browser") and find_chromium() is None:
        skip_without("chromium is not installed (apt install chromium)")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")


def seed_by_name(name: str) -> None:
    """A test draws the same weights whichever tests its worker has run before, so that a failure comes again."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:  # torch.manual_seed formats three stacks besides, for GPUs that are not in use yet
        sys.modules["torch"].default_generator.manual_seed(seed)


# What CI does not install, and where it is tested instead. Any other skip fails in CI.
SKIPS_IN_CI = (
    "make readers",
    "make brokers",
    "make models",
    "comes with flwr-datasets",
    "Lightning",
    "CUDA",
    "FEDCENTERS_DATA",
    "mount namespaces",
    "Go and its MQTT library",  # 50 s to install; by hand, after a change of the protocol: pytest tests/second_client
    "Firefox",  # 250 MB to install; by hand, after a change of the page: pytest tests/web/test_firefox.py
    "ONNX Runtime's headers",  # Debian 12 has none; by hand: ONNXRUNTIME_INCLUDE=... pytest tests/edge_client/engines
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips in CI has lost its promise unseen."""
    return fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So has a whole file."""
    return fail_if_skipped((yield))


def fail_if_skipped(report: Report) -> Report:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if IN_CI and report.skipped and reason and not any(known in reason for known in SKIPS_IN_CI):
        report.outcome, report.longrepr = "failed", f"{reason}; CI must have it (SKIPS_IN_CI in tests/conftest.py)"
    return report


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Processes die in the tests, machines do not. The processes that tests start wait for it, and those here that ask.

    A descriptor that is not open is an error all the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where the workers of a test run keep compiled programs for one another (tests/support/programs.py)."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder.mkdir(exist_ok=True)
    os.environ["COMPILED_PROGRAMS"] = str(folder)


@pytest.fixture(scope="session", autouse=True)
def compile_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Test runs have a cache of compiled containers of their own, in .pytest_cache; --cache-clear empties it.

    COMPILED_CONTAINERS names another folder, as `.ci/run` does for all clones of a user. A file's name has the hash of
    the compiler's source in it, so that none is another compiler's. Tests of the compiler and the demo compile all the
    same. Without pytest's cache (-p no:cacheprovider) a run begins with an empty folder.
    """
    if named := os.environ.get("COMPILED_CONTAINERS"):
        folder = Path(named)
    elif request.config.pluginmanager.has_plugin("cacheprovider"):
        folder = request.config.cache.mkdir("fedcenters")
    else:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    os.environ["FEDCENTERS_CACHE"] = str(folder)


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    return ports.free_port()


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[brokers.Broker]:
    """A fresh mosquitto for one test; `.url` is its address. Mark the test with `@pytest.mark.broker`."""
    with brokers.start_broker(tmp_path / "mosquitto", "mosquitto") as broker:
        yield broker


@pytest.fixture
def amqtt_broker(tmp_path: Path) -> Iterator[brokers.Broker]:
    """A fresh embedded broker for one test; `.url` is its address. It speaks MQTT 3.1.1 only."""
    with brokers.start_broker(tmp_path / "amqtt", "embedded") as broker:
        yield broker
