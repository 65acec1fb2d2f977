"""The media actor's logic, without a process; and with one, for files that end it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from helpers_hostile_media import noise, png, saved
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.core import Send
from actorium.actors.vision.core import ASKER, DECODER, WAITING_REQUESTS, MediaCore, job_of
from actorium.actors.vision.decode_job import run_job
from actorium.actors.vision.media_input import MediaInput
from actorium.actors.vision.media_process import MediaDecoder
from actorium.actors.vision.placeholders import IMAGE, VIDEO, MediaGrid
from actorium.actors.vision.processor_config import (
    ImageProcessing,
    MediaProcessing,
    VideoProcessing,
)
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

PLAIN = MediaProcessing(ImageProcessing(), VideoProcessing())
OTHER = MediaProcessing(ImageProcessing(max_pixels=9999), VideoProcessing())


def request(rid: str, *files: bytes, kind: str = IMAGE, processing: MediaProcessing = PLAIN,
            deadline: float = 100.0) -> LoadRequest:
    return LoadRequest(rid, tuple(MediaSource(kind, (data,), f"{rid}.part[{at}]")
                                  for at, data in enumerate(files)), processing, deadline)


def item(size: int = 1) -> MediaInput:
    rows = np.zeros((size, 256), np.float32)
    return MediaInput(rows, MediaGrid(IMAGE, (1, 2, 2)), 0.0, b"key")


def core(decoders: int = 2, **limits: Any) -> MediaCore:
    return MediaCore(MediaConfig(**limits), decoders)


def tell(own: MediaCore, *messages: Any, now: float = 0.0) -> list[Any]:
    """What the core says to some messages; jobs to the decoder as their files."""
    for message in messages:
        own.on_message(message, now)
    return [send.message.source.files[0] if isinstance(send.message, DecodeMedia) else send.message
            for send in own.on_wake(now)]


def job(data: bytes, processing: MediaProcessing = PLAIN) -> bytes:
    return job_of(MediaSource(IMAGE, (data,), ""), processing)


def test_items_come_back_in_the_requests_order() -> None:
    own, one, two = core(), item(), item(2)
    assert tell(own, request("r", b"a", b"b", b"a")) == [b"a", b"b"], "an item twice is one job"
    assert tell(own, DecodedItem(job(b"b"), two)) == []
    assert tell(own, DecodedItem(job(b"a"), one)) == [MediaReady("r", (one, two, one))]
    assert own.done and own.next_timer() is None


def test_requests_share_jobs_and_the_cache() -> None:
    own, one = core(), item()
    assert tell(own, request("r", b"a"), request("s", b"a")) == [b"a"]
    assert {said.rid for said in tell(own, DecodedItem(job(b"a"), one))} == {"r", "s"}
    assert tell(own, request("t", b"a")) == [MediaReady("t", (one,))]
    assert tell(own, request("u", b"a", processing=OTHER)) == [b"a"], "other parameters"
    assert job(b"a") != job(b"a", OTHER) and own.health().gauges["media_cache_hits"] == 1


def test_frames_that_are_cut_elsewhere_are_another_job() -> None:
    cut = [job_of(MediaSource(VIDEO, files, ""), PLAIN) for files in ((b"ab", b"c"), (b"a", b"bc"))]
    assert cut[0] != cut[1]


def test_an_error_names_each_requests_own_part_and_harms_no_other() -> None:
    own, one = core(), item()
    tell(own, request("r", b"x", b"bad"), request("s", b"bad"), request("t", b"x"))
    said = tell(own, DecodedItem(job(b"bad"), error=": is PDF"), DecodedItem(job(b"x"), one))
    assert said == [MediaFailed("r", "invalid_request", "r.part[1]: is PDF", "r.part[1]"),
                    MediaFailed("s", "invalid_request", "s.part[0]: is PDF", "s.part[0]"),
                    MediaReady("t", (one,))]
    assert tell(own, request("u", b"bad")) == [b"bad"], "errors are not kept"


def test_so_many_jobs_run_at_once() -> None:
    own = core(decoders=2)
    assert tell(own, request("r", b"a", b"b", b"c")) == [b"a", b"b"]
    assert tell(own, DecodedItem(job(b"a"), item())) == [b"c"]


def test_deadlines() -> None:
    own = core(decoders=1)
    tell(own, request("r", b"a", deadline=5.0), request("s", b"b", deadline=9.0))
    assert own.next_timer() == 5.0 and tell(own, now=4.9) == []
    stopped, failed = tell(own, now=5.0)
    assert (failed.rid, failed.code) == ("r", "deadline") and stopped == StopDecoding(job(b"a"))
    assert tell(own, DecodedItem(job(b"a"), error="stopped"), now=6.0) == [b"b"]


def test_who_cancels_stops_what_nobody_else_waits_for() -> None:
    own = core(decoders=1)
    tell(own, request("r", b"a", b"b"), request("s", b"a"))
    assert tell(own, CancelMedia("r")) == [], "the one job goes on for s, the other never began"
    assert tell(own, CancelMedia("s"), CancelMedia("nobody")) == [StopDecoding(job(b"a"))]
    assert own.done
    assert tell(own, request("t", b"a")) == [], "its decoder has been told to stop"
    assert tell(own, DecodedItem(job(b"a"), error="stopped")) == [b"a"], "so it begins anew"
    assert tell(own, DecodedItem(job(b"a"), item()))[0].rid == "t"


def test_an_answer_that_came_in_spite_of_the_stop_counts() -> None:
    own, one = core(), item()
    tell(own, request("r", b"a"))
    tell(own, CancelMedia("r"), request("s", b"a"))
    assert tell(own, DecodedItem(job(b"a"), one)) == [MediaReady("s", (one,))]
    assert tell(own, DecodedItem(job(b"a"), one), DecodedItem(b"never asked", one)) == []


def test_the_cache_is_bounded_and_forgets_what_was_used_least() -> None:
    own, big = core(media_cache_bytes=3 << 10), item()
    for name in (b"a", b"b", b"c"):
        tell(own, request("r", name), DecodedItem(job(name), big))
        tell(own, DecodedItem(job(name), big))
    tell(own, request("s", b"a"), request("t", b"d"))
    tell(own, DecodedItem(job(b"d"), big))
    assert own.health().gauges["media_cached_bytes"] == 3 << 10
    assert tell(own, request("u", b"b")) == [b"b"]
    assert isinstance(tell(own, request("v", b"a"))[0], MediaReady)
    small = core(media_cache_bytes=0)
    tell(small, request("r", b"a"))
    assert tell(small, DecodedItem(job(b"a"), big)) == [MediaReady("r", (big,))]
    assert small.health().gauges["media_cached_bytes"] == 0


def test_limits_of_requests() -> None:
    own = core(limit_mm_per_prompt={"image": 1})
    (failed,) = tell(own, request("r", b"a", b"b"))
    assert failed.param == "r.part[1]" and "2 images; 1 are allowed" in failed.message
    (failed,) = tell(own, request("v", b"a", b"b", b"c", kind=VIDEO))
    assert "3 videos; 2 are allowed" in failed.message
    for index in range(WAITING_REQUESTS):
        tell(own, request(f"w{index}", b"%d" % index))
    (failed,) = tell(own, request("x", b"a"))
    assert failed.code == "queue_full"
    own = core()
    own.drain(0.0)
    assert tell(own, request("x", b"a"))[0].code == "queue_full" and own.done


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_every_request_has_one_answer_and_nothing_is_left(steps: Sequence[tuple[int, ...]]) -> None:
    """Loads, cancels, answers and the time in any order: decoders never have more than they may,
    each stop is of a job that runs, and in the end everybody has been answered once."""
    own, running, loaded, ended = core(decoders=2, media_cache_bytes=2048), [], [], []
    now = 0.0

    def hear(sends: Sequence[Send]) -> None:
        for send in sends:
            if isinstance(send.message, DecodeMedia):
                running.append(send.message.job)
            elif isinstance(send.message, StopDecoding):
                assert send.to == DECODER and send.message.job in running
            else:
                assert send.to == ASKER
                ended.append(send.message.rid)
        assert len(running) <= 2 and len(set(running)) == len(running)

    for what, which, more in steps:
        now += 0.3
        if what <= 1:
            loaded.append(f"r{len(loaded)}")
            own.on_message(request(loaded[-1], *[b"%d" % (which + k) for k in range(more)],
                                   deadline=now + which), now)
        elif what == 2 and loaded:
            rid = loaded[which % len(loaded)]
            if rid not in ended:
                ended.append(rid)
                own.on_message(CancelMedia(rid), now)
        elif running:
            name = running.pop(which % len(running))
            own.on_message(DecodedItem(name, item() if more else None, error=": broken"), now)
        hear(own.on_wake(now))
    while running:
        own.on_message(DecodedItem(running.pop(), item()), now)
        hear(own.on_wake(now))
    assert sorted(ended) == sorted(loaded) and own.done
    gauges = own.health().gauges
    assert gauges["media_running"] == gauges["media_waiting"] == 0
    assert gauges["media_cached_bytes"] <= 2048


def test_a_file_that_ends_its_process_fails_its_own_request_alone() -> None:
    """Of two requests that are decoded by one process, the first takes too long."""
    limits = MediaConfig(media_cpu_seconds=0.25)  # the first takes twice, the second a fifth
    own, decoder = MediaCore(limits), MediaDecoder(limits)
    slow = png(6000, 6000, color=0, data=zlib.compress(bytes(6000 * 6001), 1))
    own.on_message(request("bad", slow), 0.0)
    own.on_message(request("good", saved(noise(random.Random(1)), "BMP")), 0.0)
    answers: list[Any] = []
    try:
        while not own.done:
            for send in own.on_wake(0.0):
                if send.to == DECODER:
                    own.on_message(run_job(decoder, send.message), 0.0)
                else:
                    answers.append(send.message)
        answers += [send.message for send in own.on_wake(0.0)]
    finally:
        decoder.close()
    bad, good = answers
    assert bad.message.startswith("bad.part[0]: cannot be decoded: its decoder fails, or takes")
    assert isinstance(good, MediaReady) and good.items[0].rows.shape[1] == 1176
