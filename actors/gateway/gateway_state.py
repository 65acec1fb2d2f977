"""What all HTTP requests of one gateway share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from actorium.actors.config.models_settings import serves_models
from actorium.actors.config.tree import Config
from actorium.actors.gateway.api.response_store import BackgroundJobs, open_store
from actorium.actors.gateway.engine_uses import EngineUses
from actorium.actors.gateway.http.access_log import AccessLog
from actorium.actors.gateway.http.exchange_traces import ExchangeTraces
from actorium.actors.gateway.http.peers import Peers
from actorium.actors.gateway.resume.delta_streams import SharedStreams
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.models.model_dir import bodies_limit, body_limit
from actorium.actors.runtime.inflight_journal import InflightJournal


class BodyBudget:
    """Bytes of large bodies being read now, and their limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0


class AbortableCall(Protocol):
    """The interface of `EngineCall` for aborts: an HTTP request under way."""

    tenant: str

    @property
    def engine(self) -> ServedEngine: ...

    def mark_aborted(self, name: str) -> tuple[list[str], list[str]]: ...


class GatewayState:
    """One gateway's engine or engines, and what its requests share beside. Closed by `close`."""

    def __init__(self, config: Config, run_dir: Path,
                 journal: InflightJournal | None = None, role: str = "gateway-0",
                 traces: ExchangeTraces | None = None) -> None:
        """role: the gateway's; traces: None = there are none. Raises `BadConfig` if the response
        store cannot be opened."""
        self.journal = journal or InflightJournal(actor="gateway")
        self.config, self.settings = config, config.gateway
        self.run_dir, self.traces = run_dir, traces
        self.engine = ServedEngine(config, run_dir, config.gateway.recovery_patience)
        """The server's own: with several models only a watchdog, which says how the server is."""
        self.models = EngineUses(run_dir, config) if serves_models(config.models) else None
        """What gives a request its model's engine; None = all requests are for `engine`."""
        self.requests = 0
        """HTTP requests answered or under way since the start."""
        self.open = 0
        """HTTP requests under way."""
        self.draining = False
        self.body_limit = body_limit(config)
        """Bytes of one request's body."""
        self.bodies = BodyBudget(bodies_limit(self.body_limit))
        self.access = AccessLog(self.settings.access_log)
        self.shared_streams = SharedStreams()
        self.peers = Peers(run_dir, role, self.abort)
        self.responses = open_store(self.settings)
        self.jobs = BackgroundJobs()
        self.calls: set[AbortableCall] = set()
        """HTTP requests under way, and responses that go on in the background."""

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
                    await call.engine.client.abort(rid)
        return ended

    async def close(self) -> None:
        """Aborts what is under way and disconnects."""
        await self.engine.close()
        if self.models is not None:
            await self.models.close()
