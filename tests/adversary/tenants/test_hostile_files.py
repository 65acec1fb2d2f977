"""Files and batches: what another tenant learns of them, and uploads and lines that mean harm."""

from __future__ import annotations

import asyncio
import json
import os
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from mmap import mmap
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted
from helpers_tenants import ADMIN, ANN, BOB, CANARY, key_file

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.batch.batch_lines import parse_line
from actorium.actors.gateway.batch.file_store import FileStore
from actorium.actors.gateway.batch.form_data import boundary_of, read_form
from actorium.actors.gateway.batch.json_lines import MAX_LINE_BYTES
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.http_errors import HttpError

LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
                   "body": {"messages": [{"role": "user", "content": CANARY}]}}).encode()
BOUNDARY = "zqz"
Work = Callable[[httpx.AsyncClient, FileStore], Awaitable[None]]


def go(where: Path, work: Work, **more: Any) -> None:
    gateway = GatewayState(Config(gateway=GatewayConfig(
        files_dir=str(where / "files"), api_keys_file=key_file(where), admin_key=ADMIN, **more)),
        Path("none"))
    gateway.engine.client = Scripted(["x"])  # type: ignore[assignment]
    client = httpx.AsyncClient(base_url="http://gateway",
                               transport=httpx.ASGITransport(app=build_app(gateway)))
    assert gateway.files is not None
    try:
        asyncio.run(work(client, gateway.files))  # type: ignore[arg-type]
    finally:
        gateway.files.close()


def key(of: str) -> dict[str, str]:
    return {"authorization": f"Bearer {of}"}


def form(content: bytes, disposition: str = 'form-data; name="file"; filename="a"',
         boundary: str = BOUNDARY) -> bytes:
    return (f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f"--{boundary}\r\ncontent-disposition: {disposition}\r\n\r\n").encode() + content + (
            f"\r\n--{boundary}--\r\n".encode())


async def upload(client: httpx.AsyncClient, of: str, data: bytes,
                 kind: str = f"multipart/form-data; boundary={BOUNDARY}") -> httpx.Response:
    return await client.post("/v1/files", content=data, headers=key(of) | {"content-type": kind})


def test_a_file_and_a_batch_are_their_tenants_alone(tmp_path: Path, tried: Any) -> None:
    async def work(client: httpx.AsyncClient, store: FileStore) -> None:
        file = (await upload(client, ANN, form(LINE))).json()["id"]
        answer = await client.post("/v1/batches", headers=key(ANN), json={
            "input_file_id": file, "endpoint": "/v1/chat/completions"})
        batch = answer.json()["id"]
        for of, wanted in ((BOB, 404), (ADMIN, 404), ("sk-no", 401)):
            for name, kind in ((file, "files"), (batch, "batches")):
                # What is there and what is not have the same answer, but for the id.
                for method, path in (("GET", f"/v1/{kind}/NAME"), ("DELETE", "/v1/files/NAME"),
                                     ("GET", "/v1/files/NAME/content"),
                                     ("POST", "/v1/batches/NAME/cancel")):
                    answers = [await client.request(method, path.replace("NAME", one),
                                                    headers=key(of)) for one in (name, "x" * 10)]
                    assert {one.status_code for one in answers} == {wanted}
                    texts = {one.text.replace(name, "NAME").replace("x" * 10, "NAME")
                             for one in answers}
                    assert len(texts) == 1, texts
                    tried()
                for query in (f"?after={name}", "?after=no"):
                    answer = await client.get(f"/v1/{kind}{query}", headers=key(of))
                    assert answer.status_code == (400 if wanted == 404 else 401)
                answer = await client.get(f"/v1/{kind}", headers=key(of))
                assert name not in answer.text and CANARY not in answer.text
            answer = await client.post("/v1/batches", headers=key(of), json={
                "input_file_id": file, "endpoint": "/v1/chat/completions"})
            assert answer.status_code == wanted
        assert (await client.get(f"/v1/files/{file}", headers=key(ANN))).status_code == 200

    go(tmp_path, work)


@pytest.mark.parametrize("name", [
    "..", "../index.db", "..%2Findex.db", "%2e%2e%2findex.db", "%2Fetc%2Fpasswd", "file-%00",
    "%ff%fe", "%ed%a0%80", "file-x%0d%0aset-cookie:%20a", "x" * 60_000, "'%20OR%201=1--", "%25"])
def test_no_id_leads_out_of_the_store(name: str, tmp_path: Path, tried: Any) -> None:
    async def work(client: httpx.AsyncClient, store: FileStore) -> None:
        for path in ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}"):
            answer = await client.get(path.format(name), headers=key(BOB))
            assert answer.status_code in (404, 405, 414, 431), answer.text
            assert b"SQLite" not in answer.content and len(answer.content) < 1000
            tried()

    go(tmp_path, work)


@pytest.mark.mended("numbers of more digits than Python reads were a 500")
@pytest.mark.parametrize("digits", ["1" * 5000, "９" * 3, "²", "1" * 16, "-1", "1e2", ""])
def test_numbers_that_nobody_counts_to(digits: str, tmp_path: Path) -> None:
    async def work(client: httpx.AsyncClient, store: FileStore) -> None:
        for path in ("/v1/files", "/v1/batches"):
            answer = await client.get(path, params={"limit": digits}, headers=key(BOB))
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"
        answer = await client.post("/v1/batches", headers=key(BOB), json={
            "input_file_id": "x", "endpoint": "/v1/chat/completions",
            "output_expires_after": {"anchor": "created_at", "seconds": digits}})
        assert answer.status_code == 400 and "output_expires_after" in answer.text

    go(tmp_path, work)


