"""Every route, asked by schemathesis what its schema allows, and what it does not: no 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from actorium.actors.client_link import locate
from actorium.actors.engine import Engine
from actorium.actors.gateway import actor

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.conformance
EXAMPLES = 40
"""Bodies for each route and mode."""
WAITING = ("/readyz", "/health", "/health_generate")
"""Say 503 while there is too much to do."""
ALWAYS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}
"""A completion to the end of the context would take its time."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Engine("", port=0, max_num_seqs=8, probe_port=0) as engine:
        where = actor.where(locate(engine.name, None, None))  # type: ignore[arg-type]
        assert where is not None
        yield where.url


def bounded(body: Any) -> Any:
    """The same, ending soon if it is a completion that could run."""
    if not isinstance(body, dict):
        return body
    wanted = {name: 2 for name in ALWAYS if isinstance(body.get(name), int | None)
              and not isinstance(body.get(name), bool)}
    return body | wanted if "stream" in body or "messages" in body or "prompt" in body else body


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_route_fails(url: str, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    asked = sum(ask_all(url, found.ok(), mode) for found in schema.get_all_operations())
    assert asked > 100


def ask_all(url: str, operation: Any, mode: str) -> int:
    """How often one route was asked."""
    if mode == "negative" and operation.method == "get":
        return 0
    asked = 0

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        case.body = bounded(case.body)
        answer = case.call(base_url=url, timeout=60)
        if operation.path not in WAITING:
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400 and operation.path.startswith("/v1"):
            assert {"message", "type"} <= set(answer.json()["error"])

    ask()
    return asked
