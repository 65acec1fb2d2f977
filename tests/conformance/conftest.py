"""Tests with packages and minutes of their own: only with `-m conformance`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from actorium.actors.client_link import locate
from actorium.actors.engine import Engine
from actorium.actors.gateway import actor

HERE = Path(__file__).parent
CLIENTS = ("anthropic", "guidellm", "langchain_openai", "litellm", "lm_eval", "openai",
           "schemathesis")


class Served(NamedTuple):
    """An engine with the packaged model, and where it answers."""

    engine: Engine
    url: str


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One for all of them."""
    with Engine("", port=0, max_num_seqs=16) as engine:
        where = actor.where(locate(engine.name, None, None))  # type: ignore[arg-type]
        assert where is not None
        yield Served(engine, where.url)


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker; where they are asked for, none may be skipped for want of its client."""
    missing = [name for name in CLIENTS if importlib.util.find_spec(name) is None]
    if missing and _asked_for(config):
        raise pytest.UsageError(f"{', '.join(missing)}: not installed here; see setup.sh")
    config.addinivalue_line("markers", "conformance: real clients and generated requests, minutes "
                                       "long; run by its own make target")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip them unless they are asked for."""
    if _asked_for(config):
        return
    skip = pytest.mark.skip(reason="run by `make conformance`")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


def _asked_for(config: pytest.Config) -> bool:
    return "conformance" in (config.option.markexpr or "")
