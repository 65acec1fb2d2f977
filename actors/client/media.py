"""Images and videos of a conversation: what callers pass, and how a client has them prepared."""

from __future__ import annotations

import io
import math
import os
from array import array
from collections.abc import Sequence
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from actorium.actors import prompt_embeds
from actorium.actors.client.pending import MEDIA, TOKENIZER, PendingCall
from actorium.actors.client.requests import Request, check_messages, encode, encode_raw
from actorium.actors.client.session import ClientSession
from actorium.actors.errors import InvalidRequest
from actorium.actors.media.media_messages import MAX_MEDIA_MESSAGE, CancelMedia, LoadMedia
from actorium.actors.messages import (
    MAX_CLIENT_MESSAGE_BYTES,
    ChatMessage,
    PromptEmbeds,
    ServerInfo,
    Tokenize,
    TurnPart,
)

SCHEMES = ("data:", "http://", "https://", "file:")
Source: TypeAlias = Any
"""A URL (data:, http(s):, or file:, which the engine reads), a path, the bytes of a file, or an
image of PIL's."""


class MediaUpload(TurnPart, frozen=True, kw_only=True):
    """A part of a turn that brings its image or video: URLs or files, of which a video may have
    several, its frames."""

    urls: list[str] = []
    files: list[bytes] = []
    param: str = ""
    """The part of the request that errors name."""


class Image:
    """An image in a message's content: `{"role": "user", "content": [Image("cat.png"), "Whose is
    it?"]}`. source: see `Source`. Raises `InvalidRequest`."""

    video = False

    def __init__(self, source: Source) -> None:
        self.urls, self.files = _read([source])


class Video:
    """A video: one source (GIF, WebP, and where the engine has PyAV MP4, WebM, AVI), or a list of
    images, its frames. Raises `InvalidRequest`."""

    video = True

    def __init__(self, source: Source | Sequence[Source]) -> None:
        self.urls, self.files = _read(source if isinstance(source, list | tuple) else [source])


def _read(sources: Sequence[Source]) -> tuple[list[str], list[bytes]]:
    """Returns (URLs, files): one of the two."""
    if not sources:
        raise InvalidRequest("messages: a video has no frames", "messages")
    contents = [_read_source(source) for source in sources]
    urls = [content for content in contents if isinstance(content, str)]
    files = [content for content in contents if isinstance(content, bytes)]
    if urls and files:
        raise InvalidRequest("messages: a video's frames are URLs or files, not both", "messages")
    return urls, files


def _read_source(source: Source) -> str | bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source.lower().startswith(SCHEMES):
        return source
    if isinstance(source, str | os.PathLike):
        try:
            with open(source, "rb") as file:
                return file.read()
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"messages: cannot read {os.fspath(source)[:200]!r}: "
                                 f"{getattr(error, 'strerror', None) or error}",
                                 "messages") from None
    if hasattr(source, "save") and hasattr(source, "getbands"):  # PIL's, which is not imported here
        out = io.BytesIO()
        source.save(out, "PNG")
        return out.getvalue()
    raise InvalidRequest("messages: an image must be a path, a URL, bytes or an image of PIL's, "
                         f"got {type(source).__name__}", "messages")


# --- messages with media --------------------------------------------------------------------------

def turns_of(messages: Any) -> list[ChatMessage]:
    """The turns of a conversation, with `MediaUpload` where images and videos stand. Contents are
    text, or lists of texts, `Image`, `Video`, and the parts of OpenAI's messages and transformers'.
    Raises `InvalidRequest`."""
    if not isinstance(messages, list | tuple):
        return check_messages(messages)
    turns = check_messages([turn if (parts := _content(turn)) is None else {**turn, "content": ""}
                            for turn in messages])
    for at, turn in enumerate(messages):
        if (parts := _content(turn)) is not None:
            content = [_part(part, f"messages[{at}].content[{i}]") for i, part in enumerate(parts)]
            has_media = any(isinstance(part, MediaUpload) for part in content)
            text = "".join([part.text for part in content])
            turns[at] = msgspec.structs.replace(turns[at], content=content if has_media else text)
    return turns


