"""Images and videos in the bodies of requests: parts and blocks become the client's uploads.

Nothing is fetched or decoded here: URLs go to the media actor as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from actorium.actors.client.media import MediaUpload
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.messages import TurnPart

TEXTS = ("text", "input_text", "output_text")
_URL_OF = {"image_url": ("image_url", "image"), "input_image": ("image_url", "image"),
           "image": ("image", "image"), "video_url": ("video_url", "video"),
           "input_video": ("video_url", "video"), "video": ("video", "video")}
"""Type of a part -> (its field with the URL, what it is)."""


class AnyPart(Protocol):
    """A part of a message's content."""

    type: str
    text: str | None


def content_of(content: str | Sequence[AnyPart] | None, where: str) -> str | list[TurnPart]:
    """The content of a message as the engine takes it: text, or parts where there is more. Raises
    `HttpError` naming the part."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return joined(parts)


def joined(parts: list[TurnPart]) -> str | list[TurnPart]:
    """One text where there is nothing else."""
    if any(isinstance(part, MediaUpload) for part in parts):
        return parts
    return "".join([part.text for part in parts])


def _part(part: AnyPart, where: str) -> TurnPart:
    if part.type in TEXTS and part.text is not None:
        return TurnPart("text", part.text)
    if part.type not in _URL_OF:
        raise HttpError(400, f"{where}: text, images and videos are taken, got {part.type[:40]!r}",
                        "messages")
    field, kind = _URL_OF[part.type]
    return upload(getattr(part, field, None), kind, f"{where}.{field}")


def upload(value: Any, kind: str, param: str) -> MediaUpload:
    """The item of a URL, an object with one, or, of a video, a list of its frames' URLs. Raises
    `HttpError` naming `param`."""
    urls = value if isinstance(value, list) and kind == "video" else [value]
    found = [one.get("url") if isinstance(one, dict) else one for one in urls]
    texts = [one for one in found if isinstance(one, str) and one]
    if not texts or len(texts) != len(found):
        raise HttpError(400, f"{param}: must be a URL, or an object with one", param)
    return MediaUpload("video" if kind == "video" else "image", urls=texts, param=param)


def source_upload(source: Any, param: str) -> MediaUpload:
    """The image of a block of Anthropic's: {"type": "base64", "media_type", "data"} or {"type":
    "url", "url"}. Raises `HttpError` naming `param`."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return upload(source.get("url"), "image", f"{param}.url")
    if kind != "base64":
        raise HttpError(400, f"{param}.type: must be base64 or url, got {str(kind)[:40]!r}",
                        f"{param}.type")
    data, media_type = source.get("data"), source.get("media_type")
    if not isinstance(data, str) or not isinstance(media_type, str):
        raise HttpError(400, f"{param}: needs media_type and data", param)
    return upload(f"data:{media_type};base64,{data}", "image", f"{param}.data")
