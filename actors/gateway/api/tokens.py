"""`/tokenize` and `/detokenize`, with the answers of vLLM, SGLang and llama-server."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.requests import Request
from actorium.actors.gateway.api.chat_body import ChatBody, MessageParam, check_prefixes
from actorium.actors.gateway.api.offered_tools import OfferedTool
from actorium.actors.gateway.api.sampling_fields import MAX_PROMPTS, check_ids
from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.gateway.served_model import TokenTexts
from actorium.actors.messages import PromptEmbeds


class TokenizeBody(Struct, kw_only=True):
    """Exactly one of prompt, messages and content."""

    model: str | None = None
    prompt: str | list[str] | None = None
    """A list gives lists of tokens and of counts."""
    add_special_tokens: bool | None = None
    """Default: true for prompts; messages get what their template writes."""
    return_token_strs: bool = False
    """Also return how the vocabulary writes each token."""
    messages: list[MessageParam] | None = None
    tools: list[OfferedTool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    """By default yes, unless the final message is continued."""
    continue_final_message: bool = False
    mm_processor_kwargs: dict[str, Any] = {}
    content: str | None = None
    """The text, as llama-server's clients send it: then the answer is llama-server's too."""
    add_special: bool = False
    parse_special: bool = True
    """False = special tokens that `content` writes are text like any other."""
    with_pieces: bool = False
    """Return each token of `content` with its text, or its bytes where it is not text."""

    def check(self) -> None:
        """Raises `HttpError` on fields that do not fit together."""
        given = [name for name in ("prompt", "messages", "content")
                 if getattr(self, name) is not None]
        if len(given) != 1:
            raise bad_field("prompt", "exactly one of prompt, messages and content is needed")
        check_prefixes(self.messages or ())
        if self.add_generation_prompt and self.continues:
            raise bad_field("continue_final_message", "not together with add_generation_prompt")

    @property
    def continues(self) -> bool:
        """True if the last message is left open."""
        return self.continue_final_message or bool(self.messages and self.messages[-1].prefix)

    def texts(self) -> list[str]:
        """Returns the prompt or prompts, or the content. Raises `HttpError`."""
        given = self.content if self.prompt is None else self.prompt
        found = given if isinstance(given, list) else [given or ""]
        if len(found) > MAX_PROMPTS:
            raise bad_field("prompt", f"at most {MAX_PROMPTS}, got {len(found)}")
        return found

    @property
    def special(self) -> bool:
        """True if the tokenizer adds its special tokens around the text."""
        if self.content is not None:
            return self.add_special
        return self.add_special_tokens is not False

    def chat(self) -> Request:
        """Returns the conversation in the form of a chat completion's request."""
        generation = self.add_generation_prompt
        chat = ChatBody(messages=self.messages or [], tools=self.tools)
        return Request(
            messages=list(chat.turns()), tools=chat.choice().shown,
            chat_template=self.chat_template, template_args=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
            add_generation_prompt=not self.continues if generation is None else generation,
            continue_final_message=self.continues)


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[int | list[int]]
    """Several lists give several texts."""
    model: str | None = None
    skip_special_tokens: bool = False


async def prompt_ids(client: AsyncClient, request: Request) -> list[int]:
    """Returns the token ids of a request's prompt. Raises `ActoriumError`."""
    if request.messages is not None:
        return await client.tokenize_chat(
            request.messages, request.template_args, request.tools,
            chat_template=request.chat_template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            mm_processor_kwargs=request.mm_processor_kwargs)
    if isinstance(request.prompt, str):
        return await client.tokenize(request.prompt)
    if isinstance(request.prompt, PromptEmbeds):
        raise bad_field("prompt_embeds", "has no token ids")
    return list(request.prompt or ())


async def tokenize(http: HttpRequest) -> Response:
    """Handles `/tokenize`."""
    call, body = call_of(http), await bodies.read(http, TokenizeBody)
    body.check()
    await call.chosen.model(body)
    engine = call.engine
    if body.messages is not None:
        columns = [await prompt_ids(engine.client, body.chat())]
        if body.add_special_tokens:
            before, after = await special_around(engine.client)
            columns = [[*before, *columns[0], *after]]
    else:
        columns = [await engine.client.tokenize(
            text, body.special, parse_special=body.parse_special or body.content is None)
            for text in body.texts()]
    if body.with_pieces or body.return_token_strs:
        await engine.token_texts.ready()
    if body.content is not None:
        return JsonReply({"tokens": _pieces(columns[0], engine.token_texts)
                          if body.with_pieces else columns[0]})
    return JsonReply(await _answer(engine, body, columns))


async def special_around(client: AsyncClient) -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer puts before and after a text."""
    bare = await client.tokenize("a", False)
    full = await client.tokenize("a", True)
    at = next((i for i in range(len(full)) if full[i:i + len(bare)] == bare), len(full))
    return full[:at], full[at + len(bare):]


async def _answer(engine: ServedEngine, body: TokenizeBody,
                  columns: list[list[int]]) -> dict[str, Any]:
    several = isinstance(body.prompt, list)
    answer: dict[str, Any] = {
        "count": [len(ids) for ids in columns] if several else len(columns[0]),
        "max_model_len": (await engine.served_model()).max_model_len,
        "tokens": columns if several else columns[0]}
    if body.return_token_strs:
        strings = [[engine.token_texts.written(token) for token in ids] for ids in columns]
        answer["token_strs"] = strings if several else strings[0]
    return answer


def _pieces(ids: list[int], texts: TokenTexts) -> list[dict[str, Any]]:
    found = []
    for token in ids:
        own = texts.bytes_of(token)
        try:
            piece: str | list[int] = own.decode()
        except UnicodeDecodeError:
            piece = list(own)
        found.append({"id": token, "piece": piece})
    return found


async def detokenize(http: HttpRequest) -> Response:
    """Handles `/detokenize`: the text under each of the three projects' names."""
    call, body = call_of(http), await bodies.read(http, DetokenizeBody)
    model = await call.chosen.model(body)
    engine = call.engine
    call.fields = {"token_ids": "tokens"}
    kinds = {isinstance(one, list) for one in body.tokens}
    if len(kinds) > 1:
        raise bad_field("tokens", "token ids and lists of them are mixed")
    several = kinds == {True}
    columns: list[Any] = list(body.tokens) if several else [body.tokens]
    if len(columns) > MAX_PROMPTS:
        raise bad_field("tokens", f"at most {MAX_PROMPTS} lists, got {len(columns)}")
    longest = model.max_model_len
    texts = []
    for ids in columns:
        check_ids(ids, longest, "tokens", completion=0)
        texts.append(await engine.client.detokenize(ids, body.skip_special_tokens))
    answer = texts if several else texts[0]
    return JsonReply({"prompt": answer, "text": answer, "content": answer})