def _content(turn: Any) -> Sequence[Any] | None:
    """The parts of a caller's turn; None where it is text, or of the SDK's own."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if isinstance(content, Image | Video):
        return [content]
    return content if isinstance(content, list | tuple) else None


def _part(part: Any, where: str) -> TurnPart:
    """Raises `InvalidRequest` naming the part."""
    if isinstance(part, TurnPart):
        return part
    if isinstance(part, str):
        return TurnPart("text", part)
    if isinstance(part, Image | Video):
        return _upload(part, where)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return TurnPart("text", part["text"])
    for name, made in (("image_url", Image), ("video_url", Video), ("image", Image),
                       ("video", Video)):
        if kind == name or (kind == "input_image" and name == "image_url"):
            value = part.get(name)
            value = value.get("url") if isinstance(value, dict) else value
            try:
                return _upload(value if isinstance(value, Image | Video) else made(value),
                               f"{where}.{name}")
            except InvalidRequest as error:
                text = error.message.removeprefix("messages: ")
                raise InvalidRequest(f"{where}.{name}: {text}", f"{where}.{name}") from None
    raise InvalidRequest(f"{where}: must be text, an image or a video, got "
                         f"{str(kind)[:40] if kind is not None else type(part).__name__!r}", where)


def _upload(item: Image | Video, param: str) -> MediaUpload:
    return MediaUpload("video" if item.video else "image", urls=item.urls, files=item.files,
                       param=param)


def is_loaded(request: Request) -> bool:
    """Returns whether the request can be sent as it is."""
    if isinstance(request.prompt, PromptEmbeds):
        return len(request.prompt.data) <= MAX_CLIENT_MESSAGE_BYTES // 2
    media = all(isinstance(key, bytes) for key in request.media) and not any(
        _content(turn) is not None if isinstance(turn, dict)
        else isinstance(turn, ChatMessage) and not isinstance(turn.content, str)
        and any(isinstance(part, MediaUpload) for part in turn.content)
        for turn in request.messages or ())
    return media and not _wants_ids(request)


def _wants_ids(request: Request) -> bool:
    """Returns whether the client must know the prompt's tokens: to ask for their hidden states."""
    return isinstance(request.prompt, str) and bool(
        request.prompt and getattr(request.params, "hidden_states", ()))


async def load_media(session: ClientSession, request: Request) -> Request:
    """The request with the keys of its images and videos, which have been prepared, and with token
    ids for a text whose hidden states are asked for. Raises `InvalidRequest` naming the part at
    fault, `QueueFull`, `DeadlineExceeded` and `EngineUnavailable`."""
    if isinstance(request.prompt, PromptEmbeds):  # the connection would end if it took none
        if not (await _info(session, request)).get(prompt_embeds.FIELD):
            prompt_embeds.checked(request.prompt, 0)
        return request
    if _wants_ids(request):
        text = str(request.prompt)
        answer = await session.call(TOKENIZER, lambda rid: Tokenize(rid, text), request.timeout)
        return msgspec.structs.replace(request, prompt=array("i", answer.tokens).tolist())
    media: list[Any] = list(request.media)
    turns = None if request.messages is None else turns_of(request.messages)
    for at, turn in enumerate(turns or ()):
        if turns is not None and not isinstance(turn.content, str):
            media += [part for part in turn.content if isinstance(part, MediaUpload)]
            turns[at] = msgspec.structs.replace(
                turn, content=[TurnPart(part.type, part.text) for part in turn.content])
    if media:
        media = await _keys(session, media, request)
    return msgspec.structs.replace(request, messages=turns, media=media)


async def _info(session: ClientSession, request: Request) -> dict[str, Any]:
    """The engine's `ServerInfo`."""
    answer = await session.call(TOKENIZER, ServerInfo, request.timeout)
    return msgspec.json.decode(answer.json, type=dict[str, Any])


async def _keys(session: ClientSession, media: list[Any], request: Request) -> list[bytes]:
    """Of the items, in order; those that are keys already stay."""
    options = encode_raw(request.mm_processor_kwargs, dict, "mm_processor_kwargs")
    wanted = [(at, item) for at, item in enumerate(media) if isinstance(item, MediaUpload)]
    if wanted and (await _info(session, request)).get("media") is None:
        param = wanted[0][1].param
        raise InvalidRequest(f"{param}: the model takes text alone", param)
    session.connect(MEDIA)
    signal, now = session.signal(), monotonic()
    deadline = math.inf if request.timeout is None else now + request.timeout
    calls: dict[int, PendingCall] = {}
    try:
        for at, item in wanted:
            if (size := sum(map(len, [*item.urls, *item.files]))) > MAX_MEDIA_MESSAGE - (1 << 20):
                raise InvalidRequest(f"{item.param}: {size} bytes are more than one message may "
                                     f"have, {MAX_MEDIA_MESSAGE}", item.param)

            def question(rid: str, item: MediaUpload = item) -> LoadMedia:
                return LoadMedia(rid, item.type == "video", item.param, item.urls, item.files,
                                 options, request.timeout)
            calls[at] = session.core.call(question, deadline, MEDIA, now)
            calls[at].notify = signal.set
            session.send(MEDIA, calls[at].frame)
        await signal.wait(lambda: any(call.error for call in calls.values())
                          or all(call.done for call in calls.values()))
    finally:
        for call in calls.values():
            if session.core.forget(call.rid) and session.link is not None:
                session.send(MEDIA, encode(CancelMedia(call.rid), "rid"))
    failed = next((call for call in calls.values() if call.error is not None), None)
    if failed is not None:
        failed.result()
    return [calls[at].result().key if at in calls else item for at, item in enumerate(media)]
