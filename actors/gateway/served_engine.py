"""The engine behind all calls of one gateway: its client, and the state that the calls share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.reasoning_formats import NONE
from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.api.response_store import BackgroundJobs, open_store
from actorium.actors.gateway.http.access_log import AccessLog
from actorium.actors.gateway.http.exchange_traces import ExchangeTraces
from actorium.actors.gateway.http.http_errors import SERVER, HttpError
from actorium.actors.gateway.http.peers import Peers
from actorium.actors.gateway.resume.delta_streams import SharedStreams
from actorium.actors.gateway.served_model import ServedModel, TokenTexts
from actorium.actors.health import WORKING_PHASES, not_at_work
from actorium.actors.messages import Status
from actorium.actors.models.model_dir import bodies_limit, body_limit
from actorium.actors.runtime.inflight_journal import InflightJournal

LOG = logging.getLogger("actorium.gateway")
STATUS_SECONDS = 1.0
"""Seconds that new requests wait for the watchdog's status."""


class BodyBudget:
    """Bytes of large bodies being read now, and their limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0


class AbortableCall(Protocol):
    """The interface of `EngineCall` for aborts: an HTTP request under way."""

    tenant: str

    def mark_aborted(self, name: str) -> tuple[list[str], list[str]]: ...


class ServedEngine:
    """One gateway's engine. Closed by `close`."""

    def __init__(self, config: Config, run_dir: Path,
                 journal: InflightJournal | None = None, role: str = "gateway-0",
                 traces: ExchangeTraces | None = None) -> None:
        """role: the gateway's; traces: None = there are none. Raises `BadConfig` if the response
        store cannot be opened."""
        self.journal = journal or InflightJournal(actor="gateway")
        self.config, self.settings = config, config.gateway
        self.run_dir, self.traces = run_dir, traces
        self.client = AsyncClient(run_dir)
        self.token_texts = TokenTexts(config)
        self.requests = 0
        """HTTP requests answered or under way since the start."""
        self.open = 0
        """HTTP requests under way."""
        self.draining = False
        self.body_limit = body_limit(config)
        """Bytes of one request's body."""
        self.bodies = BodyBudget(bodies_limit(self.body_limit))
        self.access = AccessLog(self.settings.access_log)
        self.gate = RecoveryGate(lambda: self.client.status(STATUS_SECONDS),
                                 self.settings.recovery_patience)
        self.shared_streams = SharedStreams()
        self.peers = Peers(run_dir, role, self.abort)
        self.responses = open_store(self.settings)
        self.jobs = BackgroundJobs()
        self.calls: set[AbortableCall] = set()
        """HTTP requests under way, and responses that go on in the background."""
        self._model: ServedModel | None = None
        self._asking_model = asyncio.Lock()

    async def served_model(self) -> ServedModel:
        """Returns the model, which is asked for once. Raises `ActoriumError` while the engine does
        not answer."""
        if self._model is None:
            async with self._asking_model:
                if self._model is None:
                    self._model = await self._ask_model()
        return self._model

    async def _ask_model(self) -> ServedModel:
        model = ServedModel(await self.client.server_info(), self.config)
        if model.templates.generic_tools:
            LOG.info("the chat template has no place for tools: the system message tells a "
                     "request's, and asks for calls as <tool_call>{...}</tool_call>")
        if model.parsing.reasoning != NONE and not self.config.model.skip_tokenizer:
            model.thought_end = await self.client.tokenize(model.parsing.row.end[0], False)
        return model

    async def check_model(self, name: str | None) -> ServedModel:
        """Returns the model that a request names. Raises `HttpError` 404 if it is not served."""
        model = await self.served_model()
        if not model.names.known(name):
            raise HttpError(404, f"model: {str(name)[:200]!r} is not served here; "
                            f"{model.name!r} is", "model", code="model_not_found")
        return model

    async def abort(self, name: str, tenant: str | None,
                    but: AbortableCall | None = None) -> list[str]:
        """Aborts this gateway's requests of a name ("" = all) and a tenant (None = any). Returns
        the callers' names for them."""
        ended: list[str] = []
        for call in self.calls - {but}:
            if tenant is None or call.tenant == tenant:
                labels, rids = call.mark_aborted(name)
                ended += labels
                for rid in rids:
                    await self.client.abort(rid)
        return ended

    async def close(self) -> None:
        """Aborts what is under way and disconnects."""
        await self.client.close()


FRESH = 0.25
"""Seconds for which the watchdog's status counts as current."""
AGAIN = 0.1
"""Seconds between two status queries while the engine is not ready."""
NEEDED = ("tokenizer", "detokenizer", "scheduler", "worker-")
"""Without one of these no token is generated. Gateways are not among them: this one runs."""


def obstacle(status: Status) -> str:
    """Returns why new requests cannot be served; empty = they can."""
    needed = (actor for actor in status.actors if actor.role.startswith(NEEDED))
    return status.error or not_at_work(needed, WORKING_PHASES)


class RecoveryGate:
    """Holds requests back while the engine recovers."""

    def __init__(self, ask: Callable[[], Awaitable[Status]], patience: float) -> None:
        """ask: the watchdog; patience: seconds."""
        self._ask, self._patience = ask, patience
        self._asked = -float("inf")
        self._known = False
        """The watchdog has answered."""
        self._since: float | None = None
        """When the engine was first seen not to be ready."""
        self._why = ""
        self._given_up = False
        """It will never be ready again."""
        self._open = asyncio.Event()
        """There is nothing to wait for."""
        self._open.set()
        self._looking: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Returns when a new request can be expected to be served. Raises `HttpError` 503 if that
        takes too long, or will never be."""
        now = monotonic()
        if self._looking is None and now >= self._asked + FRESH:
            self._asked = now
            self._looking = asyncio.ensure_future(self._look())
        if not self._known and self._looking is not None:
            await asyncio.wait([self._looking], timeout=FRESH)
        if self._since is None:
            return
        late = False
        try:
            async with asyncio.timeout_at(_loop_time(self._since + self._patience)):
                await self._open.wait()
        except TimeoutError:
            late = True
        if late or self._given_up:
            raise HttpError(503, f"the engine is not ready: {self._why}", None, SERVER,
                            "unavailable")

    async def _look(self) -> None:
        try:
            while await self._blocked():
                await asyncio.sleep(AGAIN)
        finally:
            self._looking = None

    async def _blocked(self) -> bool:
        try:
            status = await self._ask()
            why, self._given_up = obstacle(status), bool(status.error)
        except ActoriumError:  # the watchdog itself may be recovering: nothing has changed
            why = self._why
        self._asked, self._known = monotonic(), True
        if not why:
            self._since, self._why = None, ""
            self._open.set()
            return False
        self._why = why
        self._since = self._since if self._since is not None else self._asked
        if self._given_up:
            self._open.set()
        else:
            self._open.clear()
        return True


def _loop_time(when: float) -> float:
    """Converts a time of CLOCK_MONOTONIC to the loop's."""
    return asyncio.get_running_loop().time() + when - monotonic()
