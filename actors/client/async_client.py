"""`AsyncClient`: the asyncio twin of `Client`. Any loop with `add_reader` will do (uvloop too).

One client serves any number of tasks of one loop. Cancelling a task aborts what it waited for.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any

from actorium.actors.client import calls
from actorium.actors.client.connection import (
    DETOKENIZER,
    TOKENIZER,
    WATCHDOG,
    Link,
    check_alive,
    locate,
)
from actorium.actors.client.core import WINDOW, Batch, ClientCore
from actorium.actors.client.pending import Pending, Progress
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

NEWS_LATE = 1.0
"""Seconds that the tokenizer's answer may come after the first delta."""


class AsyncDeltaStream(AsyncIterator[StreamDelta]):
    """Deltas of one request, sent at the first `anext`. `rid` names it from then on."""

    def __init__(self, client: AsyncClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._pending: Pending | None = None
        self._news = asyncio.Event()

    @property
    def rid(self) -> str:
        """"" until the request was sent."""
        return "" if self._pending is None else self._pending.rid

    @property
    def progress(self) -> Progress | None:
        """None until the request was sent."""
        return None if self._pending is None else self._pending.progress

    @property
    def prompt_tokens(self) -> int | None:
        """None until the request was accepted, as a rule before its first delta."""
        return None if self._pending is None else self._pending.prompt_tokens

    async def accepted(self) -> int:
        """Send the request, if it was not, and wait for `prompt_tokens`. 0 if it ends before, which
        the next `anext` tells, or if an actor died with the news."""
        pending = self._pending or await self._start()
        while pending.prompt_tokens is None and not pending.done and not pending.told:
            await self._wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_LATE):
                while pending.prompt_tokens is None and not pending.done:
                    self._news.clear()
                    await self._news.wait()
        return pending.prompt_tokens or 0

    def more(self) -> list[StreamDelta]:
        """Deltas that have come already, without waiting."""
        if self._pending is None:
            return []
        found = list(self._pending.deltas)
        self._pending.deltas.clear()
        return found

    async def _wait(self) -> None:
        self._news.clear()
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def __anext__(self) -> StreamDelta:
        pending = self._pending or await self._start()
        while not pending.deltas and not pending.done:
            await self._wait()
        if pending.deltas:
            return pending.deltas.popleft()
        if pending.error is not None:
            error, pending.error = pending.error, None
            raise error
        raise StopAsyncIteration

    async def _start(self) -> Pending:
        client = self._client
        await client._ready()
        if self._pending is not None:  # who also waits for it has sent it meanwhile
            return self._pending
        pending, frame = client._core.submit(self._request, monotonic(), streaming=True)
        pending.notify = self._news.set
        self._pending = pending
        client._send(TOKENIZER, frame)
        return pending

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        pending = self._pending
        if pending is not None and not pending.done and self._client._core.forget(pending.rid):
            pending.done = True
            self._client._abort([Abort(pending.rid)])

    async def __aenter__(self) -> AsyncDeltaStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncClient:
    """An asyncio connection to one engine; arguments and errors as for `Client`."""

    def __init__(self, target: str | os.PathLike[str] = "default", run_dir: str | None = None,
                 tenant: str = "", resume_timeout: float = 0.0,
                 key: str | os.PathLike[str] | None = None) -> None:
        self._directory = locate(target, run_dir, key)
        self._resume = calls.Resumption(resume_timeout)
        self._link: Link | None = None
        self._incarnation = calls.Incarnation(self._directory)
        self._fds: list[int] = []
        self._core = ClientCore(calls.fresh_prefix(), tenant)
        self._quiet = calls.Quiet(monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._attaching: asyncio.Event | None = None

    # --- completions --------------------------------------------------------------------------

    async def generate(self, prompt: calls.Prompts,
                       params: SamplingParams | Sequence[SamplingParams] | None = None,
                       timeout: float | None = None, return_errors: bool = False,
                       priority: int = 0, truncate_prompt_tokens: int | None = None,
                       cache_salt: str | None = None) -> Any:
        """As `Client.generate`."""
        requests, shape = calls.requests(prompt, params, timeout, priority,
                                         truncate_prompt_tokens, cache_salt)
        found: list[Any] = [None] * len(requests)
        results = self.run(requests)
        try:
            async for index, result in results:
                if isinstance(result, ActoriumError) and not return_errors:
                    raise result
                found[index] = result
        finally:
            await results.aclose()
        return shape(found)

    async def run(self, requests: Iterable[Request], window: int = WINDOW
                  ) -> AsyncGenerator[tuple[int, list[Completion] | ActoriumError], None]:
        """As `Client.run`."""
        batch = Batch(self._core, requests, window)
        news = asyncio.Event()
        batch.notify = news.set
        await self._ready()
        try:
            while not batch.done:
                for frame in batch.submit(monotonic()):
                    self._send(TOKENIZER, frame)
                while not batch.settled():
                    news.clear()
                    await news.wait()
                while batch.ready:
                    yield batch.ready.popleft()
        finally:
            self._abort(batch.cancel())

    def stream(self, prompt: calls.Prompt, params: SamplingParams | None = None,
               timeout: float | None = None, priority: int = 0,
               truncate_prompt_tokens: int | None = None,
               cache_salt: str | None = None) -> AsyncDeltaStream:
        """As `Client.stream`; use `async for`. `aclose` it when leaving early: unlike a `for`
        loop, `async for` does not tell an abandoned iterator at once."""
        return AsyncDeltaStream(self, Request(
            prompt=prompt, params=params, timeout=timeout, priority=priority,
            cache_salt=cache_salt, truncate_prompt_tokens=truncate_prompt_tokens))

    async def chat(self, messages: list[Any], params: SamplingParams | None = None,
                   stream: bool = False, timeout: float | None = None,
                   template_args: dict[str, Any] | None = None, priority: int = 0,
                   chat_template: str | None = None, add_generation_prompt: bool = True,
                   continue_final_message: bool = False,
                   truncate_prompt_tokens: int | None = None,
                   cache_salt: str | None = None) -> Any:
        """As `Client.chat`; with `stream` an `AsyncDeltaStream`."""
        request = Request(messages=messages, params=params, timeout=timeout,
                          template_args=template_args or {}, priority=priority,
                          chat_template=chat_template, cache_salt=cache_salt,
                          add_generation_prompt=add_generation_prompt,
                          continue_final_message=continue_final_message,
                          truncate_prompt_tokens=truncate_prompt_tokens)
        if stream:
            return AsyncDeltaStream(self, request)
        results = self.run([request])
        try:
            async for _, result in results:
                if isinstance(result, ActoriumError):
                    raise result
                return calls.one(result)
        finally:
            await results.aclose()

    async def abort(self, rid: str) -> None:
        """End a request of this client (`AsyncDeltaStream.rid`) now."""
        self._abort([Abort(rid)])

    # --- questions ----------------------------------------------------------------------------

    async def tokenize(self, text: str, add_special_tokens: bool = True,
                       timeout: float | None = None) -> list[int]:
        """Token ids of `text`."""
        question = calls.tokenize(text, add_special_tokens)
        return calls.ids_of(await self._ask(TOKENIZER, question, timeout))

    async def tokenize_chat(self, messages: list[Any], template_args: dict[str, Any] | None = None,
                            tools: list[dict[str, Any]] | None = None,
                            timeout: float | None = None, chat_template: str | None = None,
                            add_generation_prompt: bool = True,
                            continue_final_message: bool = False) -> list[int]:
        """Token ids of the prompt that the model's chat template makes of `messages`."""
        question = calls.tokenize_chat(messages, template_args, tools, chat_template,
                                       add_generation_prompt, continue_final_message)
        return calls.ids_of(await self._ask(TOKENIZER, question, timeout))

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False,
                         timeout: float | None = None) -> str:
        """Text of token ids."""
        question = calls.detokenize(token_ids, skip_special_tokens)
        return str((await self._ask(TOKENIZER, question, timeout)).text)

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        """As `Client.server_info`."""
        info = calls.info_of(await self._ask(TOKENIZER, calls.server_info, timeout))
        status = await self.status(timeout or calls.STATUS_TIMEOUT)
        return info | calls.gauges_of(status)

    async def flush_cache(self, timeout: float | None = 30.0) -> dict[str, int]:
        """As `Client.flush_cache`."""
        await self._ready()
        return calls.flushed_of(await self._ask(TOKENIZER, calls.flush_cache, timeout))

    async def status(self, timeout: float | None = calls.STATUS_TIMEOUT) -> Status:
        """What each actor is doing, at once."""
        answer: Status = await self._ask(WATCHDOG, calls.get_status(False), timeout)
        return answer

    async def wait_ready(self, timeout: float | None = None) -> None:
        """As `Client.wait_ready`."""
        check_timeout(timeout)
        deadline = calls.ready_deadline(timeout, monotonic())
        while not calls.may_exist(self._directory):
            calls.check_late(self._directory, deadline, monotonic())
            await asyncio.sleep(calls.POLL)
        while (left := deadline - monotonic()) > 0:
            try:
                if calls.is_ready(await self._ask(WATCHDOG, calls.get_status(True), left)):
                    return
            except DeadlineExceeded:
                break
            await asyncio.sleep(calls.POLL)
        raise calls.not_ready(timeout)

    # --- life ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Abort what is under way and disconnect. The client may be used again."""
        self._abort(self._core.live_requests())
        self._drop(EngineUnavailable("the client was closed"))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    # --- plumbing -----------------------------------------------------------------------------

    async def _ready(self) -> None:
        """Connected and attached. Raises `EngineUnavailable`."""
        self._notice_restart()
        while not self._core.attached:
            self._connect(TOKENIZER, DETOKENIZER)
            if self._attaching is None:
                self._attaching = asyncio.Event()
                self._send(DETOKENIZER, encode(Attach(), "client"))
            await self._attaching.wait()
            if self._link is None:
                raise calls.gone_away(self._directory)

    def _notice_restart(self) -> None:
        if self._link is not None and self._incarnation.replaced():
            self._engine_gone()

    def _connect(self, *fronts: str) -> None:
        if self._link is None:
            check_alive(self._directory)
            self._incarnation.remember()
            self._link = Link(self._directory, self._resume.identity)
            if self._resume.end():
                self._send_all(self._core.renewed(monotonic()))
        loop = asyncio.get_running_loop()
        for fd in self._link.connect(*fronts):
            loop.add_reader(fd, self._pump)
            self._fds.append(fd)

    def _send(self, front: str, frame: bytes) -> None:
        if self._link is None:
            raise calls.gone_away(self._directory)
        self._link.send(front, frame)
        # The send may have taken the edge of something that came in: look again.
        asyncio.get_running_loop().call_soon(self._pump)
        self._arm()

    def _send_all(self, frames: list[tuple[str, bytes]]) -> None:
        """As `Client._send_all`."""
        for front, frame in frames:
            with suppress(EngineUnavailable):
                self._connect(front)
                self._send(front, frame)

    def _abort(self, aborts: list[Abort]) -> None:
        for abort in aborts if self._link is not None else ():
            self._core.aborting(abort.rid, monotonic())
            self._connect(TOKENIZER)
            self._send(TOKENIZER, encode(abort, "rid"))

    async def _ask(self, front: str, question: Callable[[str], Any],
                   timeout: float | None) -> Any:
        check_timeout(timeout)
        self._notice_restart()
        now = monotonic()
        call = self._core.call(question, math.inf if timeout is None else now + timeout, front, now)
        news = asyncio.Event()
        call.notify = news.set
        try:
            self._connect(front)
            self._send(front, call.frame)
            while not call.done:
                news.clear()
                await news.wait()
        finally:
            self._core.forget(call.rid)
        return call.result()

    def _pump(self) -> None:
        """Take all that has come. Runs whenever an fd is readable and after each send."""
        if self._link is None:
            return
        now = monotonic()
        self._quiet.heard(now)
        try:
            again = self._link.reconnected()
            if again and self._incarnation.gone():
                self._engine_gone()
                return
            for front in again:
                self._send_all(self._core.reconnected(front, now))
            for message in self._link.receive():
                self._core.on_message(message, now)
            self._send_all(self._core.resend(now))
        except ActoriumError as error:
            self._drop(EngineUnavailable(error.message))
        if self._core.attached and self._attaching is not None:
            self._attaching.set()
            self._attaching = None

    def _arm(self) -> None:
        """While anything waits, a timer looks after deadlines and the engine's life."""
        if self._timer is None and (self._core.waiting or self._attaching is not None):
            next_due = min(self._core.soonest, self._core.due)
            delay = min(calls.LIVENESS, max(0.001, next_due - monotonic()))
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = monotonic()
        self._abort(self._core.expire(now))
        if self._link is None:
            self._come_back(now)
            return
        if self._incarnation.gone():
            self._pump()
            self._engine_gone()
            return
        self._send_all(self._core.resend(now))
        if self._core.attached and self._core.waiting and self._quiet.ask(now):
            self._send(DETOKENIZER, encode(Attach(), "client"))
        self._arm()

    def _engine_gone(self) -> None:
        """As `Client._engine_gone`."""
        link = self._link
        if link is None or not self._resume.begin(link.identity, monotonic()):
            self._drop(calls.gone_away(self._directory))
            return
        self._link, self._core.attached = None, False
        self._close(link)
        self._arm()

    def _come_back(self, now: float) -> None:
        """Connect to the next engine, if it is there; everything fails when it is late."""
        if self._resume.late(now):
            self._drop(calls.gone_away(self._directory))
        elif not calls.may_exist(self._directory):
            self._arm()
        else:
            self._connect(TOKENIZER, DETOKENIZER)

    def _drop(self, error: EngineUnavailable) -> None:
        link, self._link = self._link, None
        self._resume.end()
        attaching, self._attaching = self._attaching, None
        self._core.fail_all(error)
        if attaching is not None:
            attaching.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if link is not None:
            self._close(link)

    def _close(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._fds:
            loop.remove_reader(fd)
        self._fds = []
        link.close()
