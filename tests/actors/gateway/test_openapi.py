"""The document says what the routes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorium.actors.config.tree import Config
from actorium.actors.gateway.app import build_app, handlers_of
from actorium.actors.gateway.http.routes import ROUTES
from actorium.actors.gateway.page.openapi import OPERATIONS, PAGES, document
from actorium.actors.gateway.served_engine import ServedEngine


def test_every_route_is_in_the_document_with_its_method() -> None:
    app: Any = build_app(ServedEngine(Config(), Path("none")))
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
    assert names == set(handlers_of(ServedEngine(Config(), Path("none"))))
    assert names - PAGES == set(OPERATIONS)


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
