"""The document says what the routes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorium.actors.config import Config
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.engine import Engine
from actorium.actors.gateway.openapi import OPERATIONS, document

PAGES = {"/", "/dashboard/events"}


def test_every_route_is_in_it_with_its_method() -> None:
    app: Any = build_app(Engine(Config(), Path("none")))
    routes = {route.path.replace(":path", ""): route.methods for route in app._app.routes}
    told = {path: {method.upper() for method in methods}
            for path, methods in document()["paths"].items()}
    extra = {path for path in routes if path.startswith("/page/") or path in PAGES}
    assert set(routes) - extra == set(told)
    for path, methods in told.items():
        assert methods <= routes[path], path


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


@pytest.mark.parametrize("path", [path for path, one in OPERATIONS.items() if one.streams])
def test_a_body_has_the_fields_of_its_type(path: str) -> None:
    made = document()
    ref = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = made["components"]["schemas"][ref["$ref"].rpartition("/")[2]]
    assert {"stream"} <= set(schema["properties"])
