"""The settings of images and videos, a section of the tree."""

from __future__ import annotations

import os
import re

from msgspec import Struct


class MediaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images and videos: where they may come from, how large one may be, and what is kept of them
    (docs/media.md)."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that http(s) URLs may name: `images.example` (that host alone), `*.example` (hosts
    below it), `*` (any). Addresses that are not public are refused whatever the name. Default:
    none, so that data: URLs alone are taken."""
    allowed_local_media_path: str | None = None
    """Folder below which file: URLs may lie, symbolic links followed; default: nowhere."""
    media_timeout: float = 10.0
    """Seconds that fetching one item may take, redirects included."""
    media_redirects: int = 3
    """Redirects that are followed, each under the same rules as the first URL; 0 = none."""
    limit_mm_per_prompt: dict[str, float] = {}
    """Items of one request, as `image=16,video=1`; of what is not named 16 images, 2 videos."""
    max_media_bytes: int = 32 << 20
    """Bytes of one item, as it is sent or fetched."""
    max_media_pixels: int = 64 << 20
    """Width times height of an image or of a video's frames, read from the header before anything
    is decoded."""
    max_media_ratio: float = 200.0
    """The longer side over the shorter."""
    max_video_frames: int = 768
    """Frames that may be sampled of one video."""
    max_video_pixels: int = 128 << 20
    """Pixels of all sampled frames of one video together, once they are resized: some 85,000 tokens
    of Qwen2.5-VL. Fewer frames or smaller ones (`mm_processor_kwargs`) make a longer video fit."""
    max_video_seconds: float = 3600.0
    """Length of one video."""
    media_cache_bytes: int = 1 << 30
    """Patches of images and videos, in shared memory where that has room: of all unfinished
    requests, and of earlier ones for requests that have the same ones again."""
    media_cpu_seconds: float = 30.0
    """Processor time in which one item must be decoded."""
    encoder_cache_bytes: int = 256 << 20
    """On each device, what the vision tower has made of images and videos, kept for chunks of
    prompts to come and for prompts that have them again; the memory plan counts it. Where it is too
    little, the tower runs again."""
    max_encoder_tokens: int = 16384
    """Tokens of the largest image, or frame of a video, that the tower is run over: its temporaries
    are planned for so many. A larger one is refused."""


MOST_ITEMS = {"image": 16, "video": 2}
"""Items of a request where `limit_mm_per_prompt` names none."""


def item_limit(limits: MediaConfig, kind: str) -> int:
    """Items of a kind (image | video) that one request may have."""
    return int(limits.limit_mm_per_prompt.get(kind, MOST_ITEMS[kind]))


_HOST = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_-]+|\*", re.IGNORECASE)


def media_rules(m: MediaConfig) -> list[tuple[str, bool, str]]:
    """(section.field, whether its value is valid, what it must be)"""
    path = m.allowed_local_media_path
    return [
        ("media.allowed_media_domains", all(map(_HOST.fullmatch, m.allowed_media_domains)),
         "must be names of hosts, as images.example, *.example or *, without scheme and port"),
        ("media.allowed_local_media_path", path is None or os.path.isdir(path),
         "must be a folder that is there"),
        ("media.media_timeout", 0 < m.media_timeout <= 600, "must be between 0 and 600 seconds"),
        ("media.media_redirects", 0 <= m.media_redirects <= 20, "must be between 0 and 20"),
        ("media.limit_mm_per_prompt", all(kind in MOST_ITEMS and number == int(number) >= 0
                                          for kind, number in m.limit_mm_per_prompt.items()),
         "must be whole numbers of image and video"),
        ("media.max_media_bytes", 1 <= m.max_media_bytes <= 1 << 30,
         "must be between 1 byte and 1 GiB"),
        ("media.max_media_pixels", 1 <= m.max_media_pixels <= 80 << 20,
         "must be between 1 and 80 Mi: Pillow itself warns of more"),
        ("media.max_media_ratio", 1 <= m.max_media_ratio <= 200, "must be between 1 and 200"),
        ("media.max_video_frames", 2 <= m.max_video_frames <= 100_000,
         "must be between 2 and 100000"),
        ("media.max_video_pixels", 1 <= m.max_video_pixels <= 320 << 20,
         "must be between 1 and 320 Mi: what the process that decodes can hold"),
        ("media.max_video_seconds", m.max_video_seconds > 0, "must be above 0 seconds"),
        ("media.media_cache_bytes", m.media_cache_bytes >= 0, "must not be negative"),
        ("media.encoder_cache_bytes", m.encoder_cache_bytes >= 0, "must not be negative"),
        ("media.max_encoder_tokens", 1 <= m.max_encoder_tokens <= 1 << 20,
         "must be between 1 and 1 Mi"),
        ("media.media_cpu_seconds", 0.05 <= m.media_cpu_seconds <= 55,
         "must be between 0.05 and 55 seconds"),
    ]
