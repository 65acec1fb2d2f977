"""Batches over a scripted engine: files up and down, statuses, and what survives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from helpers_gateway import Scripted, ScriptedStream

from actorium.actors.client.requests import Request
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.errors import QueueFull
from actorium.actors.gateway.app import batch_worker, build_app
from actorium.actors.gateway.batch import batch_worker as workers
from actorium.actors.gateway.batch import line_caller
from actorium.actors.gateway.batch.batch_worker import BatchWorker
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.messages import BACKGROUND
from actorium.actors.params import SamplingParams

TURN = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"request-{number}", "method": "POST", "url": url,
            "body": {"model": "demo", "messages": TURN, "seed": number} | body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class Script(Scripted):
    """Answers the first two lines, and others when it is let, and counts."""

    def __init__(self) -> None:
        super().__init__(["It rains."])
        self.go = asyncio.Event()
        self.go.set()
        self.answered = 0
        self.refusals = 0
        """Requests that are refused before the others are answered."""
        self.aborted: list[str] = []

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def run(self, requests: list[Request]) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise QueueFull("full")
        if (requests[0].params or SamplingParams()).seed not in (0, 1):
            await self.go.wait()
        self.answered += 1
        async for found in super().run(requests):
            yield found


class Gateway:
    """One gateway of an engine, without sockets."""

    def __init__(self, script: Script, folder: Path, **settings: Any) -> None:
        config = Config(gateway=GatewayConfig(files_dir=str(folder), **settings))
        self.state = GatewayState(config, Path("none"))
        self.state.engine.client = script  # type: ignore[assignment]
        self.app = build_app(self.state)
        worker = batch_worker(self.state, self.app)
        assert worker is not None
        self.worker: BatchWorker = worker

    def client(self, key: str = "-") -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(app=self.app)
        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, max_retries=0,
                                  http_client=httpx.AsyncClient(transport=transport))

    async def stop(self) -> None:
        await self.worker.stop()
        assert self.state.files is not None
        self.state.files.close()


@asynccontextmanager
async def served(script: Script, folder: Path, **settings: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(script, folder, **settings)
    try:
        yield gateway
    finally:
        await gateway.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", ScriptedStream)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(line_caller, "FIRST_PAUSE", 0.01)


async def begun(client: openai.AsyncOpenAI, data: bytes, endpoint: str = CHAT, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint,  # type: ignore[arg-type]
                                       completion_window="24h", **more)


async def until(client: openai.AsyncOpenAI, name: str, done: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(10):
        while not done(batch := await client.batches.retrieve(name)):
            await asyncio.sleep(0.01)
    return batch


def ended(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


async def content(client: openai.AsyncOpenAI, name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return []
    return [json.loads(one) for one in (await client.files.content(name)).text.splitlines()]


def go(work: Callable[[Script, Path], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        await work(Script(), folder)

    asyncio.run(run())


def test_a_batch_goes_from_a_file_to_a_file(tmp_path: Path) -> None:
    async def work(script: Script, folder: Path) -> None:
        async with served(script, folder) as gateway:
            client = gateway.client()
            lines = [line(0), line(1, messages="Hi"), line(2, model="other"), line(3)]
            made = await begun(client, jsonl(lines), metadata={"night": "1"})
            assert made.status == "validating" and made.metadata == {"night": "1"}
            batch = await until(client, made.id, ended)
            assert batch.status == "completed" and batch.errors is None
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
            good = await content(client, batch.output_file_id)
            assert [one["custom_id"] for one in good] == ["request-0", "request-3"]
            for one in good:
                answer = one["response"]
                assert answer["status_code"] == 200 and one["error"] is None
                assert answer["body"]["choices"][0]["message"]["content"] == "It rains."
                assert answer["request_id"]
            bad = await content(client, batch.error_file_id)
            assert [(one["custom_id"], one["response"]["status_code"],
                     one["response"]["body"]["error"]["param"]) for one in bad] == [
                ("request-1", 400, "messages"), ("request-2", 404, "model")]
            assert all(one.priority == BACKGROUND for one in script.asked)
            assert len({one["id"] for one in good + bad}) == 4

    go(work, tmp_path)


@pytest.mark.parametrize(("url", "body"), [
    ("/v1/completions", {"prompt": "Hi"}), ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"max_tokens": 5}),
    ("/completion", {"prompt": [1], "response_fields": ["content"]}),
    ("/api/chat", {"stream": False}),
    ("/api/generate", {"prompt": "Hi", "stream": False}),
    ("/invocations", {})])
def test_every_api_that_generates_answers_lines(tmp_path: Path, url: str, body: Any) -> None:
    async def work(script: Script, folder: Path) -> None:
        async with served(script, folder) as gateway:
            client = gateway.client()
            batch = await until(client, (await begun(
                client, jsonl([line(0, url, **body)]), url)).id, ended)
            [one] = await content(client, batch.output_file_id or batch.error_file_id)
            assert "It rains." in json.dumps(one["response"]["body"])
            assert script.asked[0].priority == BACKGROUND

    go(work, tmp_path)


@pytest.mark.parametrize(("data", "code", "message"), [
    (b"{\n", "invalid_line", "not a JSON object"),
    (jsonl([line(0) | {"custom_id": 5}]), "invalid_line", "custom_id"),
    (jsonl([line(0) | {"method": "GET"}]), "invalid_line", "method"),
    (jsonl([line(0, "/v1/audio")]), "invalid_line", "url: '/v1/audio'"),
    (jsonl([line(0) | {"body": [1]}]), "invalid_line", "body"),
    (jsonl([line(0, stream=True)]), "invalid_line", "body.stream"),
    (jsonl([line(0, "/api/chat")]), "invalid_line", "body.stream: must be false"),
    (jsonl([line(0, "/v1/completions")]), "mismatched_endpoint", "url"),
    (jsonl([line(0), line(0)]), "duplicate_custom_id", "custom_id"),
    (b"\n", "empty_file", "no lines")])
def test_a_file_with_wrong_lines_is_no_batch(tmp_path: Path, data: bytes, code: str,
                                             message: str) -> None:
    async def work(script: Script, folder: Path) -> None:
        async with served(script, folder) as gateway:
            client = gateway.client()
            batch = await until(client, (await begun(client, data)).id, ended)
            assert batch.status == "failed" and not script.asked
            [error] = batch.errors.data
            assert error.code == code and message in error.message
            assert error.line == (None if code == "empty_file" else data.count(b"\n"))

    go(work, tmp_path)


def test_a_batch_goes_on_in_another_gateway_without_a_line_twice(tmp_path: Path) -> None:
    """The first one is stopped in the middle, and leaves half a line, as a kill would."""
    async def work(script: Script, folder: Path) -> None:
        script.go.clear()
        async with served(script, folder) as first:
            made = await begun(first.client(), jsonl([line(i) for i in range(40)]))
            await until(first.client(), made.id, lambda batch: batch.request_counts.completed == 2)
            async with served(script, folder) as other:
                await asyncio.sleep(0.1)
                assert len(first.worker) == 1 and len(other.worker) == 0, "the lock is one's"
        results = folder / "work" / made.id
        assert results.read_bytes().count(b"\n") == 2
        with results.open("ab") as file:
            file.write(b'{"id": "half')
        script.go.set()
        async with served(script, folder) as second:
            batch = await until(second.client(), made.id, ended)
            lines = await content(second.client(), batch.output_file_id)
            assert [one["custom_id"] for one in lines] == [f"request-{i}" for i in range(40)]
            assert batch.request_counts.completed == 40
        assert script.answered == 40, "what was written was not asked again"
        assert not results.exists() and not list((folder / "incoming").iterdir())
        rids = [one.resumable.rid for one in script.asked if one.resumable is not None]
        assert len(rids) == 40 and all(one.resumable.adopt and one.resumable.seconds > 60
                                       for one in script.asked if one.resumable)

    go(work, tmp_path)


def test_a_cancelled_batch_has_the_answers_so_far(tmp_path: Path) -> None:
    async def work(script: Script, folder: Path) -> None:
        script.go.clear()
        async with served(script, folder) as gateway:
            client = gateway.client()
            made = await begun(client, jsonl([line(i) for i in range(900)]))
            await until(client, made.id, lambda batch: batch.request_counts.completed == 2)
            with pytest.raises(openai.ConflictError, match="cancel"):
                await client.files.delete(made.input_file_id)
            assert (await client.batches.cancel(made.id)).status == "cancelling"
            batch = await until(client, made.id, ended)
            assert batch.status == "cancelled" and batch.cancelled_at is not None
            lines = await content(client, batch.output_file_id)
            assert [one["custom_id"] for one in lines] == ["request-0", "request-1"]
            assert batch.error_file_id is None and script.aborted
            with pytest.raises(openai.ConflictError, match="cancelled"):
                await client.batches.cancel(made.id)
            await client.files.delete(made.input_file_id)

    go(work, tmp_path)


def test_a_late_batch_expires_and_names_each_line_that_was_not_asked(tmp_path: Path) -> None:
    async def work(script: Script, folder: Path) -> None:
        script.go.clear()
        async with served(script, folder) as gateway:
            client, store = gateway.client(), gateway.state.files
            assert store is not None
            made = await begun(client, jsonl([line(i) for i in range(30)]))
            await until(client, made.id, lambda batch: batch.request_counts.completed == 2)
            then = store.clock
            store.clock = lambda: then() + 86401
            batch = await until(client, made.id, ended)
            assert batch.status == "expired"
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 28)
            errors = await content(client, batch.error_file_id)
            assert {one["error"]["code"] for one in errors} == {"batch_expired"}
            assert [one["custom_id"] for one in errors] == [f"request-{i}" for i in range(2, 30)]

    go(work, tmp_path)


def test_a_line_is_asked_again_while_the_engine_is_full(tmp_path: Path) -> None:
    async def work(script: Script, folder: Path) -> None:
        script.refusals = 5
        async with served(script, folder) as gateway:
            client = gateway.client()
            batch = await until(client, (await begun(
                client, jsonl([line(i) for i in range(4)]))).id, ended)
            assert (batch.request_counts.completed, script.refusals) == (4, 0)

    go(work, tmp_path)


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a sk-a\nb sk-b\n")
    keys.chmod(0o600)

    async def work(script: Script, folder: Path) -> None:
        async with served(script, folder, api_keys_file=str(keys)) as gateway:
            a, b = gateway.client("sk-a"), gateway.client("sk-b")
            made = await begun(a, jsonl([line(0)]))
            batch = await until(a, made.id, ended)
            calls: list[Callable[[], Any]] = [
                lambda: b.batches.retrieve(made.id), lambda: b.batches.cancel(made.id),
                lambda: b.files.retrieve(batch.output_file_id),
                lambda: b.files.content(batch.output_file_id),
                lambda: b.files.delete(batch.output_file_id),
                lambda: b.batches.create(input_file_id=made.input_file_id, endpoint=CHAT,
                                         completion_window="24h")]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    await call()
            assert not [one async for one in b.files.list()]
            assert not [one async for one in b.batches.list()]
            with pytest.raises(openai.BadRequestError, match="after"):
                await b.files.list(after=made.input_file_id)
            assert script.asked[0].tenant == "a"
            with pytest.raises(openai.AuthenticationError):
                await gateway.client("sk-c").files.list()

    go(work, tmp_path / "files")


def test_batches_are_listed_page_by_page(tmp_path: Path) -> None:
    async def work(script: Script, folder: Path) -> None:
        async with served(script, folder) as gateway:
            client = gateway.client()
            names = [(await begun(client, jsonl([line(i)]))).id for i in range(5)]
            page = await client.batches.list(limit=2)
            assert [one.id for one in page.data] == names[:2:-1] and page.has_more
            assert [one.id async for one in client.batches.list(limit=2)] == names[::-1]
            for name in names:
                await until(client, name, ended)

    go(work, tmp_path)


@pytest.mark.parametrize(("field", "value"), [
    ("endpoint", "/v1/audio"), ("completion_window", "never"), ("completion_window", "31d"),
    ("metadata", {str(i): "x" for i in range(17)}), ("input_file_id", "file-none"),
    ("output_expires_after", {"anchor": "created_at", "seconds": 5})])
def test_a_wrong_field_of_a_batch_is_named(tmp_path: Path, field: str, value: Any) -> None:
    async def work(script: Script, folder: Path) -> None:
        async with served(script, folder) as gateway:
            client = gateway.client()
            file = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
            body: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
            with pytest.raises(openai.APIStatusError) as caught:
                await client.batches.create(**body | {field: value})
            assert caught.value.status_code == (404 if field == "input_file_id" else 400)
            assert caught.value.param == field  # type: ignore[attr-defined]

    go(work, tmp_path)
