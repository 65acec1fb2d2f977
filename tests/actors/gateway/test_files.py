"""Files over HTTP: uploads, pages of lists, bounds, and what is removed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from helpers_gateway import Scripted
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.api import files
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.batch.file_store import ORPHAN_SECONDS, OUTPUT, FileStore
from actorium.actors.gateway.batch.form_data import boundary_of, read_form
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.http_errors import HttpError


def go(folder: Path | None, work: Callable[[openai.AsyncOpenAI, Any], Awaitable[None]],
       **settings: Any) -> None:
    where = None if folder is None else str(folder)
    gateway = GatewayState(Config(gateway=GatewayConfig(files_dir=where, **settings)), Path("none"))
    gateway.engine.client = Scripted(["x"])  # type: ignore[assignment]
    client = openai.AsyncOpenAI(
        base_url="http://gateway/v1", api_key="-", max_retries=0, http_client=httpx.AsyncClient(
            transport=httpx.ASGITransport(app=build_app(gateway))))
    asyncio.run(work(client, gateway.files))


def test_a_file_comes_back_as_it_was_until_it_is_deleted(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI, store: FileStore) -> None:
        data = os.urandom(3_000_000) + b"\r\n--"
        made = await client.files.create(file=("häuser.jsonl", data), purpose="batch",
                                         expires_after={"anchor": "created_at", "seconds": 7200})
        assert (made.bytes, made.filename) == (len(data), "häuser.jsonl")
        assert made.expires_at == made.created_at + 7200
        assert (await client.files.content(made.id)).content == data
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.delete(made.id)).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        assert not list(store.content.iterdir()) and not list(store.incoming.iterdir())

    go(tmp_path, work)


def test_files_are_listed_page_by_page(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI, store: FileStore) -> None:
        names = [(await client.files.create(file=(f"{i}", b"x"), purpose="batch")).id
                 for i in range(5)]
        assert [one.id async for one in client.files.list(limit=2)] == names[::-1]
        assert [one.id async for one in client.files.list(limit=2, order="asc")] == names
        page = await client.files.list(limit=2, after=names[2])
        assert [one.id for one in page.data] == names[1::-1] and not page.has_more
        assert not (await client.files.list(purpose=OUTPUT)).data
        for bad in ({"limit": 0}, {"after": "file-x"}, {"purpose": "x"},
                    {"extra_query": {"order": "x"}}):
            with pytest.raises(openai.BadRequestError):
                await client.files.list(**bad)  # type: ignore[arg-type]

    go(tmp_path, work)


@pytest.mark.parametrize(("call", "param"), [
    ({"purpose": "fine-tune"}, "purpose"), ({"file": ("x", b"")}, "file"),
    ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after"),
    ({"expires_after": {"anchor": "now", "seconds": 7200}}, "expires_after")])
def test_a_wrong_field_of_an_upload_is_named(tmp_path: Path, call: Any, param: str) -> None:
    async def work(client: openai.AsyncOpenAI, store: FileStore) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(**{"file": ("x", b"x"), "purpose": "batch"} | call)
        assert caught.value.param == param
        assert not list(store.content.iterdir()) and not list(store.incoming.iterdir())

    go(tmp_path, work)


def test_without_a_folder_the_routes_say_which_flag_is_missing() -> None:
    async def work(client: openai.AsyncOpenAI, store: object) -> None:
        calls: list[Callable[[], Any]] = [
            client.files.list, client.batches.list, lambda: client.files.retrieve("file-x"),
            lambda: client.files.create(file=("x", b"x"), purpose="batch"),
            lambda: client.batches.create(input_file_id="x", endpoint="/v1/completions",
                                          completion_window="24h")]
        for call in calls:
            with pytest.raises(openai.InternalServerError, match="--files-dir") as caught:
                await call()
            assert caught.value.status_code == 501

    go(None, work)


def test_the_store_is_bounded(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI, store: FileStore) -> None:
        first = await client.files.create(file=("x", bytes(700_000)), purpose="batch")
        for size in (700_000, 5_000_000):
            with pytest.raises(openai.APIStatusError, match="files-max-bytes") as caught:
                await client.files.create(file=("x", bytes(size)), purpose="batch")
            assert caught.value.status_code == 413
        assert store.receiving == 0 and not list(store.incoming.iterdir())
        await client.files.delete(first.id)
        await client.files.create(file=("x", bytes(700_000)), purpose="batch")

    go(tmp_path, work, files_max_bytes=1 << 20)


def test_an_upload_has_a_bound_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE", 1000)

    async def work(client: openai.AsyncOpenAI, store: FileStore) -> None:
        with pytest.raises(openai.APIStatusError, match="larger than 1000 bytes"):
            await client.files.create(file=("x", bytes(100_000)), purpose="batch")

    go(tmp_path, work)


def test_what_has_expired_or_was_left_by_the_killed_is_removed(tmp_path: Path) -> None:
    async def work() -> None:
        now = 1e9
        store = FileStore(tmp_path, 1 << 20, 5000.0, lambda: now)
        upload = store.new_path()
        upload.write_bytes(b"x")
        kept = await store.add_file("", upload, "x", "batch")
        left = [store.content / "file-left", store.new_path(), store.work_path("batch_left")]
        for path in left:
            path.write_bytes(b"x")
            os.utime(path, (now - ORPHAN_SECONDS - 1,) * 2)
        fresh = store.new_path()
        fresh.write_bytes(b"x")
        os.utime(fresh, (now,) * 2)
        await store.sweep()
        assert not any(path.exists() for path in left) and fresh.exists()
        assert store.path_of(kept.id).exists()
        now += 5001
        assert await store.file("", kept.id) is None
        now += ORPHAN_SECONDS * 1e6
        await store.sweep()
        assert not store.path_of(kept.id).exists() and await store.room() == 1 << 20
        store.close()

    asyncio.run(work())


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.db").write_bytes(b"no database" * 100)
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file", tmp_path / "no" / "folder"):
        with pytest.raises(BadConfig, match="files_dir") as caught:
            FileStore(folder, 1, 1)
        assert caught.value.param == "gateway.files_dir"


def form(parts: list[tuple[str, str | None, bytes]], boundary: bytes) -> bytes:
    out = b""
    for name, filename, value in parts:
        more = "" if filename is None else f'; filename="{filename}"'
        out += b"--%b\r\nContent-Disposition: form-data; name=\"%b\"%b\r\n\r\n%b\r\n" % (
            boundary, name.encode(), more.encode(), value)
    return out + b"--%b--\r\n" % boundary


@given(st.binary(max_size=200), st.dictionaries(
    st.sampled_from(["purpose", "a[b]", "c"]), st.text("xy \r\n-", max_size=20)), st.data())
def test_a_form_is_read_whatever_it_holds(data: bytes, fields: dict[str, str],
                                          draw: st.DataObject) -> None:
    body = form([*((name, None, value.encode()) for name, value in fields.items()),
                 ("file", "f.jsonl", data)], b"-xyz-9")
    read = read_form(body, boundary_of("multipart/form-data; boundary=-xyz-9"))
    assert (read.fields, read.filename) == (fields, "f.jsonl")
    assert body[read.start:read.end] == data
    with pytest.raises(HttpError):
        read_form(body[:draw.draw(st.integers(0, len(body) - 5))], b"---xyz-9")


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data",
                                  "multipart/form-data; boundary=" + "x" * 71])
def test_another_content_type_is_refused(kind: str) -> None:
    with pytest.raises(HttpError) as caught:
        boundary_of(kind)
    assert caught.value.status == 415


@pytest.mark.parametrize("parts", [
    [("file", "x", b"1"), ("file", "x", b"2")], [("a", None, b"x")],
    [("a", None, b"1"), ("a", None, b"2"), ("file", "x", b"1")],
    [("a", None, bytes(5000)), ("file", "x", b"1")],
    [*((str(i), None, b"") for i in range(100)), ("file", "x", b"1")]])
def test_a_form_with_too_much_or_too_little_is_refused(parts: Any) -> None:
    with pytest.raises(HttpError):
        read_form(form(parts, b"b"), b"--b")
