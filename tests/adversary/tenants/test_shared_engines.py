"""Tenants of a server of several models: who starts, keeps and ends the engines that all share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers_several_models import ModelsGateway, several_models
from helpers_tenants import ADMIN, ANN, BOB, key_file

from actorium.actors.config.tree import GatewayConfig

TURN = {"messages": [{"role": "user", "content": "Hi"}]}
OTHER_SITE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def settings(where: Path, **more: Any) -> GatewayConfig:
    return GatewayConfig(api_keys_file=key_file(where), **more)


async def nothing_starts(one: ModelsGateway) -> None:
    """The manager has seen what was sent, and no engine is started."""
    await one.client.get("/v1/models", headers=bearer(BOB))
    assert one.manager.core.health().gauges["starts"] == 0 and not one.manager.running


@pytest.mark.mended("GET /favicon.ico?model=NAME started an engine for callers without a key")
@pytest.mark.parametrize("path", ["/favicon.ico", "/", "/nothing", "/livez", "/api/version",
                                  "/v1/files", "/models/load", "/model_info"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "X"])
def test_no_engine_starts_for_who_has_no_key(path: str, method: str, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant",
                                  settings=settings(tmp_path)) as one:
            await one.client.request(method, f"{path}?model=ant")
            await nothing_starts(one)

    asyncio.run(run())


@pytest.mark.mended("paths and methods that there are not started an engine before their 404")
@pytest.mark.parametrize(("method", "path"), [("GET", "/nothing"), ("OPTIONS", "/model_info"),
                                              ("PUT", "/tokenize"), ("GET", "/v1/models/ant")])
def test_no_engine_starts_for_what_no_engine_answers(
        method: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant",
                                  settings=settings(tmp_path)) as one:
            await one.client.request(method, f"{path}?model=ant", headers=bearer(BOB))
            await nothing_starts(one)

    asyncio.run(run())


@pytest.mark.mended("an image of any web page, of the address /slots?model=NAME, started an engine")
@pytest.mark.parametrize("path", ["/model_info", "/slots", "/props", "/is_sleeping"])
def test_a_page_of_another_site_starts_no_engine(path: str, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            answer = await one.client.get(f"{path}?model=ant", headers=OTHER_SITE)
            assert answer.status_code == 403
            await nothing_starts(one)

    asyncio.run(run())


@pytest.mark.mended("any tenant could end another's engine by Ollama's keep_alive of 0, though "
                    "/models/unload takes the administrator's key")
def test_only_the_administrator_ends_engines(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant",
                                  settings=settings(tmp_path, admin_key=ADMIN)) as one:
            async def post(path: str, key: str, **body: Any) -> int:
                return (await one.client.post(path, json={"model": "ant", **body},
                                              headers=bearer(key))).status_code

            assert await post("/v1/chat/completions", ANN, **TURN) == 200
            assert await post("/models/unload", BOB) == 401
            for path in ("/api/chat", "/api/generate"):
                assert await post(path, BOB, keep_alive=0) == 403
                assert await post(path, BOB, keep_alive="0s") == 403
            assert one.manager.running == {"ant"}
            assert await post("/api/chat", ADMIN, keep_alive=0) == 200
            await one.until(lambda: not one.manager.running)

    asyncio.run(run())


@pytest.mark.mended("any tenant could keep an engine's memory for good, or have it end at once for "
                    "all, by the keep_alive of a request")
@pytest.mark.parametrize("keep_alive", [-1, 0, "-1m", 1e9])
def test_only_the_administrator_says_how_long_engines_stay(
        keep_alive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        for admin_key, sets in ((ADMIN, False), (None, True)):
            folder = tmp_path / str(sets)
            folder.mkdir()
            async with several_models(monkeypatch, folder, "ant", keep_alive=300.0,
                                      settings=settings(folder, admin_key=admin_key)) as one:
                for path in ("/v1/chat/completions", "/api/chat"):
                    body = {"model": "ant", "keep_alive": keep_alive, "stream": False, **TURN}
                    answer = await one.client.post(path, json=body, headers=bearer(BOB))
                    assert answer.status_code == 200, answer.text
                    [model] = one.manager.core.models
                    assert (model.keep_alive != 300.0) is (sets and model.state == "ready") or (
                        sets and keep_alive == 0)

    asyncio.run(run())


@pytest.mark.mended("a negative timeout was a message that the model manager does not understand: "
                    "it was answered after 13 seconds, with a 503")
def test_a_timeout_that_has_passed_before_it_began(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            answer = await one.chat("ant", timeout=-1)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "timeout"

    asyncio.run(run())
