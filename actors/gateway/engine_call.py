"""What the headers of one HTTP request say of how long its work lives, and what it goes on from.

`Idempotency-Key`: sent again with the same body, while the completion runs or is remembered, it
gives that completion; with another body it is refused. Its request survives a connection that
breaks for `gateway.resume_grace` seconds. `Last-Event-ID`, with the same path and body: the stream
goes on after that event, if the engine still has its request: at any gateway, also after the death
of the one that began it. Events have ids where one of the two headers or the body asks for them.
Without a key a request ends with its connection.

A request's name in the engine is the tenant's key, hashed, or random; then comes a hash of who has
asked what. That keeps tenants apart here, and the engine hands requests over within a tenant only.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping

import msgspec

from actorium.actors.client.requests import Linger, Request
from actorium.actors.errors import Aborted
from actorium.actors.gateway.http.access_log import Tally
from actorium.actors.gateway.http.http_errors import HttpError, http_error
from actorium.actors.gateway.resume.delta_streams import Deltas, Joins
from actorium.actors.gateway.resume.event_ids import MAX_CHOICES, Mark, Tracked, parse
from actorium.actors.runtime.inflight_journal import NAME, InflightJournal

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_KIND = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
"""What stands before the id in the names of answers."""


class Ask:
    """One HTTP request. Without headers it is one of the gateway's own."""

    def __init__(self, headers: Mapping[bytes, bytes] | None = None, tenant: str = "",
                 path: str = "", journal: InflightJournal | None = None) -> None:
        """Raises `HttpError` 400 on a header that cannot be meant."""
        self.journal = journal or InflightJournal(actor="gateway")
        self.journal_name = b""
        """Its name there, once the body has come: what the same caller asks again has the same."""
        self.from_http = headers is not None
        found = headers or {}
        self.tenant, self._path = tenant, path
        self.key = found.get(b"idempotency-key", b"").strip()
        if self.key and not _KEY.fullmatch(self.key):
            raise HttpError(400, "Idempotency-Key: 1 to 255 printable ASCII characters without "
                            "spaces", "Idempotency-Key")
        last = found.get(b"last-event-id", b"").strip()
        self.mark: Mark | None = parse(last.decode("latin-1")) if last else None
        self.resumable = bool(self.key) or self.mark is not None
        """Its stream names each event, so that another call can take it up behind that one. The
        body may ask for it as well (`stream_options.resumable`). Others have no ids: many clients
        split a stream at its blank lines and take all that follows `data: `."""
        self.name = self._named()
        """Of the request, and of its answer: a stream keeps its id when it goes on."""
        self.answer_id = self.name
        """What its answer is called, after the prefix that tells the kind of the answer."""
        self.fields: dict[str, str] = {}
        """What its body calls fields of the engine's, where it has other names, for errors."""
        self.labels: list[str] = []
        """What the caller calls its completions, if anything, the first request's first."""
        self.rids: list[str] = []
        """Of its requests in the engine."""
        self._aborted = False
        self._digest = ""
        self.tally = Tally()
        """What the engine does for it."""
        self._tracked: Tracked | None = None

    def _named(self) -> str:
        own = "s" + os.urandom(16).hex()
        if self.key:
            of = hashlib.sha256(self.tenant.encode() + b"\0" + self.key).hexdigest()
            own = "k" + of[:32]
        if self.mark is None:
            return own
        given = self.mark.rid.partition(".")[0]
        if self.key and given != own:
            raise HttpError(400, "Last-Event-ID: of another request than the Idempotency-Key's",
                            "Last-Event-ID")
        return given

    def body(self, body: bytes) -> None:
        """What is asked: a request may be taken up only by who asks the same. Raises `HttpError`
        400, and 500 where this has killed the gateway before."""
        asked = b"\0".join((self.tenant.encode(), self._path.encode(), body))
        digest = hashlib.sha256(asked)
        self._digest = digest.hexdigest()[:16]
        if self.mark is not None and self.mark.rid.partition(".")[2] != self._digest:
            raise HttpError(400, "Last-Event-ID: of a request with another path, body or key",
                            "Last-Event-ID")
        name = digest.digest()[:NAME]
        if self.journal.convicted(name):
            raise http_error(self.journal.refusal(self.answer_id))
        self.journal_name = name
        self.journal.put(name)

    def failed(self, error: BaseException) -> HttpError:
        """The gateway has failed on it: what the caller is to be told."""
        return http_error(self.journal.failed(error, self.answer_id))

    def finished(self) -> None:
        """It has been answered."""
        if self.journal_name and not self.journal.quiet:
            self.journal.finished(self.journal_name)

    def source(self, request: Request, number: int, open_: Callable[[Request], Deltas],
               joins: Joins, grace: float) -> Deltas:
        """The deltas of one of the requests that the route makes of this one, from the first."""
        if not self.from_http or not self.resumable:
            return open_(self.named(request, number))
        name, rid = self._names(number)
        again = bool(self.key) or self.mark is not None
        linger = Linger(rid=rid, seconds=grace, adopt=again, must_exist=self.mark is not None)
        asked = msgspec.structs.replace(request, linger=linger)
        return joins.join(name, rid, lambda: open_(asked), grace) if self.key else open_(asked)

    def named(self, request: Request, number: int) -> Request:
        """One of the requests by a name of this one's, so that it can be found. It does not outlive
        its caller."""
        if not self.from_http:
            return request
        linger = Linger(rid=self._names(number)[1], seconds=0.0, adopt=False)
        return msgspec.structs.replace(request, linger=linger)

    def _names(self, number: int) -> tuple[str, str]:
        """What a request goes by here, and in the engine. Raises `Aborted`."""
        if self._aborted:
            raise Aborted("the request was aborted")
        name = f"{self.name}-{number}" if number else self.name
        self.rids.append(f"{name}.{self._digest}")
        return name, self.rids[-1]

    def aborting(self, name: str) -> tuple[list[str], list[str]]:
        """What ends when `name` is to end: the caller's names, and those in the engine. Empty name:
        all of it, also what was not begun yet."""
        known = name in (self.name, self.answer_id) or _KIND.sub("", name) == self.answer_id
        if not name or known:
            self._aborted = True
            return self.labels or [self.answer_id], list(self.rids)
        each = max(1, len(self.labels) // max(1, len(self.rids)))
        found = [i for i, label in enumerate(self.labels)
                 if label == name or label.startswith(f"{name}_")]
        if len(found) == len(self.labels) and found:
            self._aborted = True
        rids = dict.fromkeys(self.rids[i // each] for i in found if i // each < len(self.rids))
        return [self.labels[i] for i in found], list(rids)

    def tracked(self, source: Deltas, choices: int) -> Deltas:
        """What the route streams, all its requests together; from the caller's event on. choices:
        of all of them. Raises `HttpError` 400."""
        if not self.from_http or not self.resumable:
            return source
        if choices > MAX_CHOICES:
            if self.mark is None and self.key:
                return source  # it is joined, or told once more from its start
            field = "stream_options.resumable" if self.mark is None else "Last-Event-ID"
            raise HttpError(400, f"{field}: only streams of at most {MAX_CHOICES} choices go on",
                            field.partition(".")[0])
        self._tracked = Tracked(source, f"{self.name}.{self._digest}", self.mark)
        return self._tracked

    def label(self, events: bytes) -> bytes:
        """Events with their ids, as far as a stream can be taken up; those that the caller has had
        are left out."""
        return events if self._tracked is None else self._tracked.label(events)
