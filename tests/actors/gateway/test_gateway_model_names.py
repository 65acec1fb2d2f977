"""Under which names an engine is found."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app

from actorium.actors.config.tree import Config, GatewayConfig, ModelConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.served_model import ModelNames


def names(model: str, *served: str, strict: bool = False) -> ModelNames:
    config = Config(model=ModelConfig(model=model, served_model_name=served),
                    gateway=GatewayConfig(strict_model_name=strict))
    return ModelNames(config, served[0] if served else model.rpartition("/")[2] or "demo")


@pytest.mark.parametrize("asked", ["org/name", "name", "default", "", None, "org/name/"])
def test_an_engine_accepts_all_its_model_names(asked: str | None) -> None:
    assert names("org/name").known(asked)
    assert names("org/name", "mine", "other").known(asked)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("served", ["name/", "<script>x</", "org/name//"])
def test_a_served_name_is_known_as_it_is_shown(served: str, strict: bool) -> None:
    assert names("org/name", served, strict=strict).known(served)


@pytest.mark.parametrize("asked", ["org", "gpt-4", "other/name", "Default", "nam"])
def test_an_engine_refuses_other_model_names(asked: str) -> None:
    assert not names("org/name").known(asked)
    assert not names("", "mine").known(asked)


def test_a_snapshot_of_the_hf_cache_has_its_repository_s_name() -> None:
    found = names("/cache/models--org--name/snapshots/abc", "org/name@v1")
    assert all(found.known(one) for one in ("org/name@v1", "org/name", "name"))


def test_strict_names() -> None:
    found = names("org/name", "mine", "my/other", strict=True)
    assert [found.known(one) for one in ("mine", "my/other", None, "")] == [True] * 4
    assert not any(found.known(one) for one in ("org/name", "name", "default", "other"))
    assert names("org/name", strict=True).served == ("name",)


@pytest.mark.parametrize("wrong", [("a", "a"), ("",), ("x" * 300,)])
def test_wrong_names_are_refused(wrong: tuple[str, ...]) -> None:
    with pytest.raises(BadConfig, match="served_model_name"):
        validate(Config(model=ModelConfig(served_model_name=wrong)))


def test_every_face_takes_any_name_and_shows_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=ModelConfig(model="/x/org/name", served_model_name=("first", "second")))
    script = Scripted(["a"])
    script.model = "first"
    app = scripted_app(monkeypatch, script, config)
    messages = [{"role": "user", "content": "?"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages}, "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"}, "/v1/messages": {"messages": messages, "max_tokens": 5}}

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for path, body in bodies.items():
                for name in ("first", "second", "/x/org/name", "name", "default", "", None):
                    answer = await client.post(path, json=body | {"model": name})
                    assert (answer.status_code, answer.json().get("model")) == (200, "first"), path
                answer = await client.post(path, json=body | {"model": "gpt-4"})
                assert answer.status_code == 404 and "gpt-4" in answer.text
            listed = (await client.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["first", "second"]
            for name, shown in (("second", "second"), ("default", "first")):
                assert (await client.get(f"/v1/models/{name}")).json()["id"] == shown
            missing = await client.get("/v1/models/gpt-4")
            assert missing.json()["error"]["code"] == "model_not_found"

    asyncio.run(ask())
