"""The engine of one HTTP request: the only one of its server, or that of the model which the
request names. This one is started if it does not run, and stays while the request needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from actorium.actors.gateway.engine_uses import EngineUse, checked_keep_alive
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.resume.delta_streams import Deltas, RelayedStream
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.model_manager.manager_messages import UseProgress

COMMENTS_ONLY = b"\xc0"
"""Position of a stream of which nothing but comments was sent."""


class ChosenEngine:
    """The engine of a request."""

    def __init__(self, gateway: GatewayState, tenant: str = "", sets_keep_alive: bool = True
                 ) -> None:
        """tenant: the caller's; sets_keep_alive: the caller may say how long the engine stays; else
        its model does."""
        self._models = gateway.models
        self._tenant, self._sets_keep_alive = tenant, sets_keep_alive
        self._engine = gateway.engine if gateway.models is None else None
        self._use: EngineUse | None = None
        """Of the engine, where the server has several."""
        self._name = ""
        """What the request has called the model."""
        self.adapter: str | None = None
        """Name of the LoRA adapter that the request names."""
        self.comment: Callable[[str], Awaitable[None]] | None = None
        """Sends a comment ahead of the events of the answer's stream; None = it has none."""
        self.head_sent = False
        """The stream's head was sent, with such comments."""
        self.waits_for_recovery = False
        """The request waits while the engine recovers."""

    @property
    def engine(self) -> ServedEngine:
        """The engine. Raises `HttpError` 400 if none is chosen, of several."""
        if self._engine is None:
            raise HttpError(400, "model: this server has several models, and the request names "
                            "none: name one in the query, as ?model=NAME (/v1/models lists them)",
                            "model", code="model_required")
        return self._engine

    async def model(self, body: Any) -> ServedModel:
        """Returns the model that a body names, and notes its adapter; of several, chooses its
        engine. body: with `model`, and, as far as it has them, `lora_path`, `stream`, `timeout` and
        `keep_alive`. Raises `HttpError` 404 if there is no such model, and as `choose`."""
        name, adapter = body.model, getattr(body, "lora_path", None)
        if self._models is not None:
            name = None  # it was that of the engine
            await self._choose_for(body)
        model = await self.engine.requested_model(name, adapter)
        self.adapter = model.adapter
        return model

    async def _choose_for(self, body: Any) -> None:
        given = getattr(body, "keep_alive", None)
        keep_alive = None if given is None else checked_keep_alive(given)
        timeout = getattr(body, "timeout", None)
        if timeout is not None and not timeout >= 0:
            raise bad_field("timeout", f"must not be negative, got {timeout:g}")
        await self.choose(body.model or "", keep_alive if self._sets_keep_alive else None,
                          timeout, getattr(body, "stream", False))

    async def choose(self, name: str, keep_alive: float | None = None, wait: float | None = None,
                     stream: bool = False) -> None:
        """Chooses the engine of a model, of several, and waits until it runs. keep_alive, wait: as
        of `EngineUses.use`; stream: the answer is a stream, which gets comments meanwhile. Raises
        `HttpError`, also if the query has chosen another model."""
        assert self._models is not None
        if self._use is None:
            report = self._report if stream and self.comment is not None else None
            self._use = await self._models.use(name, keep_alive, wait, report, self._tenant)
            self._engine, self._name = self._use.engine, name
            if self.waits_for_recovery:
                await self._engine.gate.enter()
        elif name and name != self._name:
            raise bad_field("model", f"{name[:200]!r}, but the query has {self._name[:200]!r}")

    async def _report(self, progress: UseProgress | None) -> None:
        """Tells the caller of a stream what it waits for, so that no proxy gives it up."""
        assert self.comment is not None
        self.head_sent = True
        if progress is None:
            await self.comment("waiting for the model manager ...")
        else:
            detail = f": {progress.detail}" if progress.detail else ""
            await self.comment(f"model {progress.model} is {progress.state}{detail} ...")

    # --- how long it is kept ---

    def hold(self) -> ChosenEngine:
        """Returns another holder of the same engine."""
        other = ChosenEngine.__new__(ChosenEngine)
        other.__dict__ |= self.__dict__
        if self._use is not None:
            self._use.hold()
        return other

    def kept_by(self, stream: Deltas) -> Deltas:
        """Returns a stream that may outlive the request, and keeps the engine until it is closed.
        """
        return stream if self._use is None else EngineKeepingStream(stream, self._use.hold())

    def release(self, after: float) -> None:
        """Lets go of the engine. after: seconds until then."""
        use, self._use = self._use, None
        if use is not None and after:
            asyncio.get_running_loop().call_later(after, use.release)
        elif use is not None:
            use.release()


class EngineKeepingStream(RelayedStream):
    """A stream that keeps its engine until it is closed."""

    def __init__(self, source: Deltas, use: EngineUse) -> None:
        super().__init__(source)
        self._use: EngineUse | None = use

    async def aclose(self) -> None:
        await super().aclose()
        use, self._use = self._use, None
        if use is not None:
            use.release()
