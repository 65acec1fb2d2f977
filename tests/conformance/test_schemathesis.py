"""Every route, asked by schemathesis what its schema allows, and what it does not: no 5xx, and
answers that are what the document of the running engine says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from actorium.actors.gateway import actor
from actorium.actors.gateway.page.openapi import document
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    ignored_auth,
    response_schema_conformance,
)

pytestmark = pytest.mark.conformance
EXAMPLES = 30
"""Requests for each route and mode."""
WAITING = ("/readyz", "/health", "/v1/health", "/health_generate")
"""Say 503 while there is too much to do."""
LIMITS = {"/v1/chat/completions": {"max_tokens": 2, "max_completion_tokens": 2},
          "/v1/completions": {"max_tokens": 2}, "/v1/responses": {"max_output_tokens": 2},
          "/v1/messages": {"max_tokens": 2}, "/invocations": {"max_tokens": 2},
          "/generate": {"sampling_params": {"max_new_tokens": 2}},
          "/inference/v1/generate": {"sampling_params": {"max_tokens": 2}}}
"""A completion to the end of the context would take its time."""


def operations() -> list[tuple[str, str, str]]:
    """(path, method, mode) of every route, once for all its names; a request without a body cannot
    be wrong."""
    found: dict[tuple[str, str], bool] = {}
    for path, methods in document()["paths"].items():
        for method, told in methods.items():
            name = path.removeprefix("/v1")
            if (name, method) not in found and (f"/v1{name}", method) not in found:
                found[path, method] = "requestBody" in told
    return [(path, method, mode) for (path, method), body in found.items()
            for mode in ("positive", "negative") if body or mode == "positive"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Engine("", port=0, max_num_seqs=8) as engine:
        where = actor.where(engine_dir(engine.name))  # type: ignore[arg-type]
        assert where is not None
        yield where.url


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("path,method,mode", operations())
def test_no_route_fails(url: str, schema: Any, path: str, method: str, mode: str) -> None:
    asked = 0

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy(
        generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        if isinstance(case.body, dict):
            case.body |= {name: limit for name, limit in LIMITS.get(path, {}).items()
                          if mode == "positive" or name not in case.body}
        answer = case.call(base_url=url, timeout=60)
        if path not in WAITING:
            assert answer.status_code < 500 or answer.status_code == 501, (
                case.as_curl_command(), answer.text)
        case.validate_response(answer, checks=[response_schema_conformance,
                                               content_type_conformance, ignored_auth])
        if answer.status_code >= 400 and path.startswith("/v1"):
            assert {"message", "type"} <= set(answer.json()["error"])

    ask()
    assert asked
