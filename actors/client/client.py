"""The blocking client of the SDK.

    with Client("default") as c:
        c.wait_ready(60)
        print(c.generate("Hello", SamplingParams(max_tokens=16)).text)
        for delta in c.stream("Once upon a time"):
            print(delta.text, end="")

It runs the same coroutines as `AsyncClient`: all that they await is their session, and this one's
waiting blocks the thread instead of suspending the coroutine, so that each runs to its end at the
first `send`. There is no event loop and no second thread, which a one-token request would notice
(4 and 7 % of its time). Light: pyzmq and msgspec, no asyncio, no engine.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from threading import RLock
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from actorium.actors.client.calls import AsyncDeltaStream, ClientCalls, Prompt
from actorium.actors.client.request_batch import WINDOW
from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.client.session import ClientSession
from actorium.actors.client.target import locate
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams

__all__ = ["Client", "Completion", "DeltaStream", "Request", "SamplingParams", "StreamDelta"]

P = ParamSpec("P")
R = TypeVar("R")


class BlockingSession(ClientSession):
    """A session whose coroutines never suspend: it polls its sockets in the calling thread."""

    def signal(self) -> PollingSignal:
        return PollingSignal(self)

    async def pause(self, seconds: float) -> None:
        sleep(seconds)


class PollingSignal:
    """Whoever waits receives messages until what it waits for has come, so nobody need wake it."""

    def __init__(self, session: BlockingSession) -> None:
        self._session = session

    def set(self) -> None:
        pass

    async def wait(self, until: Callable[[], bool], seconds: float = math.inf) -> None:
        """Raises `EngineUnavailable` if nothing will ever come."""
        session = self._session
        now = session.last_heard = monotonic()
        end = now + seconds
        while not until() and now < end:
            if session.link is not None:
                quiet = not session.link.wait(min(session.delay(now), end - now))
            elif session.resuming:
                quiet = True
                sleep(session.delay(now))
            else:
                raise session.target.ended_error()
            now = monotonic()
            session.step(now, quiet)


def blocking(method: Callable[Concatenate[ClientCalls, P], Coroutine[Any, Any, R]]
             ) -> Callable[Concatenate[Client, P], R]:
    """Returns the method of `Client` with the same signature. A stream becomes a blocking one."""
    @functools.wraps(method)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> Any:
        result = self._finish(method(self._calls, *args, **kwargs))
        return DeltaStream(self, result) if isinstance(result, AsyncDeltaStream) else result
    return call


class Client:
    """A blocking connection to one engine. For one thread at a time: give each its own. (A thread
    that calls while another one is in a call gets a `RuntimeError`.)

    Connects at the first call, and again after the engine was restarted. `target` is an engine's
    name, the path (`ipc://` or plain) of its run directory, or, on another machine, its address
    (`tcp://host:port`); that takes a `key`, the path of a key file (`actorium keys`). `run_dir` is
    where names are looked up (default: as the engine's own `--run-dir`). `tenant` is whose requests
    these are (see `Request.tenant`). When an actor of the engine dies and comes back, requests go
    on; when the whole engine ends, they fail unless another one with the same name and ledger
    appears within `resume_timeout` seconds; calls made meanwhile wait for it, too. Raises
    `InvalidRequest` on a bad tenant or timeout, `BadConfig` on a bad key.
    """

    def __init__(self, target: str | os.PathLike[str] = "default", run_dir: str | None = None,
                 tenant: str = "", resume_timeout: float = 0.0,
                 key: str | os.PathLike[str] | None = None) -> None:
        self._session = BlockingSession(locate(target, run_dir, key), tenant, resume_timeout)
        self._calls = ClientCalls(self._session)
        self._one_thread = RLock()

    generate = blocking(ClientCalls.generate)
    chat = blocking(ClientCalls.chat)
    embed = blocking(ClientCalls.embed)
    classify = blocking(ClientCalls.classify)
    score = blocking(ClientCalls.score)
    abort = blocking(ClientCalls.abort)
    tokenize = blocking(ClientCalls.tokenize)
    tokenize_chat = blocking(ClientCalls.tokenize_chat)
    detokenize = blocking(ClientCalls.detokenize)
    server_info = blocking(ClientCalls.server_info)
    flush_cache = blocking(ClientCalls.flush_cache)
    sleep = blocking(ClientCalls.sleep)
    wake_up = blocking(ClientCalls.wake_up)
    is_sleeping = blocking(ClientCalls.is_sleeping)
    pause = blocking(ClientCalls.pause)
    resume = blocking(ClientCalls.resume)
    is_paused = blocking(ClientCalls.is_paused)
    load_adapter = blocking(ClientCalls.load_adapter)
    unload_adapter = blocking(ClientCalls.unload_adapter)
    adapters = blocking(ClientCalls.adapters)
    update_weights = blocking(ClientCalls.update_weights)
    weight_version = blocking(ClientCalls.weight_version)
    get_weights = blocking(ClientCalls.get_weights)
    status = blocking(ClientCalls.status)
    wait_ready = blocking(ClientCalls.wait_ready)
    close = blocking(ClientCalls.close)

    def stream(self, prompt: Prompt | None = None, params: SamplingParams | None = None,
               timeout: float | None = None, priority: int = 0,
               truncate_prompt_tokens: int | None = None,
               cache_salt: str | None = None, adapter: str | None = None,
               prompt_embeds: Any = None) -> DeltaStream:
        """Sends one prompt, and iterates over the new deltas one by one (of all its n choices).

        Closing the iterator, or leaving a `for` loop over it, aborts the request.
        """
        return DeltaStream(self, self._calls.stream(prompt, params, timeout, priority,
                                                    truncate_prompt_tokens, cache_salt, adapter,
                                                    prompt_embeds))

    def run(self, requests: Iterable[Request], window: int = WINDOW
            ) -> Generator[tuple[int, list[Completion] | ActoriumError], None, None]:
        """Runs any number of requests, at most `window` at once.

        Yields (number of the request, its choices or its error) as they finish. Closing the
        iterator aborts what is left.
        """
        results = self._calls.run(requests, window)
        try:
            while True:
                try:
                    result = self._finish(results.__anext__())
                except StopAsyncIteration:
                    return
                yield result
        finally:
            self._finish(results.aclose())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _finish(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine of `BlockingSession` to its end. ZMQ ends the whole process where two
        threads use a socket at once, so a second thread gets a `RuntimeError`."""
        if not self._one_thread.acquire(blocking=False):
            coroutine.close()
            raise RuntimeError("another thread waits for answers of this client: "
                               "give each thread a Client of its own")
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            self._one_thread.release()
        raise RuntimeError("a blocking session has suspended its caller")


class DeltaStream(Iterator[StreamDelta]):
    """Deltas of one request. `close` aborts it if it has not ended."""

    def __init__(self, client: Client, stream: AsyncDeltaStream) -> None:
        self._client = client
        self._stream = stream
        client._finish(stream.start())

    @property
    def rid(self) -> str:
        """Returns the request's id (for `Client.abort`)."""
        return self._stream.rid

    def __next__(self) -> StreamDelta:
        try:
            return self._client._finish(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Aborts the request unless it has ended."""
        self._client._finish(self._stream.aclose())

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.rid:  # else it could not be sent
            self.close()
