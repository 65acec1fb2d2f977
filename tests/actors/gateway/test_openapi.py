"""The document says what the routes do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway.app import build_app, handlers_of
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.api_keys import Keys
from actorium.actors.gateway.http.routes import ROUTES, Access
from actorium.actors.gateway.page.openapi import OPERATIONS, PAGES, document


def test_every_route_is_in_the_document_with_its_method() -> None:
    app: Any = build_app(GatewayState(Config(), Path("none")))
    served = {(route.path.replace(":path", ""), method) for route in app._app.routes
              for method in route.methods}
    served -= {(path, "GET") for route in ROUTES if route.name in PAGES for path in route.paths}
    made = document()["paths"]
    told = {(path, method.upper()) for path, methods in made.items() for method in methods}
    assert {(path, method) for path, method in served if method != "HEAD"} == told
    names = [one["operationId"] for methods in made.values() for one in methods.values()]
    assert len(set(names)) == len(names)


def test_every_name_of_a_route_has_a_handler_and_an_operation() -> None:
    names = {route.name for route in ROUTES}
    assert names == set(handlers_of(GatewayState(Config(), Path("none"))))
    assert names - PAGES == set(OPERATIONS)


def paths_missing_in(text: str) -> list[str]:
    """Returns the first path of each route for programs that a text does not name."""
    return [path for route in ROUTES if route.name not in PAGES
            for path in [route.paths[0].replace("{name:path}", "{id}")]
            if not re.search(rf"(?<![\w/}}]){re.escape(path)}(?![\w/])", text)]


def test_the_guide_names_every_route() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "http-routes.md").read_text()
    assert paths_missing_in(guide) == []
    assert paths_missing_in(guide.replace("`/livez`", "").replace("`GET /health`", "")) == [
        "/health", "/livez"]


def test_a_key_is_asked_for_where_there_are_keys() -> None:
    """And nowhere else: clients that are made from the document would ask their users for one."""
    def locked(**settings: Any) -> set[str]:
        made = document(Keys(GatewayConfig(**settings)).guard)
        found = {path: [one["security"] for one in methods.values() if "security" in one]
                 for path, methods in made["paths"].items()}
        assert all(one == [{"key": []}] for each in found.values() for one in each)
        return {path for path, each in found.items() if each}

    assert locked() == set()
    assert locked(admin_key="root") == {path for route in ROUTES for path in route.paths
                                        if route.access is Access.ADMIN}
    every = locked(api_key="k")
    assert "/v1/chat/completions" in every and "/metrics" in every
    assert not every & {"/health", "/version", "/openapi.json"}


@pytest.mark.parametrize("path", ["/generate", "/invocations"])
def test_answers_to_several_prompts_are_lists(path: str) -> None:
    made = document()["paths"][path]["post"]["responses"]["200"]["content"]
    kinds = {one["type"] for one in made["application/json"]["schema"]["anyOf"]}
    assert kinds == {"object", "array"} and "text/event-stream" in made


def test_every_reference_leads_somewhere() -> None:
    made = document()
    schemas = made["components"]["schemas"]
    refs = set(_refs(made))
    assert refs and all(ref.removeprefix("#/components/schemas/") in schemas for ref in refs)


def _refs(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in _refs(value)]
    return [ref for one in node for ref in _refs(one)] if isinstance(node, list) else []


@pytest.mark.parametrize("path", [route.paths[0] for route in ROUTES
                                  if route.name not in PAGES and OPERATIONS[route.name].streams])
def test_a_body_has_the_fields_of_its_type(path: str) -> None:
    made = document()
    ref = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = made["components"]["schemas"][ref["$ref"].rpartition("/")[2]]
    assert {"stream"} <= set(schema["properties"])
