"""Images through the clients that people have, to the packaged model of drawn pictures: its answers
are words that tell whether the picture arrived as it was sent."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from wire import CHAT, Server

from actorium.tools.pictures.drawn_pictures import draw
from actorium.tools.pictures.picture_questions import PictureItem, held_out

pytestmark = [pytest.mark.conformance, pytest.mark.models("pictures")]
Ask = Callable[[Server, PictureItem], str]
"""The answer to an item, in lower case."""
ITEMS = held_out(20)
RIGHT = 16
"""The model answers 17 to 19, which differs by processor."""


def files(item: PictureItem, kind: str = "PNG") -> list[str]:
    """Its pictures in base64."""
    image = pytest.importorskip("PIL.Image")
    found = []
    for picture in item.pictures:
        held = io.BytesIO()
        image.fromarray(draw(picture)).save(held, kind)
        found.append(base64.b64encode(held.getvalue()).decode())
    return found


def chat_message(item: PictureItem) -> dict[str, Any]:
    return {"role": "user", "content": [
        *({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}
          for file in files(item)), {"type": "text", "text": item.question.text}]}


def by_openai_chat(server: Server, item: PictureItem) -> str:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server.url}/v1", api_key="-")
    ask = {"model": server.model, "messages": [chat_message(item)], "max_tokens": 3,
           "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in
             client.chat.completions.create(**ask, stream=True) if chunk.choices]
    assert "".join(parts) == whole
    return str(whole)


def by_openai_responses(server: Server, item: PictureItem) -> str:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server.url}/v1", api_key="-")
    return str(client.responses.create(
        model=server.model, max_output_tokens=3, temperature=0, input=[{"role": "user", "content": [
            *({"type": "input_image", "image_url": f"data:image/png;base64,{file}",
               "detail": "auto"} for file in files(item)),
            {"type": "input_text", "text": item.question.text}]}]).output_text)


def by_anthropic(server: Server, item: PictureItem) -> str:
    client = pytest.importorskip("anthropic").Anthropic(base_url=server.url, api_key="-")
    ask: dict[str, Any] = {
        "model": "default", "max_tokens": 3, "messages": [{"role": "user", "content": [
            *({"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                           "data": file}} for file in files(item)),
            {"type": "text", "text": item.question.text}]}], "extra_body": {"temperature": 0}}
    whole = str(client.messages.create(**ask).content[0].text)
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == whole
    return whole


def by_litellm(server: Server, item: PictureItem) -> str:
    found = pytest.importorskip("litellm").completion(
        model=f"hosted_vllm/{server.model}", api_base=f"{server.url}/v1", api_key="-",
        messages=[chat_message(item)], max_tokens=3, temperature=0)
    return str(found.choices[0].message.content)


@pytest.mark.parametrize("ask", [by_openai_chat, by_openai_responses, by_anthropic, by_litellm])
def test_pictures_are_read(server: Server, ask: Ask) -> None:
    right = [ask(server, item).strip() == item.question.answer for item in ITEMS]
    assert sum(right) >= RIGHT, right


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_formats(server: Server, kind: str) -> None:
    right = 0
    for item in ITEMS[:10]:
        content = [*({"type": "image_url", "image_url": {
            "url": f"data:image/{kind.lower()};base64,{file}"}} for file in files(item, kind)),
            {"type": "text", "text": item.question.text}]
        answer = server.post(CHAT, {"model": server.model, "max_tokens": 3, "temperature": 0,
                                    "messages": [{"role": "user", "content": content}]}).ok()
        right += answer["choices"][0]["message"]["content"].strip() == item.question.answer
    assert right >= 8


def test_a_bad_picture_is_named_and_harms_no_other(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        client.chat.completions.create(model=server.model, max_tokens=3, messages=[
            {"role": "user", "content": [bad, {"type": "text", "text": "What is it?"}]}])
    assert by_openai_chat(server, ITEMS[0]).strip() == ITEMS[0].question.answer
