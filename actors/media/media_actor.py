"""The media actor: its core, with tasks that fetch, threads that decode, and the patch folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.core import Context, CoreObserver, Send
from actorium.actors.errors import InvalidRequest
from actorium.actors.media.core import DECODER, FETCHER, STORE, MediaCore
from actorium.actors.media.fetching import MediaFetcher
from actorium.actors.media.image_processor import read_processing
from actorium.actors.media.media_jobs import (
    DecodeMedia,
    FetchedMedia,
    FetchMedia,
    RemoveItem,
    StopDecoding,
    StoredItem,
    run_job,
)
from actorium.actors.media.media_process import MediaDecoder
from actorium.actors.media.patch_store import (
    is_stored,
    publish,
    remove_patches,
    stored_items,
)
from actorium.actors.models import model_dir
from actorium.actors.runtime.offload import start_thread
from actorium.actors.runtime.rundir import NEW, SECRET, make_media_folder

MOST_DECODERS = 4
CORES_EACH = 4
"""Processor cores a decoder: they are the worker's, too."""
SECRET_BYTES = 32
Answer = Callable[[Any], None]


class MediaActor(CoreObserver):
    """Does what the core asks of FETCHER, DECODER and STORE."""

    _core: MediaCore

    def __init__(self, core: MediaCore, limits: MediaConfig, folder: Path, secret: bytes,
                 decoders: int = 1) -> None:
        super().__init__(core)
        self._limits, self._folder, self._secret = limits, folder, secret
        self._fetcher = MediaFetcher(limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = [_Decoder(self._run) for _ in range(decoders)]
        self._busy: dict[bytes, _Decoder] = {}
        self._post: Callable[..., None] | None = None

    def on_start(self, post: Callable[..., None]) -> None:
        self._post = post

    def on_wake(self, now: float) -> Sequence[Send]:
        return [send for send in self._core.on_wake(now) if not self._send_inside(send)]

    def _send_inside(self, send: Send) -> bool:
        """Whether the message was for this process; it has then been seen to."""
        if send.to == FETCHER:
            task = asyncio.get_running_loop().create_task(self._fetch(send.message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif send.to == DECODER:
            self._decode(send.message)
        elif send.to == STORE:
            self._remove(send.message)
        else:
            return False
        return True

    def _tell(self, answer: FetchedMedia | StoredItem) -> None:
        """On the shell's thread."""
        self._core.on_message(answer, monotonic())

    # --- fetching -----------------------------------------------------------------------------

    async def _fetch(self, message: FetchMedia) -> None:
        assert self._post is not None
        several = len(message.urls) > 1
        files: list[bytes] = []
        try:
            for at, url in enumerate(message.urls):
                param = f"{message.param}[{at}]" if several else message.param
                files.append(await self._fetcher.fetch(url, param))
                if sum(map(len, files)) > 2 * self._limits.max_media_bytes:
                    raise InvalidRequest(f"{message.param}: its frames have more than "
                                         f"{2 * self._limits.max_media_bytes} bytes "
                                         "(--max-media-bytes)", message.param)
        except InvalidRequest as error:
            answer = FetchedMedia(message.number, error=error.message)
        else:
            answer = FetchedMedia(message.number, tuple(files))
        self._post(lambda: self._tell(answer))

    # --- decoding -----------------------------------------------------------------------------

    def _decode(self, message: DecodeMedia | StopDecoding) -> None:
        if isinstance(message, StopDecoding):
            if (busy := self._busy.get(message.job)) is not None:
                busy.stop()
            return
        assert self._post is not None
        decoder = self._busy[message.job] = self._idle.pop()
        decoder.begin(message, self._limits, self._post)

    def _run(self, decoder: _Decoder, process: MediaDecoder, message: DecodeMedia) -> None:
        """On a decoder's thread."""
        assert self._post is not None
        answer = run_job(process, message, self._folder, self._secret,
                         self._limits.media_cache_bytes)
        self._post(lambda: self._decoded(decoder, answer))

    def _decoded(self, decoder: _Decoder, answer: StoredItem) -> None:
        del self._busy[answer.job]
        self._idle.append(decoder)
        if answer.facts is not None:
            publish(self._folder, answer.job, answer.key)
        self._tell(answer)

    def _remove(self, message: RemoveItem) -> None:
        if not self._core.holds(message.key):  # else it has come again since
            remove_patches(self._folder, message.key)


class _Decoder:
    """A thread with a process that decodes, both started with the first job."""

    def __init__(self, run: Callable[[_Decoder, MediaDecoder, DecodeMedia], None]) -> None:
        self._run = run
        self._jobs: SimpleQueue[DecodeMedia] = SimpleQueue()
        self._process: MediaDecoder | None = None

    def begin(self, message: DecodeMedia, limits: MediaConfig, post: Callable[..., None]) -> None:
        if self._process is None:
            self._process = MediaDecoder(limits)
            start_thread("decoder", partial(self._serve, self._process), post)
        self._jobs.put(message)

    def _serve(self, process: MediaDecoder) -> None:
        while True:
            self._run(self, process, self._jobs.get())

    def stop(self) -> None:
        """Ends what it does. (A process that was killed outright would be asked again.)"""
        process = self._process.child.process if self._process is not None else None
        if process is not None:
            process.terminate()


def read_secret(folder: Path) -> bytes:
    """What the keys of this engine's items are made with: drawn by the first actor that runs, so
    that keys outlive it."""
    path = folder / SECRET
    with contextlib.suppress(FileNotFoundError):
        secret = path.read_bytes()
        if len(secret) == SECRET_BYTES:
            return secret
    secret, new = secrets.token_bytes(SECRET_BYTES), folder / (SECRET + NEW)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)
    new.replace(path)
    return secret


def build(ctx: Context) -> MediaActor:
    """The core of the role "media". Raises `BadModel` and `OSError`."""
    limits = ctx.config.media
    processing = read_processing(model_dir.resolve(ctx.config.model.model))
    folder = make_media_folder(ctx.run_dir, limits.media_cache_bytes)
    decoders = max(1, min(MOST_DECODERS, len(os.sched_getaffinity(0)) // CORES_EACH))
    core = MediaCore(limits, processing, decoders, ctx.epoch, stored_items(folder), monotonic(),
                     partial(is_stored, folder))
    return MediaActor(core, limits, folder, read_secret(folder), decoders)
