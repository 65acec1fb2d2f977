"""What the gateway does for one HTTP request at a stretch stands on the docket meanwhile.

Between two of its waits a request's coroutine has the process to itself: its body is decoded, what
it asks is converted, the engine's deltas are parsed and written. If the process dies or hangs in
such a stretch, the next incarnation knows of whom.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from actorium.actors.gateway.asking import Ask


def in_stretches(app: ASGIApp, ask: Ask) -> ASGIApp:
    """The application, for this request."""
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await Stretches(app(scope, receive, send), ask)  # type: ignore[arg-type]
    return run


class Stretches:
    """An awaitable that runs a coroutine, from wait to wait."""

    __slots__ = ("_ask", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, None], ask: Ask) -> None:
        self._coroutine, self._ask = coroutine, ask

    def __await__(self) -> Stretches:
        return self

    def __iter__(self) -> Stretches:
        return self

    def __next__(self) -> Any:
        return self._run(self._coroutine.send, None)

    def send(self, value: Any) -> Any:
        """As a generator's."""
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """As a generator's."""
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        """As a generator's."""
        self._coroutine.close()

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        ask = self._ask
        if ask.on_docket:
            ask.docket.put(ask.on_docket)
        try:
            return step(*args)
        finally:
            ask.docket.clear()
