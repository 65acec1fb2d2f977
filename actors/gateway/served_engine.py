"""The engine behind all calls of one gateway's process: its client, and what they share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import Config
from actorium.actors.gateway.faces.response_store import BackgroundJobs, open_store
from actorium.actors.gateway.http.access_log import AccessLog
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.peers import Peers
from actorium.actors.gateway.http.recovery_gate import RecoveryGate
from actorium.actors.gateway.parsers.parsing import NONE
from actorium.actors.gateway.parsers.think import CLOSE
from actorium.actors.gateway.resume.delta_streams import SharedStreams
from actorium.actors.gateway.served_model import ServedModel, TokenTexts
from actorium.actors.runtime.inflight_journal import InflightJournal

STATUS_SECONDS = 1.0
"""How long new requests wait for the watchdog to say that all is well."""


class BodyBudget:
    """Bytes of large bodies that are being read now, and how many may be."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0


class AbortableCall(Protocol):
    """An HTTP request under way, as `EngineCall` is."""

    tenant: str

    def mark_aborted(self, name: str) -> tuple[list[str], list[str]]: ...


class ServedEngine:
    """One for a gateway's process. Closed by `close`."""

    def __init__(self, config: Config, run_dir: Path,
                 journal: InflightJournal | None = None) -> None:
        """Raises `BadConfig` on a store of responses that cannot be opened."""
        self.journal = journal or InflightJournal(actor="gateway")
        self.config, self.settings = config, config.gateway
        self.run_dir = run_dir
        self.client = AsyncClient(run_dir)
        self.token_texts = TokenTexts(config)
        self.requests = 0
        """HTTP requests answered or under way since the start."""
        self.open = 0
        """HTTP requests under way."""
        self.draining = False
        self.bodies = BodyBudget(64 * self.settings.max_body_bytes)
        self.access = AccessLog(self.settings.access_log)
        self.gate = RecoveryGate(lambda: self.client.status(STATUS_SECONDS),
                                 self.settings.recovery_patience)
        self.shared_streams = SharedStreams()
        self.peers = Peers(run_dir, self.abort)
        self.responses = open_store(self.settings)
        self.jobs = BackgroundJobs()
        self.calls: set[AbortableCall] = set()
        """HTTP requests under way, and responses that go on in the background."""
        self._model: ServedModel | None = None
        self._asking_model = asyncio.Lock()

    async def served_model(self) -> ServedModel:
        """Asked for once. Raises `ActoriumError` while the engine does not answer."""
        if self._model is None:
            async with self._asking_model:
                if self._model is None:
                    self._model = await self._ask_model()
        return self._model

    async def _ask_model(self) -> ServedModel:
        model = ServedModel(await self.client.server_info(timeout=30.0), self.config)
        if model.parsing.reasoning != NONE and not self.config.model.skip_tokenizer:
            model.thought_end = await self.client.tokenize(CLOSE, False)
        return model

    async def check_model(self, name: str | None) -> ServedModel:
        """The model that a request asks for by this name. Raises `HttpError` 404 if it is another
        one."""
        model = await self.served_model()
        if not model.names.known(name):
            raise HttpError(404, f"model: {str(name)[:200]!r} is not served here; "
                            f"{model.name!r} is", "model", code="model_not_found")
        return model

    async def abort(self, name: str, tenant: str | None,
                    but: AbortableCall | None = None) -> list[str]:
        """End this gateway's requests that go by a name, "" = all, of a tenant, None = of anybody.
        Returns what their callers call them."""
        ended: list[str] = []
        for call in self.calls - {but}:
            if tenant is None or call.tenant == tenant:
                labels, rids = call.mark_aborted(name)
                ended += labels
                for rid in rids:
                    await self.client.abort(rid)
        return ended

    async def close(self) -> None:
        """Abort what is under way and disconnect."""
        await self.client.close()
