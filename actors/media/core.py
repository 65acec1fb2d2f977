"""The media actor's logic: clients' images and videos, prepared once each, and how long they stay.

An item is fetched where it is a URL, decoded, and stored as a file of patches under a key
(`patch_store`). A job is named by the SHA-256 of an item's bytes and of what becomes of them, so
that equal items share one, while it runs and afterwards. What is stored is bounded in bytes; the
least recently used goes first, but nothing that an unfinished request names, as the scheduler says,
and nothing whose key has just been given away. An item fails by itself alone: by its own fault, at
its deadline, or because there is no room. Jobs that nobody waits for any more are stopped.

Fetching, decoding and removing are done elsewhere (FETCHER, DECODER, STORE), in tasks and processes
that a file may end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.core import CLIENT, Core, Health, Send
from actorium.actors.errors import (
    ActoriumError,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
)
from actorium.actors.media.image_processor import KWARGS, MediaProcessing, with_kwargs
from actorium.actors.media.media_jobs import (
    DecodeMedia,
    FetchedMedia,
    FetchMedia,
    MediaSource,
    RemoveItem,
    StopDecoding,
    StoredItem,
)
from actorium.actors.media.media_messages import (
    MAX_MEDIA_MESSAGE,
    CancelMedia,
    HoldMedia,
    LoadMedia,
    MediaLoaded,
    ToMedia,
    ToMediaFront,
)
from actorium.actors.media.patch_store import MediaFacts
from actorium.actors.media.prompt_media import IMAGE, VIDEO
from actorium.actors.messages import Hello, Rejected

FETCHER, DECODER, STORE, SCHEDULER = "fetcher", "decoder", "store", "scheduler"
WAITING_ITEMS = 1024
WAITING_BYTES = 512 << 20
"""Items that are not ready, and bytes of their files: more are refused, since these lie in memory.
"""
GRACE = 60.0
"""Seconds for which an item is kept whose key was given away and which no request has named since.
"""
WORKING_BUDGET = 60.0
"""Seconds one burst may take: hashing what a burst can bring takes less than one."""

Asker = tuple[bytes, str]
"""(client, rid)"""


class _Waiting(Struct, eq=False):
    """An item that is not answered yet."""

    message: LoadMedia
    processing: MediaProcessing
    number: int
    deadline: float
    size: int
    """Bytes of its files."""
    job: bytes = b""
    """Empty while it is fetched."""


class _DecodingJob(Struct, eq=False):
    """An item that is decoded, or waits for it."""

    message: DecodeMedia
    waiters: set[Asker]
    running: bool = False
    stopped: bool = False
    """Its decoder has been asked to stop; it answers all the same."""


class _Item(Struct, eq=False):
    """What lies in the patch folder."""

    facts: MediaFacts
    jobs: set[bytes]
    """Whose result it is."""
    promised: int = 0
    """How often its key was given away and not named by a request since."""
    fresh_until: float = 0.0
    in_use: bool = False
    """Unfinished requests name it."""
    from_earlier_life: bool = False
    """It lay there at the start: whether its key was given away lately is not known."""


class MediaCore(Core):
    """See the module. `decoders`: jobs that may run at once."""

    inbox: Any = ToMedia
    client_inbox: Any = ToMediaFront
    client_inbox_bytes = MAX_MEDIA_MESSAGE

    def __init__(self, limits: MediaConfig, processing: MediaProcessing, decoders: int = 1,
                 epoch: int = 0, stored: Iterable[tuple[bytes, MediaFacts]] = (),
                 now: float = 0.0, is_stored: Callable[[bytes], bool] = lambda key: True) -> None:
        """stored: what an earlier life of the actor has left in the patch folder. It may be in use
        until the scheduler says what is. is_stored: whether an item's patches are there still:
        somebody else may have emptied the folder."""
        self._limits, self._processing, self._decoders = limits, processing, decoders
        self._is_stored = is_stored
        self._waiting: dict[Asker, _Waiting] = {}
        self._fetching: dict[int, Asker] = {}
        self._waiting_bytes = self._number = 0
        self._jobs: dict[bytes, _DecodingJob] = {}
        self._queue: deque[bytes] = deque()
        self._running = 0
        self._items: OrderedDict[bytes, _Item] = OrderedDict(
            (key, _Item(facts, set(), 1, now + GRACE, True, True)) for key, facts in stored)
        self._bytes = sum(item.facts.bytes for item in self._items.values())
        self._key_of: dict[bytes, bytes] = {}
        """Job -> its item."""
        self._scheduler_epoch = 0
        self._hello = Send(SCHEDULER, Hello("media", epoch))
        self._out = [self._hello]
        self._answered = self._hits = self._refused = self._evicted = 0
        self._draining = False

    # --- Core ---------------------------------------------------------------------------------

    def on_message(self, message: HoldMedia | FetchedMedia | StoredItem, now: float) -> None:
        if isinstance(message, HoldMedia):
            self._hold(message)
        elif isinstance(message, FetchedMedia):
            self._fetched(message, now)
        else:
            self._stored(message, now)

    def on_client(self, client: bytes, message: LoadMedia | CancelMedia, now: float) -> None:
        if isinstance(message, LoadMedia):
            self._load((client, message.rid), message, now)
        else:
            self._forget((client, message.rid))

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        self._out.append(Send(CLIENT, Rejected("-", InvalidRequest.code, error_text), client))

    def on_client_lost(self, client: bytes, now: float) -> None:
        for asker in [asker for asker in self._waiting if asker[0] == client]:
            self._forget(asker)

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """A scheduler that does not read is said `Hello` when it does."""
        return True

    def on_peer_back(self, role: str, now: float) -> None:
        self._out.append(self._hello)

    def on_wake(self, now: float) -> Sequence[Send]:
        for asker in [asker for asker, item in self._waiting.items() if item.deadline <= now]:
            param = self._waiting[asker].message.param
            self._fail(asker, DeadlineExceeded(f"{param}: was not ready in time", param))
        while self._queue and self._running < self._decoders:
            job = self._jobs[self._queue.popleft()]
            job.running = True
            self._running += 1
            self._out.append(Send(DECODER, job.message))
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        return min((item.deadline for item in self._waiting.values()), default=None)

    def drain(self, now: float) -> None:
        self._draining = True

    @property
    def done(self) -> bool:
        return not self._waiting

    def health(self) -> Health:
        return Health("draining" if self._draining else "ready", self._answered, WORKING_BUDGET, {
            "media_waiting": len(self._waiting), "media_items": len(self._items),
            "media_bytes": self._bytes, "media_loaded": self._answered - self._refused,
            "media_refused": self._refused, "media_hits": self._hits,
            "media_evicted": self._evicted})

    def holds(self, key: bytes) -> bool:
        """Whether an item is held now."""
        return key in self._items

    # --- an item comes ------------------------------------------------------------------------

    def _load(self, asker: Asker, message: LoadMedia, now: float) -> None:
        if asker in self._waiting:  # it was sent twice: answered once
            return
        size = sum(map(len, message.files)) + sum(map(len, message.urls))
        try:
            processing = self._checked(message, size)
        except ActoriumError as error:
            self._refuse(asker, error)
            return
        timeout = message.timeout or self._limits.media_timeout + 2 * self._limits.media_cpu_seconds
        self._number += 1
        waiting = _Waiting(message, processing, self._number, now + timeout, size)
        self._waiting[asker] = waiting
        self._waiting_bytes += size
        if message.urls:
            self._fetching[waiting.number] = asker
            self._out.append(Send(FETCHER, FetchMedia(waiting.number, tuple(message.urls),
                                                      message.param)))
        else:
            self._want(asker, waiting, tuple(message.files), now)

    def _checked(self, message: LoadMedia, size: int) -> MediaProcessing:
        """What becomes of the item. Raises `ActoriumError`."""
        param = message.param
        if self._draining:
            raise EngineUnavailable("the engine is stopping")
        if (len(self._waiting) >= WAITING_ITEMS
                or (self._waiting and self._waiting_bytes + size > WAITING_BYTES)):
            raise QueueFull(f"{param}: too many images and videos are being prepared", param)
        if bool(message.urls) == bool(message.files):
            raise InvalidRequest(f"{param}: must be a URL or the bytes of a file", param)
        if len(message.urls) + len(message.files) > 1 and not message.video:
            raise InvalidRequest(f"{param}: an image is one file", param)
        try:
            kwargs = msgspec.msgpack.decode(message.options, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{KWARGS}: {error}", KWARGS) from None
        return with_kwargs(self._processing, kwargs) if kwargs else self._processing

    def _fetched(self, answer: FetchedMedia, now: float) -> None:
        asker = self._fetching.pop(answer.number, None)
        if asker is None:
            return
        waiting = self._waiting[asker]
        if answer.error:
            self._fail(asker, InvalidRequest(answer.error, waiting.message.param))
            return
        size = sum(map(len, answer.files))
        self._waiting_bytes += size - waiting.size
        waiting.size = size
        self._want(asker, waiting, answer.files, now)

    def _want(self, asker: Asker, waiting: _Waiting, files: tuple[bytes, ...], now: float) -> None:
        source = MediaSource(VIDEO if waiting.message.video else IMAGE, files)
        name = waiting.job = job_of(source, waiting.processing)
        key = self._key_of.get(name)
        if key is not None and self._is_stored(key):
            self._hits += 1
            self._answer(asker, key, now)
            return
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = _DecodingJob(DecodeMedia(name, source, waiting.processing),
                                                  set())
            self._queue.append(name)
        job.waiters.add(asker)

    # --- it is ready --------------------------------------------------------------------------

    def _stored(self, answer: StoredItem, now: float) -> None:
        job = self._jobs.get(answer.job)
        if job is None or not job.running:
            return
        self._running -= 1
        if answer.facts is None and job.stopped and job.waiters:  # wanted again since
            job.running = job.stopped = False
            self._queue.append(answer.job)
            return
        del self._jobs[answer.job]
        room = answer.facts is not None and self._keep(answer.job, answer.key, answer.facts, now)
        for asker in sorted(job.waiters):
            param = self._waiting[asker].message.param
            if room:
                self._answer(asker, answer.key, now)
            elif answer.facts is not None or answer.full:
                self._fail(asker, QueueFull(f"{param}: no room for its patches beside those of "
                                            "running requests (--media-cache-bytes)", param))
            else:
                self._fail(asker, InvalidRequest(f"{param}{answer.error}", param))

    def _keep(self, job: bytes, key: bytes, facts: MediaFacts, now: float) -> bool:
        """Whether a new item can be held; others go for it."""
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(facts, set(), fresh_until=now + GRACE, promised=1)
            self._bytes += facts.bytes
            while self._bytes > self._limits.media_cache_bytes:
                victim = self._dispensable(now) or key
                self._remove(victim)
                if victim == key:
                    return False
                self._evicted += 1
            item.promised = 0
        item.jobs.add(job)
        self._key_of[job] = key
        return True

    def _dispensable(self, now: float) -> bytes | None:
        """The item that goes next: none that a request has, or that one may be about to name. Of
        what lay there at the start all may be, but a full cache must not turn everybody away for
        `GRACE`: a request whose item was evicted is loaded again."""
        def first(wanted: Callable[[_Item], bool]) -> bytes | None:
            return next((name for name, item in self._items.items()
                         if not item.in_use and wanted(item)), None)

        return first(lambda item: not item.promised or now >= item.fresh_until) \
            or first(lambda item: item.from_earlier_life)

    def _remove(self, key: bytes) -> None:
        item = self._items.pop(key)
        self._bytes -= item.facts.bytes
        for job in item.jobs:
            self._key_of.pop(job, None)
        self._out.append(Send(STORE, RemoveItem(key)))

    def _answer(self, asker: Asker, key: bytes, now: float) -> None:
        item = self._items[key]
        item.promised += 1
        item.from_earlier_life = False
        item.fresh_until = now + GRACE
        self._items.move_to_end(key)
        self._forget(asker)
        self._answered += 1
        client, rid = asker
        self._out.append(Send(CLIENT, MediaLoaded(rid, key, item.facts.tokens), client))

    # --- it fails, or is not wanted any more ---------------------------------------------------

    def _fail(self, asker: Asker, fault: ActoriumError) -> None:
        self._forget(asker)
        self._refuse(asker, fault)

    def _refuse(self, asker: Asker, fault: ActoriumError) -> None:
        self._answered += 1
        self._refused += 1
        client, rid = asker
        self._out.append(Send(CLIENT, Rejected(rid, fault.code, fault.message[:4096], fault.param),
                              client))

    def _forget(self, asker: Asker) -> None:
        """Ends an item's wait; a job that it alone waited for is stopped."""
        waiting = self._waiting.pop(asker, None)
        if waiting is None:
            return
        self._waiting_bytes -= waiting.size
        self._fetching.pop(waiting.number, None)
        job = self._jobs.get(waiting.job)
        if job is None:
            return
        job.waiters.discard(asker)
        if job.waiters or job.stopped:
            return
        if job.running:
            job.stopped = True
            self._out.append(Send(DECODER, StopDecoding(waiting.job)))
        else:
            del self._jobs[waiting.job]
            self._queue.remove(waiting.job)

    # --- what is in use -----------------------------------------------------------------------

    def _hold(self, message: HoldMedia) -> None:
        if message.epoch < self._scheduler_epoch:
            return
        self._scheduler_epoch = message.epoch
        if message.reset:
            for item in self._items.values():
                item.in_use = False
        for key in message.held:
            if (held := self._items.get(key)) is not None:
                held.in_use, held.promised = True, max(0, held.promised - 1)
                self._items.move_to_end(key)
        for key in message.free:
            if (freed := self._items.get(key)) is not None:
                freed.in_use = False


def job_of(source: MediaSource, processing: MediaProcessing) -> bytes:
    """The name of an item's job: SHA-256 of its bytes and of what becomes of them."""
    settings = processing.image if source.kind == IMAGE else processing.video
    digest = hashlib.sha256(msgspec.msgpack.encode((source.kind, settings,
                                                    [len(data) for data in source.files])))
    for data in source.files:
        digest.update(data)
    return digest.digest()
