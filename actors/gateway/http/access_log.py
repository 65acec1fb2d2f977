"""Writes one line per HTTP request, and counts them for `/metrics`.

A line has caller, route, outcome and cost, never content: of the URL only the path, of the body and
the answer only token counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol

from starlette.types import Scope

from actorium.actors.client.pending import RequestProgress
from actorium.actors.client.requests import Completion
from actorium.actors.gateway.answer_events import usage_of_choices, usage_of_prompts
from actorium.actors.gateway.http.routes import Route
from actorium.actors.messages import Usage
from actorium.actors.runtime.beat_gauges import HTTP_REQUESTS, MARK, Histogram

LOG = logging.getLogger("actorium.access")
GONE = 499
"""Status of a request whose caller disconnected before an answer began, as in nginx."""
UNKNOWN = "none"
"""Handler name of an unknown path."""
WATCHING = frozenset({"probe", "health"})
"""Routes that machines poll: logged only where they fail, or for debugging."""
MAX_PATH = 200


class ProgressStream(Protocol):
    """The part of `AsyncDeltaStream` that is used here."""

    @property
    def progress(self) -> RequestProgress | None: ...


class CallUsage:
    """The engine's usage for one HTTP request."""

    __slots__ = ("_streams", "_usages")

    def __init__(self) -> None:
        self._streams: list[ProgressStream] = []
        self._usages: list[list[Usage]] = []

    def opened(self, stream: ProgressStream) -> None:
        """Adds a stream of deltas, whose progress is read at the end."""
        self._streams.append(stream)

    def completed(self, answers: Sequence[Sequence[Completion]]) -> None:
        """Adds whole answers: each prompt's choices."""
        self._streams = []
        self._usages = [[one.usage for one in choices] for choices in answers]

    def read(self) -> tuple[Usage | None, float]:
        """Returns tokens of all prompts and choices together, None if nothing was generated; and
        the time of the first token (CLOCK_MONOTONIC seconds, 0 = not known)."""
        found = [one for one in (stream.progress for stream in self._streams) if one is not None]
        first = min((one.first_at for one in found if one.first_at), default=0.0)
        all_usages = (*self._usages, *(one.usages for one in found))
        each = [usage_of_choices(usages) for usages in all_usages if usages]
        return (usage_of_prompts(each), first) if each else (None, 0.0)


class AccessRecord(NamedTuple):
    """One finished request."""

    scope: Scope
    route: Route
    status: int
    stayed: bool
    """The caller stayed connected to the end."""
    request_id: str
    tenant: str
    usage: CallUsage
    rids: Sequence[str]
    """The request's names in the engine."""
    began: float
    """CLOCK_MONOTONIC seconds."""


class AccessLog:
    """One gateway's log."""

    def __init__(self, on: bool) -> None:
        """on: write lines; requests are counted in any case."""
        self._on = on
        self._counts: Counter[str] = Counter()
        self._seconds = Histogram(HTTP_REQUESTS)

    def answered(self, one: AccessRecord) -> None:
        """Logs and counts a finished request."""
        took = monotonic() - one.began
        self._seconds.add(took)
        path = one.scope["path"]
        handler = path if path in one.route.paths else (*one.route.paths, UNKNOWN)[0]
        method = one.scope["method"] if one.route.paths else UNKNOWN
        self._counts[MARK.join(("http", method, handler, f"{one.status // 100}xx"))] += 1
        quiet = one.route.name in WATCHING and one.status < 400
        level = logging.DEBUG if quiet else logging.INFO
        if self._on and LOG.isEnabledFor(level):
            text, fields = _line(one, took)
            LOG.log(level, "%s", text, extra={"fields": fields})

    def gauges(self) -> dict[str, float]:
        """Returns the counts for the heartbeat."""
        return {name: float(n) for name, n in self._counts.items()} | self._seconds.gauges()


def _line(one: AccessRecord, took: float) -> tuple[str, dict[str, Any]]:
    method, path = one.scope["method"][:20], _printable(one.scope["path"])
    host, port = one.scope.get("client") or ("-", 0)
    fields: dict[str, Any] = {"client": f"{host}:{port}", "method": method, "path": path,
                              "status": one.status, "request_id": one.request_id,
                              "duration_s": round(took, 6)}
    parts = [f'{host}:{port} - "{method} {path} HTTP/{one.scope.get("http_version", "1.1")}" '
             f"{one.status}"]
    if one.tenant:
        fields["tenant"] = one.tenant
    used, first = one.usage.read()
    if one.rids:
        fields["rids"] = list(one.rids)
    if used is not None:
        fields |= {"prompt_tokens": used.prompt_tokens, "cached_tokens": used.cached_tokens,
                   "output_tokens": used.completion_tokens}
        parts += [f"prompt: {used.prompt_tokens} tokens ({used.cached_tokens} cached)",
                  f"output: {used.completion_tokens} tokens"]
    if first > one.began:
        fields["ttft_s"] = round(first - one.began, 6)
        parts.append(f"TTFT: {1e3 * fields['ttft_s']:.1f} ms")
    if not one.stayed:
        fields["disconnected"] = True
        parts.append("the client disconnected")
    parts += [f"took: {1e3 * took:.1f} ms", f"id: {one.request_id}"]
    return ", ".join(parts), fields


def _printable(path: str) -> str:
    """Returns a path that cannot start a line of its own, or move a terminal's cursor."""
    path = path[:MAX_PATH]
    return path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
