"""The reader of a page. A test file names its page as PAGE, and in `here` what this machine needs instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.support.doc_pages import PageReader, followed


@pytest.fixture(scope="module")
def here() -> Mapping[str, str]:
    """What the page says -> what this machine needs instead."""
    return {}


@pytest.fixture(scope="module")
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, here: Mapping[str, str]
) -> Iterator[PageReader]:
    """A folder in which the page was followed from top to bottom."""
    with followed(request.module.PAGE, tmp_path_factory.mktemp("reader"), here=here) as reader:
        yield reader
