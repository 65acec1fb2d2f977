"""What a model is called, and where it is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from wire import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Json,
    Server,
    chat,
    completion,
    generate,
    message,
    response,
)

pytestmark = pytest.mark.conformance
BODIES: dict[str, Json] = {COMPLETIONS: completion(max_tokens=1), CHAT: chat(max_tokens=1),
                           RESPONSES: response(max_output_tokens=1),
                           MESSAGES: message(max_tokens=1), "/tokenize": {"prompt": "a"},
                           "/detokenize": {"tokens": [5]}}
routes = pytest.mark.parametrize("path", BODIES)


def known(server: Server) -> dict[str, Any]:
    """Names that it answers to."""
    given = {"served": server.model, "default": "default", "empty": "", "null": None}
    if server.path:
        given |= {"path": server.path, "path with a slash": server.path + "/",
                  "last part": Path(server.path).name}
    return given


@routes
@pytest.mark.parametrize("kind", ["served", "default", "empty", "null", "absent", "path",
                                  "path with a slash", "last part"])
def test_names_that_are_known(server: Server, path: str, kind: str) -> None:
    body = dict(BODIES[path])
    body.pop("model", None)
    if kind != "absent":
        names = known(server)
        body["model"] = names.get(kind, server.model)
    assert server.post(path, body).ok()


@routes
def test_a_name_that_is_not(server: Server, path: str) -> None:
    answer = server.post(path, BODIES[path] | {"model": "no-such-model"})
    assert answer.status == 404, answer.text
    assert "no-such-model" in answer.json["error"]["message"]
    if path not in (MESSAGES,):
        assert answer.json["error"]["code"] in ("model_not_found", 404)
        assert answer.json["error"]["param"] == "model"


@routes
def test_a_name_of_a_wrong_type(server: Server, path: str) -> None:
    assert server.post(path, BODIES[path] | {"model": 5}).status == 400


def test_the_answer_says_the_name(server: Server) -> None:
    assert server.complete(model="default")["model"] == server.model


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_the_list(server: Server, path: str) -> None:
    found = server.get(path).ok()
    assert found["object"] == "list"
    (card,) = found["data"]
    assert card["id"] == server.model and card["object"] == "model"
    assert isinstance(card["created"], int) and isinstance(card["owned_by"], str)
    assert isinstance(card["max_model_len"], int) and card["root"]


def test_one_card(server: Server) -> None:
    assert server.get(f"/v1/models/{server.model}").ok()["id"] == server.model
    server.get("/v1/models/no-such-model").error(404)


def test_the_native_api_takes_a_name(server: Server) -> None:
    assert server.post(GENERATE, generate(model=server.model)).ok()["text"]
