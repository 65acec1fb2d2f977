"""The media actor's logic: requests' images and videos, decoded once each.

A job is named by the SHA-256 of an item's bytes and of what becomes of them, so that requests
with the same image share one, while it runs and afterwards, within a cache of bounded bytes. A
request fails by its own items alone: by the first error, at its deadline, or because too many wait.
Jobs that nobody waits for any more are stopped. Decoding is done elsewhere (`DecodeMedia` to the
role DECODER, answered by `DecodedItem`), in processes that a file may end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from actorium.actors.config.media_settings import MOST_ITEMS, MediaConfig, item_limit
from actorium.actors.core import Core, Health, Send
from actorium.actors.errors import ActoriumError, DeadlineExceeded, InvalidRequest, QueueFull
from actorium.actors.vision.media_input import MediaInput
from actorium.actors.vision.placeholders import IMAGE
from actorium.actors.vision.processor_config import MediaProcessing
from actorium.actors.vision.vision_messages import (
    CancelMedia,
    DecodedItem,
    DecodeMedia,
    LoadRequest,
    MediaFailed,
    MediaReady,
    MediaSource,
    StopDecoding,
)

DECODER, ASKER = "decoder", "tokenizer"
WAITING_REQUESTS = 256
"""Requests whose media are not ready; more are refused, since their files lie in memory."""


class _Waiting(Struct, eq=False):
    """A request that is not answered yet."""

    request: LoadRequest
    jobs: tuple[bytes, ...]
    """Of its items, in order; equal where items are."""
    found: dict[bytes, MediaInput]
    """Held here, whatever the cache lets go meanwhile."""


class _DecodingJob(Struct, eq=False):
    """An item that is decoded, or waits for it."""

    message: DecodeMedia
    waiters: set[str]
    running: bool = False
    stopped: bool = False
    """Its decoder has been told to stop; it answers all the same."""


class MediaCore(Core):
    """See the module. `decoders`: jobs that may run at once."""

    inbox = LoadRequest | CancelMedia | DecodedItem

    def __init__(self, limits: MediaConfig, decoders: int = 1) -> None:
        self._limits, self._decoders = limits, decoders
        self._requests: dict[str, _Waiting] = {}
        self._jobs: dict[bytes, _DecodingJob] = {}
        self._queue: deque[bytes] = deque()
        self._running = 0
        self._cache: OrderedDict[bytes, MediaInput] = OrderedDict()
        self._cached_bytes = 0
        self._out: list[Send] = []
        self._answered = self._hits = 0
        self._draining = False

    def on_message(self, message: LoadRequest | CancelMedia | DecodedItem, now: float) -> None:
        if isinstance(message, LoadRequest):
            self._load(message, now)
        elif isinstance(message, CancelMedia):
            self._forget(message.rid)
        else:
            self._decoded(message)

    def on_wake(self, now: float) -> Sequence[Send]:
        for rid in [rid for rid, waiting in self._requests.items()
                    if waiting.request.deadline <= now]:
            self._fail(rid, DeadlineExceeded("its images and videos were not ready in time"))
        while self._queue and self._running < self._decoders:
            job = self._jobs[self._queue.popleft()]
            job.running = True
            self._running += 1
            self._out.append(Send(DECODER, job.message))
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        return min((one.request.deadline for one in self._requests.values()), default=None)

    def drain(self, now: float) -> None:
        self._draining = True

    @property
    def done(self) -> bool:
        return not self._requests

    def health(self) -> Health:
        return Health("serve", self._answered, self._limits.media_cpu_seconds, {
            "media_waiting": len(self._requests), "media_running": self._running,
            "media_cached_bytes": self._cached_bytes, "media_cache_hits": self._hits})

    def _load(self, request: LoadRequest, now: float) -> None:
        if request.rid in self._requests:  # it was sent twice: answered once
            return
        if fault := self._fault(request):
            self._refuse(request.rid, fault)
            return
        jobs = tuple(job_of(source, request.processing) for source in request.sources)
        found = {job: self._cache[job] for job in jobs if job in self._cache}
        self._hits += len(found)
        waiting = self._requests[request.rid] = _Waiting(request, jobs, found)
        for job, source in zip(jobs, request.sources, strict=True):
            if job in found:
                self._cache.move_to_end(job)
            else:
                self._want(job, source, request)
        self._finish(waiting)

    def _fault(self, request: LoadRequest) -> ActoriumError | None:
        if self._draining or len(self._requests) >= WAITING_REQUESTS:
            return QueueFull("too many requests wait for their images and videos")
        for kind in MOST_ITEMS:
            found = [source for source in request.sources if source.kind == kind]
            most = item_limit(self._limits, kind)
            if len(found) > most:
                return InvalidRequest(f"{found[most].param}: {len(found)} {kind}s; {most} are "
                                      "allowed (--limit-mm-per-prompt)", found[most].param)
        return None

    def _want(self, name: bytes, source: MediaSource, request: LoadRequest) -> None:
        job = self._jobs.get(name)
        if job is None:
            message = DecodeMedia(name, msgspec.structs.replace(source, param=""),
                                  request.processing)
            job = self._jobs[name] = _DecodingJob(message, set())
            self._queue.append(name)
        job.waiters.add(request.rid)

    def _decoded(self, answer: DecodedItem) -> None:
        job = self._jobs.get(answer.job)
        if job is None or not job.running:
            return
        self._running -= 1
        if answer.item is None and job.stopped and job.waiters:  # wanted again since
            job.running = job.stopped = False
            self._queue.append(answer.job)
            return
        del self._jobs[answer.job]
        if answer.item is not None:
            self._keep(answer.job, answer.item)
        for rid in sorted(job.waiters):
            waiting = self._requests[rid]
            if answer.item is not None:
                waiting.found[answer.job] = answer.item
                self._finish(waiting)
            else:
                param = waiting.request.sources[waiting.jobs.index(answer.job)].param
                self._fail(rid, InvalidRequest(f"{param}{answer.error}", param))

    def _finish(self, waiting: _Waiting) -> None:
        """Answers a request all of whose items are there."""
        if waiting.found.keys() >= set(waiting.jobs):
            rid = waiting.request.rid
            self._forget(rid)
            self._answered += 1
            items = tuple(waiting.found[job] for job in waiting.jobs)
            self._out.append(Send(ASKER, MediaReady(rid, items)))

    def _fail(self, rid: str, fault: ActoriumError) -> None:
        self._forget(rid)
        self._refuse(rid, fault)

    def _refuse(self, rid: str, fault: ActoriumError) -> None:
        self._answered += 1
        self._out.append(Send(ASKER, MediaFailed(rid, fault.code, fault.message, fault.param)))

    def _forget(self, rid: str) -> None:
        """Ends a request; jobs that it alone waited for are stopped."""
        waiting = self._requests.pop(rid, None)
        for name in set(waiting.jobs) if waiting is not None else ():
            job = self._jobs.get(name)
            if job is None:
                continue
            job.waiters.discard(rid)
            if job.waiters or job.stopped:
                continue
            if job.running:
                job.stopped = True
                self._out.append(Send(DECODER, StopDecoding(name)))
            else:
                del self._jobs[name]
                self._queue.remove(name)

    def _keep(self, name: bytes, item: MediaInput) -> None:
        """Caches an item; the least recently used go."""
        self._cache[name] = item
        self._cached_bytes += item.rows.nbytes
        while self._cached_bytes > self._limits.media_cache_bytes:
            _, old = self._cache.popitem(last=False)
            self._cached_bytes -= old.rows.nbytes


def job_of(source: MediaSource, processing: MediaProcessing) -> bytes:
    """The name of an item's job: SHA-256 of its bytes and of what becomes of them."""
    own = processing.image if source.kind == IMAGE else processing.video
    digest = hashlib.sha256(msgspec.msgpack.encode((source.kind, own,
                                                    [len(data) for data in source.files])))
    for data in source.files:
        digest.update(data)
    return digest.digest()
