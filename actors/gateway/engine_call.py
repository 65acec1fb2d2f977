"""One HTTP request's calls to the engine: their ids, how long they live, and where a resumed stream
continues.

`Idempotency-Key`: a request resent with the same body, while the completion runs or is remembered,
gets that completion; with another body it is refused. Its completion survives a broken connection
for `gateway.resume_grace` seconds. `Last-Event-ID`, with the same path and body: the stream
continues after that event, if the engine still has its request: at any gateway, also after the
death of the one that began it. Events have ids where one of the two headers or the body asks for
them. Without a key a request ends with its connection.

The ids of a request:

- `request_id` (`http/guard.py`): of one HTTP exchange, the caller's `X-Request-Id` or random. In
  the answer's headers, in errors, in the access log.
- `resume_id`: by it another connection finds the request. The tenant and the `Idempotency-Key`,
  hashed, or random.
- `answer_id`: what the answer shows behind the prefix of its kind (`chatcmpl-`). The body's
  `request_id`, or the exchange's; where the answer can be resumed the `resume_id`, since the next
  connection has another exchange.
- `rids`: of its requests to the engine, one for each prompt: the `resume_id`, the prompt's number,
  and a hash of tenant, path and body. That separates tenants here, and the engine hands requests
  over within a tenant only. The ids of events begin with it.
- `labels`: the caller's own names of its completions (`rid` of `/generate`).
- `journal_id`: equal for equal requests of a caller, in the journal of in-flight requests.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from time import monotonic, time

import msgspec
from starlette.requests import Request as HttpRequest

from actorium.actors.client.calls import AsyncDeltaStream
from actorium.actors.client.requests import Completion, Request, Resumable
from actorium.actors.errors import Aborted, ActoriumError, EngineUnavailable
from actorium.actors.gateway.chosen_engine import COMMENTS_ONLY, ChosenEngine
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.access_log import CallUsage
from actorium.actors.gateway.http.exchange_traces import ExchangeTrace
from actorium.actors.gateway.http.http_errors import HttpError, bad_field, http_error
from actorium.actors.gateway.resume.delta_streams import (
    Deltas,
    MergedStream,
    Results,
    collected,
)
from actorium.actors.gateway.resume.event_ids import (
    MAX_CHOICES,
    CutCounts,
    ResumableStream,
    decode_position,
    parse_event_id,
)
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.messages import BACKGROUND
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.http.connection_records import ConnectionRecord
from actorium.actors.runtime.inflight_journal import NAME

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
BLANK_LINE = b"\n\n"
"""What ends a server-sent event."""
GATEWAY_GRACE = 120.0
"""Seconds that a request waits for the gateway that follows one that has died. It comes after a
second, but on a machine that has no processor to spare."""
_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
"""The part before the id in the names of answers."""

class EngineCall:
    """The engine's side of one HTTP request. Without headers it is one of the gateway's own."""

    def __init__(self, gateway: GatewayState, headers: Mapping[bytes, bytes] | None = None,
                 tenant: str = "", path: str = "", admin: bool = False,
                 record: ConnectionRecord | None = None,
                 batch_seconds: float | None = None) -> None:
        """admin: with the administrator's key; record: of its connection, if that may outlive this
        process; batch_seconds: the time left of the batch whose line it is, None = of no batch.
        Raises `HttpError` 400 on an invalid header."""
        self.gateway = gateway
        self.tenant, self.admin = tenant, admin
        self.administers = admin or gateway.settings.admin_key is None
        """The caller may do what routes with `Access.ADMIN` do."""
        self.chosen = ChosenEngine(gateway, tenant, self.administers)
        self.began = monotonic()
        """CLOCK_MONOTONIC seconds."""
        self.created = int(time())
        """When its answer began, Unix time in seconds; of an answer that is sent again, as the
        engine has recorded it (`admitted`)."""
        self._path, self._record, self._batch_seconds = path, record, batch_seconds
        self._identity = None if record is None else record.identity()
        self._from_http = headers is not None
        found = headers or {}
        self.key = found.get(b"idempotency-key", b"").strip()
        if self.key and not _KEY.fullmatch(self.key):
            raise bad_field("Idempotency-Key", "1 to 255 printable ASCII characters without spaces")
        last = found.get(b"last-event-id", b"").strip()
        self.position = parse_event_id(last.decode("latin-1")) if last else None
        """Where the stream continues, in this call and in any that continues this one."""
        self.resumable = bool(self.key) or self.position is not None
        """Each event of the stream has an id, so that another call can resume after it. The body
        may ask for that as well (`stream_options.resumable`). Other streams have no ids: many
        clients split a stream at its blank lines and take all that follows `data: `."""
        self.continued = record is not None and bool(record.begun)
        """A gateway that has died has sent the answer's beginning."""
        self.token = os.urandom(16) if self._identity is None else self._identity.token
        """Names the HTTP request, whichever gateway answers it."""
        self.trace: ExchangeTrace | None = None
        """None = there are no traces."""
        self.resume_id = self._resume_id()
        if record is not None and record.begun and record.begun != COMMENTS_ONLY:
            self.position = decode_position(record.begun)
        if self._identity is not None:
            self.created = self._identity.created
        self.answer_id = self.resume_id
        self.fields: dict[str, str] = {}
        """The body's names of the engine's fields, where they differ, for errors."""
        self.labels: list[str] = []
        """In the order of requests; none where the caller has not named any."""
        self.rids: list[str] = []
        self.usage = CallUsage()
        self.journal_id = b""
        """Set once the body is read."""
        self.cut_counts: CutCounts | None = None
        """Set where the answer's events depend on how it was cut into deltas."""
        self.event_end = BLANK_LINE
        """What ends an event of the answer's stream. Only server-sent events can have ids."""
        self._aborted = self._ended = False
        self._digest = ""
        self._resumed: ResumableStream | None = None

    @property
    def taken_over(self) -> bool:
        """A gateway that has died had begun to answer."""
        return self._identity is not None and self._identity.again

    def _resume_id(self) -> str:
        resume_id = keyed_id(self.tenant, self.key) if self.key else "s" + self.token.hex()
        if self.position is None:
            return resume_id
        given = self.position.rid.partition(".")[0]
        if self.key and given != resume_id:
            raise bad_field("Last-Event-ID", "of another request than the Idempotency-Key's")
        return given

    @property
    def engine(self) -> ServedEngine:
        """The engine of the request's model. Raises `HttpError` 400 where none is chosen."""
        return self.chosen.engine

    # --- its life ---

    def on_body(self, body: bytes) -> None:
        """Binds the call to its body: a stream may be resumed only with the same one. Raises
        `HttpError` 400, and 500 where this body has killed the gateway before."""
        digest = hashlib.sha256(b"\0".join((self.tenant.encode(), self._path.encode(), body)))
        self._digest = digest.hexdigest()[:16]
        if self.position is not None and self.position.rid.partition(".")[2] != self._digest:
            raise bad_field("Last-Event-ID", "of a request with another path, body or key")
        journal_id, journal = digest.digest()[:NAME], self.gateway.journal
        if journal.convicted(journal_id):
            raise http_error(journal.refusal(self.answer_id))
        self.journal_id = journal_id
        journal.put(journal_id)

    def failed(self, error: BaseException) -> HttpError:
        """Returns the error for a request on which the gateway itself has failed. Out of memory is
        not this request's fault: it may hit any request."""
        if isinstance(error, MemoryError):
            return http_error(EngineUnavailable("the gateway has no memory left for this request"))
        return http_error(self.gateway.journal.failed(error, self.answer_id))

    def finished(self) -> None:
        """Marks the request as answered."""
        self._ended = True
        journal = self.gateway.journal
        if self.journal_id and not journal.quiet:
            journal.finished(self.journal_id)

    def release(self) -> None:
        """Lets go of the engine, later where another connection may continue the request. (With a
        key it is a shared stream, which keeps the engine by itself.)"""
        waits = self.resumable and not self.key and not self._ended
        self.chosen.release(self.gateway.settings.resume_grace if waits else 0.0)

    def in_background(self) -> EngineCall:
        """Returns another call of the same caller, for work that continues after this one's answer.
        """
        call = EngineCall(self.gateway, {}, self.tenant, self._path)
        call.trace = self.trace
        call.chosen = self.chosen.hold()
        return call

    # --- the engine's requests ---

    def stream(self, *requests: Request) -> Deltas:
        """Returns the deltas of one or several requests with equal numbers of choices, numbered
        through, from the caller's last event on. Requests are sent when deltas are first awaited;
        `aclose` ends them, unless they may outlive their connection. Raises `HttpError` 400."""
        each = (requests[0].params or SamplingParams()).n
        shows_ids = self.resumable and self.event_end == BLANK_LINE
        if self.position is not None and not (shows_ids or self.continued):
            raise bad_field("Last-Event-ID", "the lines of this stream have no ids")
        sources = self._sources(requests)
        source = sources[0] if len(sources) == 1 else MergedStream(sources, each)
        choices = each * len(sources)
        if shows_ids and choices > MAX_CHOICES and not self.continued:
            if self.position is not None or not self.key:
                field = "stream_options.resumable" if self.position is None else "Last-Event-ID"
                raise HttpError(
                    400, f"{field}: only streams of at most {MAX_CHOICES} choices go on",
                    field.partition(".")[0])
            shows_ids = False  # it is shared, or resent from its start
        if not self._from_http or not (shows_ids or self._record is not None):
            return source
        self._resumed = ResumableStream(source, f"{self.resume_id}.{self._digest}", self.position,
                                        self.cut_counts, shows_ids, self.event_end)
        return self._resumed

    def admitted(self, stream: Deltas) -> None:
        """Takes over what the engine has recorded of a request of the call's, which has begun."""
        self.created = stream.created or self.created

    def label(self, events: bytes) -> bytes:
        """Adds ids to events where the stream can be resumed, and leaves out events that the caller
        has had."""
        return events if self._resumed is None else self._resumed.label(events)

    def record_position(self) -> None:
        """Records where the stream is behind the events that are sent next."""
        if self._record is not None and self._resumed is not None:
            self._record.position = self._resumed.encoded_position()

    async def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the choices of each request, in order. The first error ends all of them and is
        raised, an `ActoriumError`."""
        completions: list[list[Completion]] = [[] for _ in requests]
        results = self._results(requests)
        try:
            async for index, result in results:
                if isinstance(result, ActoriumError):
                    raise result
                completions[index] = result
        finally:
            await results.aclose()
        self.usage.completed(completions)
        return completions

    def _results(self, requests: Sequence[Request]) -> Results:
        if self.key and self._batch_seconds is None:  # nobody else asks for a batch's
            return collected(self._sources(requests), self.admitted)
        return self.engine.client.run([self._with_rid(request, number)
                                       for number, request in enumerate(requests)])

    def _sources(self, requests: Sequence[Request]) -> list[Deltas]:
        return [self._source(request, number) for number, request in enumerate(requests)]

    def _source(self, request: Request, number: int) -> Deltas:
        """Returns the deltas of one of the requests, from the first."""
        if not self.key:
            return self._open(self._with_rid(request, number))
        resume_id, rid = self._ids(number)
        resumable = self._resumable(request, rid)
        return self.gateway.shared_streams.join(
            resume_id, rid, lambda: self.chosen.kept_by(self._open(resumable)),
            self.gateway.settings.resume_grace)

    def _open(self, request: Request) -> AsyncDeltaStream:
        stream = AsyncDeltaStream(self.engine.client, request)
        if self._from_http:
            self.usage.opened(stream)
        return stream

    def _with_rid(self, request: Request, number: int) -> Request:
        """Returns one of the requests with its rid, by which it can be aborted, and adopted."""
        return self._resumable(request, self._ids(number)[1]) if self._from_http else request

    def _resumable(self, request: Request, rid: str) -> Request:
        """Returns a request that outlives this gateway, if somebody may continue it."""
        grace = self.gateway.settings.resume_grace if self.resumable else 0.0
        if self._record is not None or self._batch_seconds is not None:
            grace = max(grace, GATEWAY_GRACE)
        if self._batch_seconds is not None:
            seconds = self._batch_seconds if request.timeout is None else request.timeout
            request = msgspec.structs.replace(request, priority=BACKGROUND, timeout=seconds)
        if self.chosen.adapter is not None and request.adapter is None:
            request = msgspec.structs.replace(request, adapter=self.chosen.adapter)
        again = bool(self.key) or self.position is not None or self.taken_over
        resumable = Resumable(rid=rid, seconds=grace, adopt=again,
                              must_exist=self.position is not None, created=self.created)
        if self.trace is None:
            return msgspec.structs.replace(request, resumable=resumable)
        return msgspec.structs.replace(
            request, resumable=resumable, traceparent=self.trace.traceparent,
            tracestate=self.trace.trace.state)

    def _ids(self, number: int) -> tuple[str, str]:
        """Returns (resume id, rid) of one of the requests. Raises `Aborted`."""
        if self._aborted:
            raise Aborted("the request was aborted")
        resume_id = f"{self.resume_id}-{number}" if number else self.resume_id
        self.rids.append(f"{resume_id}.{self._digest}")
        return resume_id, self.rids[-1]

    # --- aborting ---

    async def abort_others(self, name: str, tenant: str | None) -> list[str]:
        """Aborts, at all gateways of the engine, the requests of a name ("" = all) and a tenant
        (None = any), except this call. Returns their labels or answer ids."""
        return (await self.gateway.abort(name, tenant, but=self)
                + await self.gateway.peers.abort(name, tenant))

    def mark_aborted(self, name: str) -> tuple[list[str], list[str]]:
        """Marks what `name` stands for as aborted, and returns its labels (or answer id) and rids.
        name: one of its ids, or of its completions' labels; "" = all of it, including requests not
        begun yet."""
        is_whole = name in (self.resume_id, self.answer_id) \
            or _PREFIX.sub("", name) == self.answer_id
        if not name or is_whole:
            self._aborted = True
            return self.labels or [self.answer_id], list(self.rids)
        each = max(1, len(self.labels) // max(1, len(self.rids)))
        found = [i for i, label in enumerate(self.labels)
                 if label == name or label.startswith(f"{name}_")]
        if len(found) == len(self.labels) and found:
            self._aborted = True
        rids = dict.fromkeys(self.rids[i // each] for i in found if i // each < len(self.rids))
        return [self.labels[i] for i in found], list(rids)


def keyed_id(tenant: str, key: bytes) -> str:
    """Returns the resume id of a request with an `Idempotency-Key`."""
    return "k" + hashlib.sha256(tenant.encode() + b"\0" + key).hexdigest()[:32]


def call_of(http: HttpRequest) -> EngineCall:
    """Returns the call of a request that has passed the guard."""
    call: EngineCall = http.scope["app"]
    return call


def engine_of(http: HttpRequest) -> ServedEngine:
    """Returns the engine behind the routes."""
    return call_of(http).engine
