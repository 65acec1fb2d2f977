"""The media actor's logic, without a process; and with one, for files that end it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from helpers_hostile_media import noise, png, saved
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.core import CLIENT, Send
from actorium.actors.media.core import (
    DECODER,
    GRACE,
    SCHEDULER,
    STORE,
    WAITING_BYTES,
    WAITING_ITEMS,
    MediaCore,
    job_of,
)
from actorium.actors.media.image_processor import (
    ImageProcessing,
    MediaProcessing,
    VideoProcessing,
)
from actorium.actors.media.media_jobs import (
    DecodeMedia,
    FetchedMedia,
    FetchMedia,
    MediaSource,
    RemoveItem,
    StopDecoding,
    StoredItem,
    run_job,
)
from actorium.actors.media.media_messages import CancelMedia, HoldMedia, LoadMedia, MediaLoaded
from actorium.actors.media.media_process import MediaDecoder
from actorium.actors.media.patch_store import MediaFacts
from actorium.actors.media.prompt_media import IMAGE, VIDEO
from actorium.actors.messages import Hello, Rejected

PLAIN = MediaProcessing(ImageProcessing(), VideoProcessing())
ME = b"me"
FACTS = MediaFacts(False, (1, 2, 4), 2, 32)
"""1 KiB of rows, 2 tokens."""


def load(rid: str, data: bytes = b"", **more: Any) -> LoadMedia:
    return LoadMedia(rid, more.pop("video", False), f"{rid}.part", files=[data] if data else [],
                     **more)


def core(decoders: int = 2, **limits: Any) -> MediaCore:
    own = MediaCore(MediaConfig(**limits), PLAIN, decoders)
    assert own.on_wake(0.0) == [Send(SCHEDULER, Hello("media", 0))]
    return own


def tell(own: MediaCore, *messages: Any, now: float = 0.0) -> list[Any]:
    """What the core says to some messages; jobs to the decoder as their files."""
    for message in messages:
        if isinstance(message, LoadMedia | CancelMedia):
            own.on_client(ME, message, now)
        else:
            own.on_message(message, now)
    return [send.message.source.files[0] if isinstance(send.message, DecodeMedia) else send.message
            for send in own.on_wake(now)]


def job(data: bytes) -> bytes:
    return job_of(MediaSource(IMAGE, (data,)), PLAIN)


def key(data: bytes) -> bytes:
    return data.ljust(32, b".")


def stored(data: bytes) -> StoredItem:
    return StoredItem(job(data), key(data), FACTS)


def ready(rid: str, data: bytes) -> MediaLoaded:
    return MediaLoaded(rid, key(data), 2)


def test_equal_items_share_a_job_and_what_becomes_of_it() -> None:
    own = core()
    assert tell(own, load("r", b"a"), load("s", b"a"), load("r", b"a")) == [b"a"]
    assert tell(own, stored(b"a")) == [ready("r", b"a"), ready("s", b"a")]
    assert tell(own, load("t", b"a")) == [ready("t", b"a")]
    smaller = msgspec.Raw(msgspec.msgpack.encode({"max_pixels": 9999}))
    assert tell(own, load("u", b"a", options=smaller)) == [b"a"], "other parameters"
    assert tell(own, load("v", b"a", video=True)) == [b"a"], "a video is another item"
    assert own.health().gauges["media_hits"] == 1 and own.health().gauges["media_bytes"] == 1024


def test_frames_that_are_cut_elsewhere_are_another_job() -> None:
    cut = [job_of(MediaSource(VIDEO, files), PLAIN) for files in ((b"ab", b"c"), (b"a", b"bc"))]
    assert cut[0] != cut[1]


def test_urls_are_fetched_and_errors_name_each_requests_own_part() -> None:
    own = core()
    assert tell(own, load("r", urls=["http://x"])) == [FetchMedia(1, ("http://x",), "r.part")]
    assert tell(own, load("s", b"bad"), FetchedMedia(1, (b"bad",))) == [b"bad"]
    assert tell(own, StoredItem(job(b"bad"), error=": is PDF")) == [
        Rejected(rid, "invalid_request", f"{rid}.part: is PDF", f"{rid}.part") for rid in "rs"]
    tell(own, load("t", urls=["http://y"]))
    assert tell(own, FetchedMedia(3, error="t.part: answers 404"))[0].message.endswith("404")
    assert tell(own, load("u", b"bad")) == [b"bad"], "errors are not kept"
    assert tell(own, FetchedMedia(3, (b"late",)), FetchedMedia(9, (b"never asked",))) == []


def test_what_cannot_be_is_refused_at_once() -> None:
    own = core()
    for message, words in (
            (load("r"), "must be a URL or the bytes"),
            (load("r", b"a", urls=["http://x"]), "must be a URL or the bytes"),
            (LoadMedia("r", False, "p", files=[b"a", b"b"]), "an image is one file"),
            (load("r", b"a", options=msgspec.Raw(b"\x90")), "mm_processor_kwargs: "),
            (load("r", b"a", options=msgspec.Raw(msgspec.msgpack.encode({"max_pixels": 1 << 30}))),
             "mm_processor_kwargs.max_pixels: must not be above")):
        (said,) = tell(own, message)
        assert isinstance(said, Rejected) and words in said.message, said
    for index in range(WAITING_ITEMS):
        tell(own, load(f"w{index}", b"%d" % index))
    assert tell(own, load("x", b"a"))[0].code == "queue_full"
    own = core()
    tell(own, load("r", bytes(WAITING_BYTES // 2 + 1)))
    assert tell(own, load("s", bytes(WAITING_BYTES // 2)))[0].code == "queue_full"
    own.drain(0.0)
    assert tell(own, load("x", b"a"))[0].code == "unavailable" and not own.done


def test_so_many_jobs_run_at_once() -> None:
    own = core(decoders=2)
    assert tell(own, load("r", b"a"), load("s", b"b"), load("t", b"c")) == [b"a", b"b"]
    assert tell(own, stored(b"a")) == [ready("r", b"a"), b"c"]


def test_deadlines() -> None:
    own = core(decoders=1)
    tell(own, load("r", b"a", timeout=5.0), load("s", b"b", timeout=9.0))
    assert own.next_timer() == 5.0 and tell(own, now=4.9) == []
    stopped, failed = tell(own, now=5.0)
    assert (failed.rid, failed.code) == ("r", "deadline") and stopped == StopDecoding(job(b"a"))
    assert tell(own, StoredItem(job(b"a"), error="stopped"), now=6.0) == [b"b"]


def test_who_cancels_or_goes_stops_what_nobody_else_waits_for() -> None:
    own = core(decoders=1)
    tell(own, load("r", b"a"), load("q", b"b"), load("s", b"a"))
    assert tell(own, CancelMedia("r"), CancelMedia("q")) == [], "the one job goes on for s"
    own.on_client_lost(b"another", 0.0)
    assert tell(own, CancelMedia("nobody")) == []
    own.on_client_lost(ME, 0.0)
    assert tell(own) == [StopDecoding(job(b"a"))] and own.done
    assert tell(own, load("t", b"a")) == [], "its decoder has been told to stop"
    assert tell(own, StoredItem(job(b"a"), error="stopped")) == [b"a"], "so it begins anew"
    assert tell(own, stored(b"a")) == [ready("t", b"a")]


def test_an_answer_that_came_in_spite_of_the_stop_counts() -> None:
    own = core()
    tell(own, load("r", b"a"))
    tell(own, CancelMedia("r"), load("s", b"a"))
    assert tell(own, stored(b"a")) == [ready("s", b"a")]
    assert tell(own, stored(b"a"), StoredItem(b"never asked", b"", FACTS)) == []


def filled(count: int, now: float = 0.0, **limits: Any) -> MediaCore:
    own = core(media_cache_bytes=3 << 10, **limits)
    for index in range(count):
        tell(own, load("r", b"%d" % index), now=now)
        assert tell(own, stored(b"%d" % index), now=now) == [ready("r", b"%d" % index)]
    return own


def test_what_is_named_or_was_just_given_away_stays() -> None:
    """The cache has room for three."""
    own = filled(3)
    tell(own, load("s", b"x"))
    refused, gone = tell(own, stored(b"x"))
    assert isinstance(refused, RemoveItem | Rejected) and {type(refused), type(gone)} == {
        RemoveItem, Rejected}
    assert not own.holds(key(b"x")) and "--media-cache-bytes" in getattr(
        refused, "message", "") + getattr(gone, "message", "")
    tell(own, HoldMedia(1, False, held=[key(b"0"), key(b"1")]))
    tell(own, HoldMedia(1, False, free=[key(b"1")]))
    tell(own, load("s", b"x"))
    assert tell(own, stored(b"x")) == [RemoveItem(key(b"1")), ready("s", b"x")], "it was named"
    tell(own, load("t", b"y"), now=GRACE + 1)
    assert tell(own, stored(b"y"), now=GRACE + 1)[0] == RemoveItem(key(b"2")), "its grace is over"
    assert own.holds(key(b"0")), "an unfinished request names it"
    assert own.health().gauges["media_bytes"] == 3 << 10
    assert own.health().gauges["media_evicted"] == 2


def test_the_least_recently_used_goes_first() -> None:
    own = filled(3)
    late = GRACE + 1
    assert tell(own, load("s", b"0"), now=late) == [ready("s", b"0")]
    tell(own, load("t", b"x"), now=late)
    assert tell(own, stored(b"x"), now=late)[0] == RemoveItem(key(b"1"))


def test_a_new_actor_keeps_all_until_the_scheduler_says_what_is_in_use() -> None:
    own = MediaCore(MediaConfig(media_cache_bytes=2 << 10), PLAIN, 1, 7,
                    [(key(b"a"), FACTS), (key(b"b"), FACTS)], 100.0)
    late = 101.0 + GRACE
    assert own.on_wake(100.0) == [Send(SCHEDULER, Hello("media", 7))]
    tell(own, load("r", b"x"), now=late)
    assert {type(said) for said in tell(own, stored(b"x"), now=late)} == {RemoveItem, Rejected}
    tell(own, HoldMedia(3, True, held=[key(b"b"), key(b"unknown")]), now=late)
    tell(own, HoldMedia(2, True, held=[key(b"a")]), load("r", b"x"), now=late)  # of an older one
    assert tell(own, stored(b"x"), now=late) == [RemoveItem(key(b"a")), ready("r", b"x")]
    own.on_peer_back(SCHEDULER, late)
    assert tell(own, now=late) == [Hello("media", 7)]


def test_a_new_actor_whose_cache_is_full_takes_new_items_at_once() -> None:
    """What was given away since stays, and what its scheduler names; the oldest of the rest goes,
    though its key may have been given away a moment before the death."""
    own = MediaCore(MediaConfig(media_cache_bytes=3 << 10), PLAIN, 1, 7,
                    [(key(name), FACTS) for name in (b"a", b"b", b"c")], 100.0)
    assert tell(own, HoldMedia(1, True, held=[key(b"a")]), now=100.0) == [Hello("media", 7)]
    tell(own, load("r", b"b"), now=100.5)
    assert tell(own, stored(b"b"), now=100.5) == [ready("r", b"b")]
    tell(own, load("s", b"x"), now=101.0)
    assert tell(own, stored(b"x"), now=101.0) == [RemoveItem(key(b"c")), ready("s", b"x")]
    tell(own, load("t", b"y"), now=102.0)
    assert {type(said) for said in tell(own, stored(b"y"), now=102.0)} == {RemoveItem, Rejected}
    assert [name for name in b"abxy" if own.holds(key(bytes([name])))] == [*b"abx"]


def test_what_has_left_the_folder_is_decoded_again() -> None:
    there = {key(b"a")}
    own = MediaCore(MediaConfig(), PLAIN, is_stored=there.__contains__)
    tell(own, load("r", b"a"))
    tell(own, stored(b"a"))
    assert tell(own, load("s", b"a")) == [ready("s", b"a")]
    there.clear()
    assert tell(own, load("t", b"a")) == [b"a"]
    assert tell(own, stored(b"a")) == [ready("t", b"a")]


def test_no_room_on_the_disk() -> None:
    own = core()
    tell(own, load("r", b"a"))
    (said,) = tell(own, StoredItem(job(b"a"), error=": no space", full=True))
    assert said.code == "queue_full" and said.param == "r.part"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_every_item_has_one_answer_and_nothing_is_left(steps: Sequence[tuple[int, ...]]) -> None:
    """Loads, cancels, answers, holds and the time in any order: decoders never have more than they
    may, each stop is of a job that runs, what is removed is neither held nor promised, and in the
    end everybody has been answered once."""
    own, running, loaded, ended = core(decoders=2, media_cache_bytes=2048), {}, [], []
    now, held, there = 0.0, set[bytes](), set[bytes]()

    def hear(sends: Sequence[Send]) -> None:
        for send in sends:
            match send.message:
                case DecodeMedia():
                    assert send.message.job not in running
                    running[send.message.job] = send.message.source.files[0]
                case StopDecoding():
                    assert send.to == DECODER and send.message.job in running
                case RemoveItem():
                    assert send.to == STORE and send.message.key not in held
                    there.discard(send.message.key)
                case _:
                    assert send.to == CLIENT
                    ended.append(send.message.rid)
        assert len(running) <= 2

    def answer(name: bytes, good: bool) -> None:
        data = running.pop(name)
        there.add(key(data))
        own.on_message(stored(data) if good else StoredItem(name, error=": broken"), now)

    for what, which, more in steps:
        now += 0.3 + 20 * (more == 3)
        if what <= 1:
            loaded.append(f"r{len(loaded)}")
            own.on_client(ME, load(loaded[-1], b"%d" % which, timeout=1.0 + which), now)
        elif what == 2 and loaded:
            rid = loaded[which % len(loaded)]
            if rid not in ended:
                ended.append(rid)
                own.on_client(ME, CancelMedia(rid), now)
        elif what == 3:
            change = {name for name in there if own.holds(name)} if which else set()
            own.on_message(HoldMedia(1, False, sorted(change - held), sorted(held - change)), now)
            held.clear()
            held.update(change)
        elif running:
            answer(sorted(running)[which % len(running)], more > 0)
        hear(own.on_wake(now))
        assert own.health().gauges["media_bytes"] <= 2048
    while running:
        answer(next(iter(running)), True)
        hear(own.on_wake(now))
    assert sorted(ended) == sorted(loaded) and own.done and own.next_timer() is None


def test_a_file_that_ends_its_process_fails_its_own_request_alone(tmp_path: Path) -> None:
    """Of two items that are decoded by one process, the first takes too long."""
    limits = MediaConfig(media_cpu_seconds=0.25)  # the first takes twice, the second a fifth
    own, decoder = MediaCore(limits, PLAIN), MediaDecoder(limits)
    slow = png(6000, 6000, color=0, data=zlib.compress(bytes(6000 * 6001), 1))
    own.on_client(ME, load("bad", slow), 0.0)
    own.on_client(ME, load("good", saved(noise(random.Random(1)), "BMP")), 0.0)
    answers: list[Any] = []
    try:
        while not own.done:
            for send in own.on_wake(0.0):
                if send.to == DECODER:
                    own.on_message(run_job(decoder, send.message, tmp_path, b"s", 1 << 30), 0.0)
                elif send.to == CLIENT:
                    answers.append(send.message)
        answers += [send.message for send in own.on_wake(0.0) if send.to == CLIENT]
    finally:
        decoder.close()
    bad, good = answers
    assert bad.message.startswith("bad.part: cannot be decoded: its decoder fails, or takes")
    assert isinstance(good, MediaLoaded)
    large = DecodeMedia(bytes(32), MediaSource(IMAGE, (saved(noise(random.Random(1)), "BMP"),)),
                        PLAIN)
    assert "are held in all (--media-cache-bytes)" in run_job(decoder, large, tmp_path, b"s", 1000
                                                             ).error
    decoder.close()
