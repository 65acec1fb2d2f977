"""An engine and a browser for all files that ask them and leave them as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_browser import NOT_THERE, Browser, browser_path
from helpers_gateway import Served, served_to_openai


@pytest.fixture(scope="session")
def packaged() -> Iterator[Served]:
    """With the packaged model, for as long as there are tests."""
    with served_to_openai() as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        pytest.skip(NOT_THERE)
    with Browser(path) as found:
        yield found
