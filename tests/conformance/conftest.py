"""`pytest tests/conformance --method MODULE:CLASS` holds a method of the reader's own to what every method promises."""

from __future__ import annotations

import pytest

from coordinator.strategies.registry import make_method, method_settings


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "a method by its name or import path; only the tests that every method passes are run, with it. Repeatable"
    parser.addoption("--method", action="append", metavar="MODULE:CLASS", help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `every_method(cases)` is run with each case as `name`, and each of its settings as `key`."""
    marker = metafunc.definition.get_closest_marker("every_method")
    if marker is None:
        return
    (cases,) = marker.args
    names = _asked(metafunc.config) or cases
    if "key" in metafunc.fixturenames:
        pairs = [(name, key) for name in names for key in method_settings(make_method(name))]
        metafunc.parametrize(("name", "key"), pairs)
    else:
        metafunc.parametrize("name", names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--method` the other tests are left out."""
    if not _asked(config):
        return
    left_out = [item for item in items if not item.get_closest_marker("every_method")]
    items[:] = [item for item in items if item.get_closest_marker("every_method")]
    config.hook.pytest_deselected(items=left_out)


def _asked(config: pytest.Config) -> list[str]:
    return config.getoption("--method", default=None) or []
