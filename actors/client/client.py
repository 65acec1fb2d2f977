"""The client SDK: `Client`, and its asyncio twin `AsyncClient` (`async_client.py`).

    with Client("default") as c:
        c.wait_ready(60)
        print(c.generate("Hello", SamplingParams(max_tokens=16)).text)
        for delta in c.stream("Once upon a time"):
            print(delta.text, end="")

Everything raises the typed errors of `actors/errors.py`. Light: pyzmq and msgspec, no engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import get_ident
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from actorium.actors.client import calls
from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.connection import (
    DETOKENIZER,
    TOKENIZER,
    WATCHDOG,
    Link,
    check_alive,
    locate,
)
from actorium.actors.client.core import WINDOW, Batch, Call, ClientCore, Pending
from actorium.actors.client.requests import (
    Completion,
    Request,
    StreamDelta,
    check_timeout,
    encode,
)
from actorium.actors.errors import ActoriumError, DeadlineExceeded, EngineUnavailable
from actorium.actors.messages import Abort, Attach, Status
from actorium.actors.params import SamplingParams

__all__ = ["AsyncClient", "Client", "Completion", "Request", "SamplingParams", "StreamDelta"]


class Client:
    """A blocking connection to one engine. For one thread at a time: give each its own. (A thread
    that calls while another one waits here gets a `RuntimeError`.)

    Connects at the first call, and again after the engine was restarted. `target` is an engine's
    name, the path (`ipc://` or plain) of its run directory, or, on another machine, its address
    (`tcp://host:port`); that takes a `key`, the path of a key file (`actorium keys`). `run_dir` is
    where names are looked up (default: as the engine's own `--run-dir`). `tenant` is whose requests
    these are (see `Request.tenant`). When an actor of the engine dies and comes back, requests go
    on; when the whole engine ends, they fail unless another one with the same name and ledger
    appears within `resume_timeout` seconds. Raises `InvalidRequest` on a bad tenant or timeout,
    `BadConfig` on a bad key.
    """

    def __init__(self, target: str | os.PathLike[str] = "default", run_dir: str | None = None,
                 tenant: str = "", resume_timeout: float = 0.0,
                 key: str | os.PathLike[str] | None = None) -> None:
        self._directory = locate(target, run_dir, key)
        self._resume = calls.Resumption(resume_timeout)
        self._link: Link | None = None
        self._incarnation = calls.Incarnation(self._directory)
        self._core = ClientCore(calls.fresh_prefix(), tenant)
        self._waits: int | None = None
        """The thread that waits for answers."""

    # --- completions --------------------------------------------------------------------------

    def generate(self, prompt: calls.Prompts,
                 params: SamplingParams | Sequence[SamplingParams] | None = None,
                 timeout: float | None = None, return_errors: bool = False,
                 priority: int = 0, truncate_prompt_tokens: int | None = None,
                 cache_salt: str | None = None) -> Any:
        """Complete one prompt or many, and wait for all of them.

        `prompt` is text, a list of token ids, or a list of either. What comes back:
        one prompt: a `Completion`; with n > 1 a list of n. Several prompts: a list in their order
        of `Completion` (n == 1) or of lists of n. `params` may be a list, one for each prompt.
        `timeout` (seconds) counts for each request from when it is sent. A higher `priority` goes
        first where the engine schedules by priority. `truncate_prompt_tokens` and `cache_salt` are
        those of `Request`. The first error is raised and the rest
        aborted, unless `return_errors`: then errors stand in the list of results.
        """
        requests, shape = calls.requests(prompt, params, timeout, priority,
                                         truncate_prompt_tokens, cache_salt)
        found: list[Any] = [None] * len(requests)
        results = self.run(requests)
        for index, result in results:
            if isinstance(result, ActoriumError) and not return_errors:
                results.close()
                raise result
            found[index] = result
        return shape(found)

    def run(self, requests: Iterable[Request], window: int = WINDOW
            ) -> Generator[tuple[int, list[Completion] | ActoriumError], None, None]:
        """Run any number of requests, at most `window` at once.

        Yields (number of the request, its choices or its error) as they finish. Closing the
        iterator aborts what is left.
        """
        batch = Batch(self._core, requests, window)
        self._ready()
        try:
            while not batch.done:
                for frame in batch.submit(monotonic()):
                    self._send(TOKENIZER, frame)
                self._wait(batch.settled)
                while batch.ready:
                    yield batch.ready.popleft()
        finally:
            self._abort(batch.cancel())

    def stream(self, prompt: calls.Prompt, params: SamplingParams | None = None,
               timeout: float | None = None, priority: int = 0,
               truncate_prompt_tokens: int | None = None,
               cache_salt: str | None = None) -> DeltaStream:
        """Iterate over what is new, delta by delta, of one prompt (all its n choices).

        Closing the iterator, or leaving a `for` loop over it, aborts the request.
        """
        return self._stream(Request(prompt=prompt, params=params, timeout=timeout,
                                    priority=priority, cache_salt=cache_salt,
                                    truncate_prompt_tokens=truncate_prompt_tokens))

    def chat(self, messages: list[Any], params: SamplingParams | None = None,
             stream: bool = False, timeout: float | None = None,
             template_args: dict[str, Any] | None = None, priority: int = 0,
             chat_template: str | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, truncate_prompt_tokens: int | None = None,
             cache_salt: str | None = None) -> Any:
        """Answer a conversation: `generate` of the model's chat template over `messages`.

        `messages` are `{"role": ..., "content": ...}`; what follows `priority` is as in `Request`.
        Returns a `Completion` (a list for n > 1),
        or with `stream` a `DeltaStream`.
        """
        request = Request(messages=messages, params=params, timeout=timeout,
                          template_args=template_args or {}, priority=priority,
                          chat_template=chat_template, cache_salt=cache_salt,
                          add_generation_prompt=add_generation_prompt,
                          continue_final_message=continue_final_message,
                          truncate_prompt_tokens=truncate_prompt_tokens)
        if stream:
            return self._stream(request)
        results = self.run([request])
        _, result = next(results)
        results.close()
        if isinstance(result, ActoriumError):
            raise result
        return calls.one(result)

    def _stream(self, request: Request) -> DeltaStream:
        self._ready()
        pending, frame = self._core.submit(request, monotonic(), streaming=True)
        stream = DeltaStream(self, pending)
        self._send(TOKENIZER, frame)
        return stream

    def abort(self, rid: str) -> None:
        """End a request of this client (`DeltaStream.rid`) now."""
        if self._link is not None:
            self._abort([Abort(rid)])

    # --- questions ----------------------------------------------------------------------------

    def tokenize(self, text: str, add_special_tokens: bool = True,
                 timeout: float | None = None) -> list[int]:
        """Token ids of `text`."""
        question = calls.tokenize(text, add_special_tokens)
        return calls.ids_of(self._ask(TOKENIZER, question, timeout))

    def tokenize_chat(self, messages: list[Any], template_args: dict[str, Any] | None = None,
                      tools: list[dict[str, Any]] | None = None,
                      timeout: float | None = None, chat_template: str | None = None,
                      add_generation_prompt: bool = True,
                      continue_final_message: bool = False) -> list[int]:
        """Token ids of the prompt that the chat template makes of `messages`, as `chat` does."""
        question = calls.tokenize_chat(messages, template_args, tools, chat_template,
                                       add_generation_prompt, continue_final_message)
        return calls.ids_of(self._ask(TOKENIZER, question, timeout))

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False,
                   timeout: float | None = None) -> str:
        """Text of token ids."""
        question = calls.detokenize(token_ids, skip_special_tokens)
        return str(self._ask(TOKENIZER, question, timeout).text)

    def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        """Model, limits, defaults and configuration of the engine; `memory`: its pages, prefix
        cache and preemptions as of its last heartbeat (`calls.MEMORY_GAUGES`), and as
        `bytes` what the worker holds, measured beside planned (`calls.bytes_of`);
        `speculation`: drafts and how many were accepted (`calls.speculation_of`)."""
        info = calls.info_of(self._ask(TOKENIZER, calls.server_info, timeout))
        return info | calls.gauges_of(self.status(timeout or calls.STATUS_TIMEOUT))

    def flush_cache(self, timeout: float | None = 30.0) -> dict[str, int]:
        """Make the engine forget every cached prefix that no running sequence holds.

        Returns {"pages": number of pages freed, "kept": cached pages still held}.
        """
        self._ready()
        return calls.flushed_of(self._ask(TOKENIZER, calls.flush_cache, timeout))

    def status(self, timeout: float | None = calls.STATUS_TIMEOUT) -> Status:
        """What each actor is doing, at once."""
        answer: Status = self._ask(WATCHDOG, calls.get_status(False), timeout)
        return answer

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the engine can serve; it need not have been started yet.

        Raises `EngineFailed` with the reason if it never will, `DeadlineExceeded` (it is not ready
        in time) or `EngineUnavailable` (it is not even there in time, or it went away).
        """
        check_timeout(timeout)
        deadline = calls.ready_deadline(timeout, monotonic())
        while not calls.may_exist(self._directory):
            calls.check_late(self._directory, deadline, monotonic())
            sleep(calls.POLL)
        while (left := deadline - monotonic()) > 0:
            try:
                if calls.is_ready(self._ask(WATCHDOG, calls.get_status(True), left)):
                    return
            except DeadlineExceeded:
                break
            sleep(calls.POLL)
        raise calls.not_ready(timeout)

    # --- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what is under way and disconnect. The client may be used again."""
        self._abort(self._core.live_requests())
        self._drop(EngineUnavailable("the client was closed"))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # --- plumbing -----------------------------------------------------------------------------

    def _ready(self) -> None:
        """Connected and attached. Raises `EngineUnavailable`."""
        self._check_thread()
        self._notice_restart()
        if self._core.attached:
            return
        link = self._connect(TOKENIZER, DETOKENIZER)
        link.send(DETOKENIZER, encode(Attach(), "client"))
        self._wait(lambda: self._core.attached)

    def _check_thread(self) -> None:
        """ZMQ's sockets end the whole process where two threads use them at once."""
        if self._waits not in (None, get_ident()):
            raise RuntimeError("another thread waits for answers of this client: "
                               "give each thread a Client of its own")

    def _notice_restart(self) -> None:
        """Another engine has the run directory now: what was sent to the last one is lost."""
        if self._link is not None and self._incarnation.replaced():
            self._engine_gone()

    def _connect(self, *fronts: str) -> Link:
        if self._link is None:
            check_alive(self._directory)
            self._incarnation.remember()
            self._link = Link(self._directory, self._resume.identity)
            if self._resume.end():
                self._send_all(self._core.renewed(monotonic()))
        self._link.connect(*fronts)
        return self._link

    def _send(self, front: str, frame: bytes) -> None:
        if self._link is None:
            raise calls.gone_away(self._directory)
        self._link.send(front, frame)

    def _abort(self, aborts: list[Abort]) -> None:
        if self._link is not None:
            self._check_thread()
            for abort in aborts:
                self._core.aborting(abort.rid, monotonic())
                self._link.connect(TOKENIZER)
                self._link.send(TOKENIZER, encode(abort, "rid"))

    def _ask(self, front: str, question: Callable[[str], Any], timeout: float | None) -> Any:
        check_timeout(timeout)
        self._check_thread()
        self._notice_restart()
        now = monotonic()
        call: Call = self._core.call(question, math.inf if timeout is None else now + timeout,
                                     front, now)
        try:
            self._connect(front).send(front, call.frame)
            self._wait(lambda: call.done)
        finally:
            self._core.forget(call.rid)
        return call.result()

    def _pump(self) -> None:
        link = self._link
        if link is None:
            return
        now = monotonic()
        again = link.reconnected()
        if (again or link.refused) and self._incarnation.gone():
            self._engine_gone()
            return
        for front in again:
            self._send_all(self._core.reconnected(front, now))
        for message in link.receive():
            self._core.on_message(message, now)

    def _send_all(self, frames: list[tuple[str, bytes]]) -> None:
        """What may be sent once more later: not at all where the pipe is full."""
        for front, frame in frames:
            with suppress(EngineUnavailable):
                self._connect(front).send(front, frame)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Take messages until `until()`. Raises `EngineUnavailable` when the engine is gone."""
        self._check_thread()
        before, self._waits = self._waits, get_ident()
        try:
            self._wait_here(until)
        finally:
            self._waits = before

    def _wait_here(self, until: Callable[[], bool]) -> None:
        quiet = calls.Quiet(monotonic())
        while True:
            self._pump()
            now = monotonic()
            self._abort(self._core.expire(now))
            if until():
                return
            if self._link is None:
                self._come_back(now)
                continue
            self._send_all(self._core.resend(now))
            if self._link.wait(min(calls.LIVENESS, min(self._core.soonest, self._core.due) - now)):
                quiet.heard(now)
                continue
            self._check(quiet)

    def _check(self, quiet: calls.Quiet) -> None:
        """Nothing came for a while: is the engine alive, does it still know this client?"""
        if self._incarnation.gone():
            self._pump()
            self._engine_gone()
            return
        if self._core.attached and quiet.ask(monotonic()):
            self._send(DETOKENIZER, encode(Attach(), "client"))

    def _engine_gone(self) -> None:
        """The engine has ended. What waits may be taken up by the next one, or fails."""
        link = self._link
        if link is None or not self._resume.begin(link.identity, monotonic()):
            self._drop(calls.gone_away(self._directory))
            return
        self._link, self._core.attached = None, False
        link.close()

    def _come_back(self, now: float) -> None:
        """Connect to the next engine, if it is there. Raises `EngineUnavailable` when it is late.
        """
        if self._resume.late(now):
            self._drop(calls.gone_away(self._directory))
            raise calls.gone_away(self._directory)
        if not calls.may_exist(self._directory):
            sleep(calls.POLL)
            return
        self._connect(TOKENIZER, DETOKENIZER)

    def _drop(self, error: EngineUnavailable) -> None:
        link, self._link = self._link, None
        self._resume.end()
        self._core.fail_all(error)
        if link is not None:
            link.close()


class DeltaStream(Iterator[StreamDelta]):
    """Deltas of one request. `rid` names it; `close` aborts it if it has not ended."""

    def __init__(self, client: Client, pending: Pending) -> None:
        self._client = client
        self._pending = pending
        self.rid = pending.rid

    def __next__(self) -> StreamDelta:
        pending = self._pending
        if not pending.deltas and not pending.done:
            self._client._wait(lambda: bool(pending.deltas) or pending.done)
        if pending.deltas:
            return pending.deltas.popleft()
        if pending.error is not None:
            error, pending.error = pending.error, None
            raise error
        raise StopIteration

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if self._client._core.forget(self.rid):
            self._pending.done = True
            self._client.abort(self.rid)

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
