"""Hostile images and videos: each is refused by a clear error, in bounded time and memory, and the
process that decodes them lives on."""

from __future__ import annotations

import io
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers_hostile_media import animation, crafted, mutated, noise, png, saved
from helpers_imports import loaded_by
from helpers_speed import slowness

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest
from actorium.actors.media.decoding import decode_video
from actorium.actors.media.image_processor import (
    QWEN3,
    ImageProcessing,
    MediaProcessing,
    VideoProcessing,
)
from actorium.actors.media.media_jobs import load_media
from actorium.actors.media.media_process import DecodedMedia, MediaDecoder, MediaJob
from actorium.actors.media.prompt_media import IMAGE, VIDEO

PART = "messages[0].content[1].image_url"
SMALL = ImageProcessing(max_pixels=28 * 28 * 16)
LIMITS = MediaConfig(max_media_bytes=8 << 20)
MOST_MEMORY = 700 << 20
"""Bytes: two canvases of 64 Mi pixels of libwebp would take 512 MiB, were they touched."""
MOST_SECONDS = 3.0
"""Of a processor, for one file, where bounds were measured."""


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    found = MediaDecoder(LIMITS)
    yield found
    found.close()


def status(pid: int, field: str) -> int:
    """A number of /proc/PID/status, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


def seconds(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def pid_of(decoder: MediaDecoder) -> int:
    decoder.decode(MediaJob([saved(noise(random.Random(0)), "PNG")], PART, SMALL))
    assert decoder.child.process is not None
    return decoder.child.process.pid


def answered(decoder: MediaDecoder, job: MediaJob) -> DecodedMedia | str:
    try:
        return decoder.decode(job)
    except InvalidRequest as error:
        assert error.param == PART and error.message.startswith(f"{PART}: ")
        assert len(error.message) < 600 and error.message.isprintable()
        assert "its decoder fails" not in error.message, "the process died of it"
        return error.message


def test_a_battery_of_hostile_files_leaves_the_process_alive(decoder: MediaDecoder) -> None:
    """As images, and as videos where a format may be one. No crash, no file that takes long or
    much memory; none of the crafted ones but five is an image."""
    rng = random.Random(20)
    tricks, spoilt = list(crafted(rng)), list(mutated(rng, 180))
    assert len(tricks) + len(spoilt) >= 250
    pid = pid_of(decoder)
    readable: list[str] = []
    allowed = MOST_SECONDS * slowness()
    for name, data in (*tricks, *spoilt):
        for job in (MediaJob([data], PART, SMALL),
                    MediaJob([data], PART, None, VideoProcessing(max_pixels=200_000))):
            before = seconds(pid)
            found = answered(decoder, job)
            assert seconds(pid) - before < allowed, name
            if isinstance(found, DecodedMedia):
                readable.append(name)
                assert len(found.pixels) == 3 * np.prod(found.shape) < 10 << 20
    assert decoder.child.process is not None and decoder.child.process.pid == pid
    assert status(pid, "VmHWM") < MOST_MEMORY
    broken = {"png-bad-crc", "png-color-9", "png-depth-3"}
    assert not broken & set(readable)
    assert len({name for name in readable if not name[0].isdigit()}) < len(tricks) // 4, readable


@pytest.mark.parametrize("data, words", [
    (png(60000, 60000), "far more pixels than the"),
    (png(10000, 10000), "is 10000 x 10000 pixels; 67108864 are allowed (--max-media-pixels)"),
    (png(1, 60000), "is 1 x 60000 pixels; one side may be 200 times as long"),
    (b"", "is empty"), (bytes(9 << 20), "has 9437184 bytes; 8388608 are allowed"),
    (b"<?xml?><svg/>", "is SVG; images are read from PNG, JPEG, WEBP, GIF, BMP, TIFF"),
    (b"%PDF-1.4", "is PDF"), (b"%!PS-Adobe", "is PostScript"), (b"??", "is no image that is known"),
    (b"\x1a\x45\xdf\xa3", "is WEBM; images are read"),
    (saved(noise(random.Random(1)), "PNG")[:-500], "PNG: cannot be decoded: "),
], ids=range(11))
def test_refusals_say_what_is_wrong(decoder: MediaDecoder, data: bytes, words: str) -> None:
    assert words in str(answered(decoder, MediaJob([data], PART, SMALL)))


def black(side: int) -> bytes:
    """A good PNG, as black as it is large."""
    return png(side, side, color=0, data=zlib.compress(bytes(side * (side + 1)), 1))


def test_a_bomb_is_refused_before_anything_of_it_is_decoded(decoder: MediaDecoder) -> None:
    tight = MediaDecoder(MediaConfig(max_media_pixels=1 << 20))
    try:
        pid = pid_of(tight)
        before = status(pid, "VmHWM")
        big = black(4000)
        assert "is 4000 x 4000 pixels; 1048576 are allowed" in str(
            answered(tight, MediaJob([big], PART, SMALL)))
        assert status(pid, "VmHWM") - before < 8 << 20
    finally:
        tight.close()
    assert isinstance(answered(decoder, MediaJob([big], PART, SMALL)), DecodedMedia)


def test_a_file_that_takes_too_long_ends_its_own_request_alone() -> None:
    """A limit so low that a large image (0.8 s) does not come within it, and a small one does, for
    which a new process has to import what decodes it (0.1 s)."""
    hurried = MediaDecoder(MediaConfig(media_cpu_seconds=0.3))
    try:
        with pytest.raises(InvalidRequest, match="takes more than 0.3 s") as error:
            hurried.decode(MediaJob([black(8000)], PART, SMALL))
        assert error.value.param == PART
        small = saved(noise(random.Random(3)), "BMP")
        assert isinstance(hurried.decode(MediaJob([small], PART, SMALL)), DecodedMedia)
    finally:
        hurried.close()


# --- videos --------------------------------------------------------------------------------------

BOTH = MediaProcessing(ImageProcessing(max_pixels=28 * 28 * 16),
                       VideoProcessing(family=QWEN3, patch_size=16, min_pixels=32 * 32 * 2,
                                       max_pixels=32 * 32 * 400))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_animations_are_sampled_by_their_own_clock(decoder: MediaDecoder, kind: str) -> None:
    data = animation(random.Random(4), kind, 20, (64, 32), duration=100)
    found = load_media(decoder, [data], VIDEO, BOTH, PART)
    assert found.facts.grid[0] == 2 and found.rows.shape == (
        np.prod(found.facts.grid), 3 * 2 * 16 * 16)
    assert found.facts.timestamps == pytest.approx((0.3, 1.6)), "frames 0, 6, 13 and 19 of 10 Hz"
    assert found.facts.seconds == pytest.approx(1.0)


def test_an_animation_given_as_an_image_is_its_first_frame(decoder: MediaDecoder) -> None:
    rng = random.Random(5)
    data = animation(rng, "WEBP", 3, (56, 56))
    first = noise(random.Random(5), 56, 56)
    own = load_media(decoder, [data], IMAGE, BOTH, PART)
    assert own.key == load_media(decoder, [saved(first, "PNG")], IMAGE, BOTH, PART).key


def test_frames_may_come_as_images(decoder: MediaDecoder) -> None:
    rng = random.Random(6)
    frames = [saved(noise(rng, 64, 32), kind) for kind in ("PNG", "WEBP", "BMP")]
    found = load_media(decoder, frames, VIDEO, BOTH, PART)
    assert found.facts.grid[0] == 2 and found.facts.timestamps == pytest.approx((0.25, 1.0))
    with pytest.raises(InvalidRequest, match="frames of a video must be of one size"):
        load_media(decoder, [*frames, saved(noise(rng), "PNG")], VIDEO, BOTH, PART)
    with pytest.raises(InvalidRequest, match=r"image_url\[1\]: is PDF"):
        load_media(decoder, [frames[0], b"%PDF"], VIDEO, BOTH, PART)


@pytest.mark.parametrize("limits, data, words", [
    ({"max_video_seconds": 1.5}, animation(random.Random(7), "GIF", 20), "lasts"),
    ({"max_video_pixels": 4000}, animation(random.Random(7), "WEBP", 20),
     "would be 4 frames of .* x .* pixels; 4000 pixels are allowed"),
    ({"max_video_frames": 3}, animation(random.Random(7), "WEBP", 20), "frames would be sampled"),
    ({}, saved(noise(random.Random(1)), "JPEG"), "is JPEG; videos are read from MP4"),
    ({}, saved(noise(random.Random(1)), "GIF"), "has 1 frames, and needs 2"),
])
def test_limits_of_videos(limits: dict[str, float], data: bytes, words: str) -> None:
    own = MediaDecoder(MediaConfig(**limits))
    try:
        with pytest.raises(InvalidRequest, match=words) as error:
            load_media(own, [data], VIDEO, BOTH, PART)
        assert error.value.param == PART
    finally:
        own.close()


def test_keys_are_those_of_pixels_and_parameters(decoder: MediaDecoder) -> None:
    image = noise(random.Random(8), 60, 60)
    one = load_media(decoder, [saved(image, "PNG")], IMAGE, BOTH, PART)
    same = load_media(decoder, [saved(image, "BMP")], IMAGE, BOTH, "messages[9]")
    other = MediaProcessing(ImageProcessing(max_pixels=28 * 28 * 16, image_mean=(0.5,) * 3),
                            BOTH.video)
    assert one.key == same.key and np.array_equal(one.rows, same.rows)
    assert load_media(decoder, [saved(image, "PNG")], IMAGE, other, PART).key != one.key


def test_broken_exif_is_as_if_it_were_not_there(decoder: MediaDecoder) -> None:
    image = noise(random.Random(9), 60, 40)
    data = saved(image, "PNG")
    junk = data[:33] + struct.pack(">I", 9) + b"eXIf" + b"MM\0*\xff\xff\xff\xff!" + b"\0\0\0\0" \
        + data[33:]
    found = answered(decoder, MediaJob([junk], PART, SMALL))
    assert isinstance(found, str) or found.shape == decoder.decode(
        MediaJob([data], PART, SMALL)).shape


# --- containers ----------------------------------------------------------------------------------

def container(kind: str, frames: int, rate: int = 10, size: tuple[int, int] = (64, 32)) -> bytes:
    av = pytest.importorskip("av", reason="PyAV is not installed: extra video")
    out = io.BytesIO()
    with av.open(out, "w", format={"MP4": "mp4", "WEBM": "matroska", "AVI": "avi"}[kind]) as made:
        stream = made.add_stream("mpeg4" if kind != "WEBM" else "ffv1", rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(frames):
            level = np.full((size[1], size[0], 3), index * 255 // frames, np.uint8)
            made.mux(stream.encode(av.VideoFrame.from_ndarray(level, format="rgb24")))
        made.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["MP4", "WEBM", "AVI"])
def test_containers_are_sampled(decoder: MediaDecoder, kind: str) -> None:
    data = container(kind, 20)
    found = decoder.decode(MediaJob([data], PART, None, BOTH.video))
    assert (found.total, found.fps, found.indices) == (20, 10.0, [0, 6, 13, 19])
    levels = np.frombuffer(found.pixels, np.uint8).reshape(*found.shape, 3).mean((1, 2, 3))
    assert levels == pytest.approx([0, 76.5, 165.75, 242.25], abs=6)
    rng, pid = random.Random(kind), pid_of(decoder)
    for _ in range(15):
        spoilt = bytearray(data[:rng.randint(8, len(data))])
        for _ in range(rng.randint(0, 9)):
            spoilt[rng.randrange(12, len(spoilt) + 12) % len(spoilt)] ^= 1 << rng.randrange(8)
        answered(decoder, MediaJob([bytes(spoilt)], PART, None, BOTH.video))
    assert pid_of(decoder) == pid


def test_without_pyav_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"from a checkout: pip install -e '.\[video\]'"):
        decode_video(b"\0\0\0\x1cftypisom" + bytes(40), LIMITS, BOTH.video, PART)


def test_the_process_that_decodes_has_no_numpy() -> None:
    loaded = loaded_by("import actorium.actors.media.media_process")
    assert not loaded & {"numpy", "PIL", "av", "torch"}
