"""The parts of a message's content: texts, files of text, images and videos, which become the
client's uploads. Other servers' thoughts among them are passed over.

Nothing is fetched and no image is decoded here: URLs go to the media actor as they are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from actorium.actors.client.media import MediaUpload
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.messages import TurnPart

TEXTS = ("text", "input_text", "output_text")
FILES = ("file", "input_file")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")
"""Of other servers' answers, where they stand among the text."""
_URL_OF = {"image_url": ("image_url", "image"), "input_image": ("image_url", "image"),
           "image": ("image", "image"), "video_url": ("video_url", "video"),
           "input_video": ("video_url", "video"), "video": ("video", "video")}
"""Type of a part -> (its field with the URL, what it is)."""


class AnyPart(Protocol):
    """A part of a message's content."""

    type: str
    text: str | None
    refusal: str | None
    file: dict[str, Any] | None
    file_data: str | None


def content_of(content: str | Sequence[AnyPart | str] | None, where: str) -> str | list[TurnPart]:
    """Returns the content of a message for the engine: text, or parts where there is more. Raises
    `HttpError` naming the part."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([_part(part, f"{where}[{i}]") for i, part in enumerate(content)
                   if isinstance(part, str) or part.type not in THOUGHTS])


def unseen_parts(contents: Iterable[str | Sequence[AnyPart | str] | None]) -> list[str]:
    """Returns the types of the parts that `content_of` passes over."""
    return list(dict.fromkeys(
        part.type for content in contents if content is not None and not isinstance(content, str)
        for part in content if not isinstance(part, str) and part.type in THOUGHTS))


def _file_text(part: AnyPart) -> str | None:
    """Returns the text of a file that comes with the request, None if it is no text."""
    data = part.file_data if part.file is None else part.file.get("file_data")
    head, comma, body = data.partition(",") if isinstance(data, str) else ("", "", "")
    kind = head.removeprefix("data:")
    if not comma or kind == head or not kind.endswith(";base64"):
        return None
    return decoded_text(kind.removesuffix(";base64"), body)


def decoded_text(media_type: str, data: str) -> str | None:
    """Returns the text of a file in base64, None if it is no text. Raises `HttpError` where it is
    not of its media type."""
    if media_type.partition(";")[0].strip() not in ("application/json", "application/xml") \
            and not media_type.startswith("text/"):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise HttpError(400, f"messages: a file of {media_type[:40]!r}: {error}",
                        "messages") from None


def joined(parts: list[TurnPart]) -> str | list[TurnPart]:
    """Returns parts as one text, where there is nothing but text."""
    if any(isinstance(part, MediaUpload) for part in parts):
        return parts
    return "".join([part.text for part in parts])


def _part(part: AnyPart | str, where: str) -> TurnPart:
    if isinstance(part, str):
        return TurnPart("text", part)
    if part.type in TEXTS and part.text is not None:
        return TurnPart("text", part.text)
    if part.type == "refusal":
        return TurnPart("text", part.refusal or part.text or "")
    if part.type in FILES and (text := _file_text(part)) is not None:
        return TurnPart("text", text)
    if part.type not in _URL_OF:
        raise HttpError(400, f"{where}: text, files of text, images and videos are taken, got "
                        f"{part.type[:40]!r}", "messages")
    field, kind = _URL_OF[part.type]
    return upload(getattr(part, field, None), kind, f"{where}.{field}")


def upload(value: Any, kind: str, param: str) -> MediaUpload:
    """Returns the upload of a URL, of an object with one, or of the list of a video's frames.
    Raises `HttpError` naming `param`."""
    urls = value if isinstance(value, list) and kind == "video" else [value]
    found = [one.get("url") if isinstance(one, dict) else one for one in urls]
    texts = [one for one in found if isinstance(one, str) and one]
    if not texts or len(texts) != len(found):
        raise HttpError(400, f"{param}: must be a URL, or an object with one", param)
    return MediaUpload("video" if kind == "video" else "image", urls=texts, param=param)


def source_upload(source: Any, param: str) -> MediaUpload:
    """Returns the image of one of Anthropic's blocks: {"type": "base64", "media_type", "data"} or
    {"type": "url", "url"}. Raises `HttpError` naming `param`."""
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