# --- forms ---

@pytest.mark.mended("a name of a charset that half a character comes from, or with more digits "
                    "than Python reads, was a 500, and left the file on the disk for an hour")
@pytest.mark.parametrize("disposition", [
    "form-data; name=\"file\"; filename*=unicode_escape''%5Cud800",
    "form-data; name=\"file\"; filename*=utf-7''%2B2AA-", "form-data; name=\"file\"; filename*=a",
    "form-data; name=\"file\"; filename*=undefined''%FF",
    "form-data; name=\"file\"; filename*=idna''xn--%FF", "form-data; name*" + "9" * 5000 + "=a",
    "form-data; name=\"file\"; filename*" + "9" * 5000 + "=a",
    'form-data; name="file"; filename="../../etc/passwd"', 'form-data; name="file"; ' + '"' * 7000,
    'form-data; name="file"; filename="a\r\n b"', "form-data" + ";" * 7000, "a: b: c", ""])
def test_names_of_parts(disposition: str, tmp_path: Path, tried: Any) -> None:
    async def work(client: httpx.AsyncClient, store: FileStore) -> None:
        answer = await upload(client, BOB, form(LINE, disposition))
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            name = answer.json()["id"]
            answer = await client.get(f"/v1/files/{name}/content", headers=key(BOB))
            assert answer.content == LINE and b"\n" not in answer.headers["content-disposition"
                                                                          ].encode()
            await client.delete(f"/v1/files/{name}", headers=key(BOB))
        assert not list(store.content.iterdir()) and not list(store.incoming.iterdir())
        tried()

    go(tmp_path, work)


@pytest.mark.parametrize("kind", [
    "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" +
    "a" * 71, "multipart/mixed; boundary=a", "multipart/form-data; boundary*=undefined''%FF",
    "multipart/form-data; boundary*" + "9" * 5000 + "=a", "multipart/form-data" + ";" * 60_000,
    "multipart/form-data; " + '";' * 30_000, ""])
def test_types_without_a_boundary(kind: str) -> None:
    began = time.process_time()
    with pytest.raises(HttpError) as caught:
        boundary_of(kind)
    assert caught.value.status == 415 and time.process_time() - began < 1


@pytest.mark.mended("each byte of an upload was compared with the whole boundary: no other request "
                    "was answered for as long")
def test_a_form_of_nearly_boundaries_is_searched_once() -> None:
    boundary = "a" * 70
    content = (b"\r\n--" + b"a" * 69) * (8 << 16)
    whole = form(content, boundary=boundary)
    with mmap(-1, len(whole)) as data:
        data.write(whole)
        began = time.process_time()
        found = read_form(data, boundary_of(f"multipart/form-data; boundary={boundary}"))
        assert time.process_time() - began < 1
    assert found.end - found.start == len(content)


@pytest.mark.parametrize("size", [(1 << 20) - 40 + at for at in range(0, 80, 7)])
def test_a_boundary_lies_across_two_pieces(size: int) -> None:
    content = os.urandom(size)
    data = form(content)
    found = read_form(data, boundary_of(f"multipart/form-data; boundary={BOUNDARY}"))
    assert data[found.start:found.end] == content


@pytest.mark.mended("uploads at the same time could each take all the room that was left")
def test_uploads_at_once_share_the_room(tmp_path: Path) -> None:
    room, most = 4 << 20, [0]

    async def work(client: httpx.AsyncClient, store: FileStore) -> None:
        async def slowly() -> Any:
            for _ in range(8):
                yield bytes(1 << 19)
                await asyncio.sleep(0.02)
                sizes = (path.stat().st_size for path in store.incoming.iterdir())
                most[0] = max(most[0], sum(sizes))

        answers = await asyncio.gather(*(client.post("/v1/files", content=slowly(), headers=key(
            BOB) | {"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
            for _ in range(6)))
        assert {answer.status_code for answer in answers} <= {400, 413}
        assert most[0] < 2 * room and store.receiving == 0

    go(tmp_path, work, files_max_bytes=room)


# --- lines ---

@pytest.mark.mended("a line's id of millions of empty lists took gigabytes, and seconds in which "
                    "the gateway answered nobody")
@pytest.mark.parametrize("field", ["custom_id", "method", "url", "stream", "background"])
def test_a_line_makes_no_values_that_nobody_reads(field: str) -> None:
    lists = b"[" + b"[]," * ((MAX_LINE_BYTES >> 3) // 3) + b"[]]"
    data = LINE[:-1] + b', "%b": %b}' % (field.encode(), lists)
    if field in ("stream", "background"):
        data = LINE[:-2] + b', "%b": %b}}' % (field.encode(), lists)
    tracemalloc.start()
    try:
        line = parse_line(1, data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert field in line.wrong and len(line.wrong) < 2000 and most < 5 * len(data)


@pytest.mark.parametrize("data", [
    b"[" * 100_000, b'{"custom_id":' * 100_000, b'{"custom_id": ' + b"[" * 900 + b"]" * 900 + b"}",
    b"\xff\xfe", b"null", b"1e999", b'{"custom_id": "\\ud800"}', b"{}" * 2, b"\0",
    b'{"custom_id": "a", "method": ' + b"[" * 950 + b"]" * 950 + b"}"])
def test_lines_that_are_none(data: bytes, tried: Any) -> None:
    assert parse_line(1, data).wrong
    tried()
