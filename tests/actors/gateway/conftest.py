"""An engine for all files that ask it and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_gateway import Served, served_to_openai


@pytest.fixture(scope="session")
def packaged() -> Iterator[Served]:
    """With the packaged model, for as long as there are tests."""
    with served_to_openai() as found:
        yield found
