"""A gateway that serves several models, each with an engine that the model manager starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_gateway import ScriptedStream
from helpers_several_models import NamedEngine, several_models
from starlette.responses import Response
from test_gateway_routes import ask

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.gateway import engine_uses
from actorium.actors.gateway.api import engine_routes
from actorium.actors.gateway.chosen_engine import COMMENTS_ONLY
from actorium.actors.gateway.page.dashboard import Dashboard
from actorium.actors.health import SLEEPING
from actorium.actors.messages import ActorStatus, Status
from actorium.actors.model_manager.model_record import MAX_DEATHS
from actorium.actors.runtime.http.connection_records import ConnectionRecords
from actorium.actors.runtime.http.http_connection import RECORD


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def refused(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def events(text: str) -> tuple[list[str], list[str]]:
    """(comments, data) of a stream."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    return ([block for block in blocks if block.startswith(": ")],
            [block.removeprefix("data: ") for block in blocks if not block.startswith(": ")])


def content(data: list[str]) -> str:
    assert data[-1] == "[DONE]"
    return "".join(json.loads(one)["choices"][0]["delta"].get("content") or "" for one in data[:-1])


def test_a_request_is_answered_by_its_model_and_uses_it_as_long(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            assert said(await one.chat("ant")) == "I am ant."
            assert said(await one.chat("bee-alias:latest")) == "I am bee."
            answers = await asyncio.gather(*(one.chat(name) for name in ("ant", "bee") * 5))
            assert [said(answer) for answer in answers] == ["I am ant.", "I am bee."] * 5
            await one.until(lambda: not one.in_use)
            assert one.manager.running == {"ant", "bee"}

    asyncio.run(run())


def test_more_models_than_engines_that_may_run(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple("abcdef")

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, *names, engines=2) as one:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, len(one.manager.running))
                    await asyncio.sleep(0)

            watching = asyncio.ensure_future(watch())
            answers = await asyncio.gather(*(one.chat(name) for name in names * 3))
            watching.cancel()
            assert [said(answer) for answer in answers] == [f"I am {name}." for name in names * 3]
            assert most == 2

    asyncio.run(run())


def test_names_that_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            error = refused(await one.chat("cow"), 404)
            assert error["code"] == "model_not_found" and error["param"] == "model"
            assert "'ant'" in error["message"] or "ant, bee" in error["message"]
            error = refused(await one.chat(None), 400)
            assert error["code"] == "model_required" and "ant" in error["message"]
            error = refused(await one.client.get("/v1/models/cow"), 404)
            assert "'ant', 'bee'" in error["message"]
            assert not one.manager.running

    asyncio.run(run())


def test_the_default_model_answers_requests_that_name_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee", default="bee") as one:
            assert said(await one.chat(None)) == said(await one.chat("")) == "I am bee."

    asyncio.run(run())


def test_a_stream_gets_comments_while_its_engine_starts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_uses, "REPORT_SECONDS", 0.02)

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", delay=0.3) as one:
            answer = await one.chat("ant", stream=True)
            assert answer.headers["content-type"].startswith("text/event-stream")
            comments, data = events(answer.text)
            assert comments[-1] == ": model ant is loading ..."
            assert content(data) == "I am ant."
            comments, data = events((await one.chat("ant", stream=True)).text)
            assert not comments and content(data) == "I am ant."

    asyncio.run(run())


def test_an_error_after_comments_is_an_event(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_uses, "REPORT_SECONDS", 0.02)

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", delay=0.1) as one:
            one.manager.faults["ant"] = "no weights"
            answer = await one.chat("ant", stream=True)
            assert answer.status_code == 200
            comments, (error, done) = events(answer.text)
            assert comments and done == "[DONE]"
            assert json.loads(error)["error"]["code"] == "model_failed" and "no weights" in error
            error = refused(await one.chat("ant"), 500)["message"]
            assert "no weights" in error and one.state.open == 0

    asyncio.run(run())


