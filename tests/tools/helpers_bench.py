"""A scripted server of completions: what other makers' servers send, byte for byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[[str, dict[str, Any]], list[bytes]]
"""(path, body) -> the parts of the answer, head and all."""


def stream_of(*events: object, done: bool = True) -> list[bytes]:
    """A chunked answer, one chunk an event."""
    parts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    parts += [b"data: [DONE]\n\n"] if done else []
    head = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def plain(text: bytes, status: bytes = b"200 OK") -> list[bytes]:
    return [b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(text), text)]


async def served(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                  heads: list[bytes] | None = None) -> None:
    while not reader.at_eof():
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        if heads is not None:
            heads.append(head.lower())
        size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                     if line.startswith(b"content-length:")), 0)
        body = json.loads(await reader.readexactly(size)) if size else {}
        parts = answer(head.split()[1].decode(), body)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if b"Connection: close" in parts[0]:
            break
    writer.close()


def completion_event(text: str | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
            "usage": None, **more}


class Scripted:
    """A server of the shape that `kind` names, in a thread of its own, with what it was asked."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.heads: list[bytes] = []
        self.drafts = 0

    def answer(self, path: str, body: dict[str, Any]) -> list[bytes]:
        self.seen.append((path, body))
        if path == "/v1/models":
            return plain(b'{"data": [{"id": "org/served", "root": "/nowhere"}]}')
        if path == "/flush_cache":
            return plain(b"{}")
        if path == "/metrics":
            return plain(self.metrics().encode())
        self.drafts += 2
        if path == "/generate":
            return stream_of(*({"text": "x" * n, "meta_info": {
                "prompt_tokens": 4, "completion_tokens": n}} for n in (1, 4, 5)))
        usage = [{"prompt_tokens": 4, "completion_tokens": n} for n in (1, 4, 5)]
        return stream_of(*(completion_event("x", usage=each) for each in usage),
                         {"choices": [], "usage": usage[-1]})

    def metrics(self) -> str:
        if self.kind == "sglang":
            return (f"sglang:spec_verify_calls_total{{}} {self.drafts}\n"
                    f"sglang:generation_tokens_total{{}} {2.5 * self.drafts}\n")
        name = "vllm:spec_decode_num"
        return (f"{name}_drafts_total{{}} {self.drafts}\n"
                f"{name}_draft_tokens_total{{}} {2 * self.drafts}\n"
                f"{name}_accepted_tokens_total{{}} {1.5 * self.drafts}\n"
                f'{name}_accepted_tokens_per_pos_total{{position="0"}} {self.drafts}\n'
                f'{name}_accepted_tokens_per_pos_total{{position="1"}} {self.drafts / 2}\n')

    @contextmanager
    def running(self) -> Iterator[str]:
        loop, up, found = asyncio.new_event_loop(), threading.Event(), []

        async def begin() -> None:
            found.append(await asyncio.start_server(
                lambda r, w: served(self.answer, r, w, self.heads), "127.0.0.1", 0))
            up.set()

        def run() -> None:
            loop.create_task(begin())
            loop.run_forever()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert up.wait(10)
        try:
            yield f"http://127.0.0.1:{found[0].sockets[0].getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
