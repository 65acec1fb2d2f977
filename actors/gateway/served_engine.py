"""The engine behind the routes: its client, and what is known of its model."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.calls import AsyncDeltaStream
from actorium.actors.client.requests import Completion, Request
from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.engine_call import Ask
from actorium.actors.gateway.faces.response_store import Jobs, open_store
from actorium.actors.gateway.http.access_log import AccessLog
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.peers import Peers
from actorium.actors.gateway.http.recovery_gate import Gate
from actorium.actors.gateway.parsers.parsing import NONE, Parsing
from actorium.actors.gateway.parsers.think import CLOSE
from actorium.actors.gateway.resume.delta_streams import Deltas, Joins, Merged, Results, whole
from actorium.actors.gateway.served_model import ModelNames
from actorium.actors.gateway.token_texts import Pieces
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.inflight_journal import InflightJournal

STATUS_SECONDS = 1.0
"""How long new requests wait for the watchdog to say that all is well."""


class Facts:
    """What the engine says of itself once and for all."""

    def __init__(self, info: dict[str, Any], config: Config) -> None:
        settings = config.gateway
        self.info = info
        self.names = ModelNames(config, info["model"])
        self.parsing = Parsing(settings.tool_call_parser, settings.reasoning_parser,
                               info.get("chat_template"),
                               config.model.default_chat_template_kwargs)
        self.model: str = info["model"]
        self.max_model_len: int = info["max_model_len"]
        self.thought_end: list[int] = []
        """Token ids of the mark that ends reasoning; none where the model does not reason."""


class Held:
    """Bytes of requests that are still being read."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0


class Engine:
    """One for a gateway's process; `asked` gives each HTTP request its own view of it. Closed by
    `close`."""

    def __init__(self, config: Config, run_dir: Path,
                 journal: InflightJournal | None = None) -> None:
        """Raises `BadConfig` on a store of responses that cannot be opened."""
        self.journal = journal or InflightJournal(actor="gateway")
        self.config, self.settings = config, config.gateway
        self.run_dir = run_dir
        self.client = AsyncClient(run_dir)
        self.pieces = Pieces(config)
        self.requests = 0
        """Requests answered or under way since the start."""
        self.open = 0
        """Requests under way."""
        self.draining = False
        self.bodies = Held(64 * self.settings.max_body_bytes)
        self.access = AccessLog(self.settings.access_log)
        self.gate = Gate(lambda: self.client.status(STATUS_SECONDS),
                         self.settings.recovery_patience)
        self.joins = Joins()
        self.peers = Peers(run_dir, self._abort_here)
        self.responses = open_store(self.settings)
        self.jobs = Jobs()
        self.asks: set[Ask] = set()
        """HTTP requests under way."""
        self.ask = Ask(journal=self.journal)
        self._facts: list[Facts] = []
        self._asking = asyncio.Lock()

    def asked(self, ask: Ask) -> Engine:
        """The same engine, for one HTTP request: what it streams and runs outlives that as the
        request's headers say."""
        view = copy.copy(self)
        view.ask = ask
        return view

    async def facts(self) -> Facts:
        """Asked for once. Raises `ActoriumError` while the engine does not answer."""
        if not self._facts:
            async with self._asking:
                if not self._facts:
                    info = await self.client.server_info(timeout=30.0)
                    facts = Facts(info, self.config)
                    if facts.parsing.reasoning != NONE and not self.config.model.skip_tokenizer:
                        facts.thought_end = await self.client.tokenize(CLOSE, False)
                    self._facts.append(facts)
        return self._facts[0]

    async def serves(self, model: str | None) -> str:
        """The model's name. Raises `HttpError` 404 if another one is asked for."""
        facts = await self.facts()
        if not facts.names.known(model):
            raise HttpError(404, f"model: {str(model)[:200]!r} is not served here; "
                            f"{facts.model!r} is", "model", code="model_not_found")
        return facts.model

    def stream(self, *requests: Request) -> Deltas:
        """The deltas of a request, or of several that ask for as many choices, numbered through.
        They are sent when deltas are first asked for; `aclose` ends them, unless they are to
        outlive their caller."""
        each = (requests[0].params or SamplingParams()).n
        sources = self._sources(requests)
        source = sources[0] if len(sources) == 1 else Merged(sources, each)
        return self.ask.tracked(source, each * len(sources))

    def _sources(self, requests: Sequence[Request]) -> list[Deltas]:
        grace = self.settings.resume_grace
        return [self.ask.source(request, number, self._open, self.joins, grace)
                for number, request in enumerate(requests)]

    def _open(self, request: Request) -> AsyncDeltaStream:
        stream = AsyncDeltaStream(self.client, request)
        if self.ask.from_http:
            self.ask.tally.opened(stream)
        return stream

    def run(self, requests: list[Request]) -> Results:
        """Whole answers as they end, as `AsyncClient.run`."""
        if self.ask.key:
            return whole(self._sources(requests))
        return self.client.run([self.ask.named(request, number)
                                for number, request in enumerate(requests)])

    async def abort(self, name: str, tenant: str | None) -> list[str]:
        """End the requests that go by a name, "" = all, of a tenant, None = of anybody, at any
        gateway of the engine. Returns what their callers call them."""
        return await self._abort_here(name, tenant) + await self.peers.abort(name, tenant)

    async def _abort_here(self, name: str, tenant: str | None) -> list[str]:
        ended: list[str] = []
        for ask in self.asks - {self.ask}:
            if tenant is None or ask.tenant == tenant:
                labels, rids = ask.aborting(name)
                ended += labels
                for rid in rids:
                    await self.client.abort(rid)
        return ended

    async def complete(self, requests: list[Request]) -> list[list[Completion]]:
        """The choices of each request, in their order. The first error ends all of them and is
        raised, an `ActoriumError`."""
        found: list[list[Completion]] = [[] for _ in requests]
        results = self.run(requests)
        try:
            async for index, result in results:
                if isinstance(result, ActoriumError):
                    raise result
                found[index] = result
        finally:
            await results.aclose()
        self.ask.tally.completed(found)
        return found

    async def close(self) -> None:
        """Abort what is under way and disconnect."""
        await self.client.close()