def test_the_callers_timeout_bounds_the_wait(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", delay=30.0) as one:
            error = refused(await one.chat("ant", timeout=0.05), 504)
            assert error["code"] == "deadline" and "ant" in error["message"]

    asyncio.run(run())


def test_an_engine_that_is_used_is_the_same_one_after_it_was_started_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            uses = one.state.models
            assert uses is not None
            first = await uses.use("ant")
            one.manager.kill_engine("ant")
            again = await uses.use("ant")
            assert again.engine is first.engine and not first.engine.client.closed
            assert one.in_use == {"ant": 2}
            for use in (first, again):
                use.release()
            await one.until(lambda: not one.in_use)
            await uses.unload("ant")
            await one.until(lambda: not one.manager.running)
            other = await uses.use("ant")
            assert other.engine is not first.engine and first.engine.client.closed
            for _ in range(MAX_DEATHS):
                one.manager.kill_engine("ant")
                await one.until(lambda: one.manager.running or not one.in_use)
            await one.until(lambda: other.engine.client.given_up)
            assert other.engine.client.given_up.endswith("its launcher was killed by SIGKILL")

    asyncio.run(run())


def test_who_stops_waiting_uses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", delay=30.0) as one:
            asking = asyncio.ensure_future(one.chat("ant"))
            await one.until(lambda: one.manager.core.uses.waiting_count)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await one.until(lambda: not one.manager.core.uses.waiting_count)

    asyncio.run(run())


def test_keep_alive_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            assert said(await one.chat("ant", keep_alive="10m")) == "I am ant."
            assert said(await one.chat("bee", keep_alive=0)) == "I am bee."
            await one.until(lambda: one.manager.running == {"ant"})
            error = refused(await one.chat("ant", keep_alive="soon"), 400)
            assert error["param"] == "keep_alive" and "soon" in error["message"]

    asyncio.run(run())


async def asleep(engine: NamedEngine, timeout: float | None = None) -> Status:
    return Status("-", True, None, [ActorStatus("e", "scheduler", 1, 1, SLEEPING, 0, 0.0, 0.0)])


def test_models_are_listed_loaded_and_unloaded(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee", default="bee") as one:
            client = one.client

            async def states() -> dict[str, str]:
                listed = (await client.get("/v1/models")).json()["data"]
                return {card["id"]: card["status"]["value"] for card in listed}

            async def until(**wanted: str) -> None:
                async with asyncio.timeout(10):
                    while await states() != wanted:
                        await asyncio.sleep(0.01)

            assert await states() == {"ant": "unloaded", "bee": "unloaded"}
            answer = await client.post("/models/load", json={"model": "ant"})
            assert answer.json() == {"success": True}
            await until(ant="loaded", bee="unloaded")
            refused(await client.post("/models/load", json={"model": "ant-alias"}), 400)
            refused(await client.post("/models/unload", json={"model": "bee"}), 400)
            refused(await client.post("/models/load", json={"model": "cow"}), 404)
            card = (await client.get("/v1/models/ant-alias:latest")).json()
            assert card["id"] == "ant" and card["aliases"] == ["ant-alias"]
            assert not card["default"] and card["status"]["value"] == "loaded"
            with monkeypatch.context() as orders:
                orders.setattr(NamedEngine, "status", asleep)
                await until(ant="sleeping", bee="unloaded")
            await until(ant="loaded", bee="unloaded")
            answer = await client.post("/models/unload", json={"model": "ant"})
            assert answer.json() == {"success": True}
            await until(ant="unloaded", bee="unloaded")
            one.manager.faults["bee"] = "no weights"
            await client.post("/models/load", json={"model": "bee"})
            await until(ant="unloaded", bee="failed")
            status = (await client.get("/v1/models/bee")).json()["status"]
            assert status["failed"] and status["message"] == "no weights"

    asyncio.run(run())


def test_the_query_chooses_the_model_of_a_route_without_a_body(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            error = refused(await one.client.get("/model_info"), 400)
            assert error["code"] == "model_required" and "?model=" in error["message"]
            chosen: list[str] = []

            async def flush(self: Any) -> dict[str, int]:
                chosen.append(self.model)
                return {"pages": 0, "kept": 0}

            monkeypatch.setattr(NamedEngine, "flush_cache", flush, raising=False)
            await one.client.post("/flush_cache?model=bee")
            assert chosen == ["bee"]
            refused(await one.client.post("/flush_cache?model=cow"), 404)
            url = "/v1/chat/completions?model=bee"
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
            assert said(await one.client.post(url, json=body)) == "I am bee."
            error = refused(await one.client.post(url, json=body | {"model": "ant"}), 400)
            assert error["param"] == "model"
            assert (await one.client.get("/v1/models?model=ant")).status_code == 200
            assert one.manager.running == {"bee"}

    asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt": "Hi"}),
    ("/generate", {"text": "Hi"}), ("/v1/responses/input_tokens", {"input": "Hi"})])
def test_routes_take_the_model_of_their_body(path: str, body: dict[str, Any], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    async def detokenize(self: Any, *given: Any) -> str:
        return f"I am {self.model}."

    monkeypatch.setattr(NamedEngine, "detokenize", detokenize, raising=False)

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            answer = await one.client.post(path, json=body | {"model": "bee"})
            assert answer.status_code == 200, answer.text
            assert "tokens" in answer.text or "I am bee." in answer.text
            assert one.manager.running == {"bee"}
            assert "model_required" in (await one.client.post(path, json=body)).text \
                or path.startswith("/v1/messages")
            refused_ = await one.client.post(path, json=body | {"model": "cow"})
            assert refused_.status_code == 404

    asyncio.run(run())


def slow(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Has streams wait for this before their first delta."""
    go = asyncio.Event()
    usual = ScriptedStream.__anext__

    async def later(self: Any) -> Any:
        await go.wait()
        return await usual(self)

    monkeypatch.setattr(ScriptedStream, "__anext__", later)
    return go


def test_a_stream_that_outlives_its_caller_keeps_the_engine(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        go = slow(monkeypatch)
        async with several_models(monkeypatch, tmp_path, "ant",
                                  settings=GatewayConfig(resume_grace=30.0)) as one:
            asking = asyncio.ensure_future(one.client.post(
                "/v1/chat/completions", headers={"idempotency-key": "k"}, json={
                    "model": "ant", "messages": [{"role": "user", "content": "Hi"}]}))
            await one.until(lambda: one.in_use == {"ant": 1})
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(0.05)
            assert one.in_use == {"ant": 1}
            go.set()
            await one.until(lambda: not one.in_use)

    asyncio.run(run())


def test_a_background_response_keeps_the_engine(tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            go = asyncio.Event()

            async def later(self: Any, requests: Any) -> Any:
                await go.wait()
                for number, _ in enumerate(requests):
                    yield number, []

            monkeypatch.setattr(NamedEngine, "run", later)
            answer = await one.client.post("/v1/responses", json={
                "model": "ant", "input": "Hi", "background": True})
            assert answer.json()["status"] == "queued"
            await asyncio.sleep(0.05)
            assert one.in_use == {"ant": 1}
            go.set()
            await one.until(lambda: not one.in_use)

    asyncio.run(run())


def test_a_manager_that_dies_and_comes_back_loses_no_use(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_uses, "KEEP_USES_SECONDS", 0.05)

    async def run() -> None:
        go = slow(monkeypatch)
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            streams = [asyncio.ensure_future(one.chat("ant", stream=True))]
            await one.until(lambda: one.in_use == {"ant": 1})
            one.manager.delay = 30.0
            streams.append(asyncio.ensure_future(one.chat("bee", stream=True)))
            await one.until(lambda: one.manager.core.uses.waiting_count)
            await one.manager.kill()
            one.manager.delay = 0.0
            one.manager.start()
            await one.until(lambda: one.in_use == {"ant": 1, "bee": 1})
            go.set()
            for stream, name in zip(streams, ("ant", "bee"), strict=True):
                assert content(events((await stream).text)[1]) == f"I am {name}."
            await one.until(lambda: not one.in_use)

    asyncio.run(run())


def test_a_stream_of_which_comments_were_sent_goes_on_at_the_next_gateway(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request has not reached an engine: it begins, and the head is not sent again."""
    sent: list[Any] = []

    reads = 0

    async def receive() -> Any:
        nonlocal reads
        reads += 1
        if reads > 1:  # it stays connected
            await asyncio.Event().wait()
        body = {"model": "ant", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            record = ConnectionRecords.create(1).open()
            assert record is not None
            record.begun = COMMENTS_ONLY
            await one.app({"type": "http", "method": "POST", "path": "/v1/chat/completions",
                           "headers": [], "query_string": b"", "http_version": "1.1",
                           "scheme": "http", "client": None, "server": None, RECORD: record},
                          receive, send)
            assert record.position not in (b"", COMMENTS_ONLY)

    asyncio.run(run())
    assert {message["type"] for message in sent} == {"http.response.body"}
    assert content(events(b"".join(m["body"] for m in sent).decode())[1]) == "I am ant."


def test_an_abort_reaches_the_engine_of_the_request(tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        slow(monkeypatch)
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            asking = asyncio.ensure_future(one.chat("bee", stream=True, request_id="mine"))
            await one.until(lambda: any(call.rids for call in one.state.calls))  # type: ignore
            answer = await one.client.post("/abort_request", json={"rid": "mine"})
            assert answer.json() == {"aborted": ["mine"]}
            [known] = [known.engine for known in one.state.models._engines.values()]
            assert len(known.client.aborted) == 1
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(run())


def test_a_server_of_one_model_has_nothing_to_load() -> None:
    for path in ("/models/load", "/models/unload"):
        error = refused(ask("POST", path, {"model": "demo"}), 400)
        assert error["code"] == "one_model" and "--models-dir" in error["message"]


def test_an_engines_probes_are_asked_where_it_runs(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    async def ask_socket(socket: Path, *given: Any) -> Response:
        asked.append(socket.parent)
        return Response(b"ok")

    monkeypatch.setattr(engine_routes, "_ask", ask_socket)

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            error = refused(await one.client.get("/metrics?model=ant"), 400)
            assert "not loaded" in error["message"] and not asked
            await one.chat("ant")
            for path in ("/metrics", "/metrics?model=ant", "/livez?model=ant"):
                assert (await one.client.get(path)).status_code == 200
            run_dir = one.manager.run_dir
            assert asked == [run_dir, run_dir / "ant", run_dir]
            refused(await one.client.get("/metrics?model=cow"), 404)

    asyncio.run(run())


def test_the_dashboard_shows_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee") as one:
            await one.chat("bee")
            samples = Dashboard(one.state).events()
            sample = json.loads((await anext(samples)).removeprefix(b"data: "))
            await samples.aclose()
            assert [(line["name"], line["state"]) for line in sample["models"]] == [
                ("ant", "unloaded"), ("bee", "loaded")]

    asyncio.run(run())


def test_requests_wait_for_recovering_engines_as_long_as_the_server_says(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def status(self: Any, timeout: float | None = None) -> Status:
        worker = ActorStatus("ant", "worker-0", 1, 2, "starting", 0, 0.0, 0.0)
        return Status("-", False, None, [worker])

    monkeypatch.setattr(NamedEngine, "status", status)

    async def run() -> None:
        settings = GatewayConfig(recovery_patience=0.1)
        async with several_models(monkeypatch, tmp_path, "ant", settings=settings) as one:
            error = refused(await one.chat("ant"), 503)
            assert "worker-0" in error["message"]
            await one.until(lambda: not one.in_use)

    asyncio.run(run())
