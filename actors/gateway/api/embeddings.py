"""Vectors of texts, as several projects' clients ask for them.

| route | whose body and answer |
|---|---|
| `/v1/embeddings`, `/embeddings` | OpenAI's and vLLM's; with `content` for `input` llama-server's |
| `/embedding` | llama-server's |
| `/encode` | SGLang's |
| `/embed` | those of Text Embeddings Inference (TEI) |
| `/api/embed`, `/api/embeddings` | Ollama's |
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.gateway.api.ollama_body import OllamaOptions
from actorium.actors.gateway.api.pooled_answers import (
    Inputs,
    PooledBody,
    list_answer,
    pooled,
    prompt_tokens_of,
    texts_of,
    vectors,
)
from actorium.actors.gateway.api.sampling_fields import Unsupported
from actorium.actors.gateway.api.sglang import shown_version
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.params import PoolingParams

NORMS = {2: True, -1: False}
"""llama-server's `embd_normalize`: whether vectors are divided by their norm (2 = Euclidean)."""


class EmbeddingsBody(PooledBody, kw_only=True):
    """The body of `/v1/embeddings` and of `/embedding`."""

    dimensions: int | None = None
    """Keep so many leading numbers of each vector, of models that were trained for it."""
    content: Inputs | None = None
    """llama-server's name of `input`; the answer is llama-server's, too."""
    embd_normalize: int | None = None
    """llama-server's: 2 = vectors get the length 1, -1 = they stay as they are."""

    @property
    def inputs_field(self) -> str:
        return "input" if self.content is None else "content"

    @property
    def activates(self) -> bool | None:
        """Returns whether vectors get the length 1; None = as the model says. Raises `HttpError`.
        """
        if self.embd_normalize is None:
            return super().activates
        if self.embd_normalize not in NORMS:
            raise bad_field("embd_normalize", "must be 2 (the length 1) or -1 (as they are), "
                            f"got {self.embd_normalize}")
        return NORMS[self.embd_normalize]

    def check(self) -> None:
        if self.content is not None and self.input is not None:
            raise bad_field("content", "not together with input")
        super().check()


class EncodeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of SGLang's `/encode`: exactly one of text and input_ids."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    model: str | None = None
    dimensions: int | None = None
    sampling_params: Any = None
    """Without effect: nothing is sampled."""
    rid: str | list[str] | None = None
    priority: int = 0
    timeout: float | None = None
    modalities: list[str] | None = None
    log_metrics: bool = True
    no_logs: bool = False

    def prompts(self) -> list[str | list[int]]:
        """Returns what is encoded. Raises `HttpError`."""
        for name in ("image_data", "video_data", "audio_data"):
            if getattr(self, name):
                raise bad_field(name, "not supported")
        if (self.text is None) == (self.input_ids is None):
            raise bad_field("text", "exactly one of text and input_ids is needed")
        field: Any = self.text if self.input_ids is None else self.input_ids
        return texts_of(field, self.field)

    @property
    def field(self) -> str:
        """Returns the name of the field that has the prompts."""
        return "text" if self.input_ids is None else "input_ids"

    @property
    def several(self) -> bool:
        """True if the answer is a list."""
        return isinstance(self.text, list) or any(
            isinstance(ids, list) for ids in self.input_ids or ())

    def labels(self, count: int, otherwise: str) -> list[str]:
        """Returns the ids of the answers to so many prompts. otherwise: where the body has none.
        Raises `HttpError`."""
        if isinstance(self.rid, list):
            if len(self.rid) != count:
                raise bad_field("rid", f"one for each prompt: {count}, got {len(self.rid)}")
            return self.rid
        name = self.rid or otherwise
        return [f"{name}_{number}" for number in range(count)] if self.several else [name]


class TeiBody(Struct, kw_only=True):
    """The body of TEI's `/embed`."""

    inputs: Inputs
    model: str | None = None
    normalize: bool = True
    truncate: bool = False
    """A text that is too long loses what does not fit; else it is refused."""
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class OllamaEmbedBody(Struct, kw_only=True):
    """The body of `/api/embed`, and with prompt in the place of input that of `/api/embeddings`."""

    model: str | None = None
    input: Inputs | None = None
    prompt: str | None = None
    truncate: bool = True
    """A text that is too long loses what does not fit; else it is refused."""
    dimensions: int | None = None
    options: OllamaOptions = OllamaOptions()
    """Without effect but for those that are refused."""
    keep_alive: float | str | None = None

    async def model_of(self, call: EngineCall) -> ServedModel:
        """Returns the model, once it embeds. Raises `HttpError`."""
        self.options.check()
        model = await call.chosen.model(self)
        model.check_task("embed")
        return model


async def embeddings(http: HttpRequest) -> Response:
    """Handles `/v1/embeddings` and `/embeddings`."""
    return await _embeddings(http, native=False)


async def native(http: HttpRequest) -> Response:
    """Handles llama-server's `/embedding`."""
    return await _embeddings(http, native=True)


async def _embeddings(http: HttpRequest, native: bool) -> Response:
    call, body = call_of(http), await bodies.read(http, EmbeddingsBody)
    body.check()
    native = native or body.content is not None
    model = await call.chosen.model(body)
    completions = await pooled(
        call, model, PoolingParams(task="embed", dimensions=body.dimensions,
                                   use_activation=body.activates), body.prompts(),
        body.inputs_field, **body.pooled_fields)
    encoded = await vectors(completions, body.encoding_format)
    if native:  # llama-server has a vector for each token of models without pooling: a list of one
        return JsonReply([{"index": i, "embedding": [vector]} for i, vector in enumerate(encoded)])
    data = [{"object": "embedding", "index": i, "embedding": vector}
            for i, vector in enumerate(encoded)]
    return JsonReply(list_answer(call, model, "embd", data, prompt_tokens_of(completions)))


async def encode(http: HttpRequest) -> Response:
    """Handles SGLang's `/encode`."""
    call, body = call_of(http), await bodies.read(http, EncodeBody)
    prompts = body.prompts()
    model = await call.chosen.model(body)
    call.labels = body.labels(len(prompts), call.answer_id)
    completions = await pooled(
        call, model, PoolingParams(task="embed", dimensions=body.dimensions),
        [{"prompt": prompt} for prompt in prompts], body.field, priority=body.priority,
        timeout=body.timeout)
    seconds = monotonic() - call.began
    answers: list[Any] = [
        {"embedding": vector, "meta_info": {
            "id": label, "finish_reason": {"type": "stop"},
            "prompt_tokens": completion.usage.prompt_tokens,
            "cached_tokens": completion.usage.cached_tokens,
            "weight_version": shown_version(completion.usage.weight_version),
            "e2e_latency": seconds}}
        for label, vector, completion in zip(
            call.labels, await vectors(completions), completions, strict=True)]
    return JsonReply(answers if body.several else answers[0])


async def tei_embed(http: HttpRequest) -> Response:
    """Handles TEI's `/embed`."""
    call, body = call_of(http), await bodies.read(http, TeiBody)
    prompts = texts_of(body.inputs, "inputs")
    model = await call.chosen.model(body)
    completions = await pooled(
        call, model, PoolingParams(task="embed", dimensions=body.dimensions,
                                   use_activation=body.normalize),
        [{"prompt": prompt} for prompt in prompts], "inputs", prompt_name=body.prompt_name,
        truncate_prompt_tokens=-1 if body.truncate else None)
    return JsonReply(await vectors(completions))


async def ollama_embed(http: HttpRequest) -> Response:
    """Handles `/api/embed`."""
    call, body = call_of(http), await bodies.read(http, OllamaEmbedBody)
    model = await body.model_of(call)
    loaded, completions = monotonic(), []
    if body.input not in (None, "", []):  # else the model is to be loaded
        completions = await pooled(
            call, model, PoolingParams(task="embed", dimensions=body.dimensions,
                                       use_activation=True),
            [{"prompt": text} for text in texts_of(body.input or "", "input")],
            truncate_prompt_tokens=-1 if body.truncate else None)
    return JsonReply({
        "model": body.model or model.name, "embeddings": await vectors(completions),
        "prompt_eval_count": prompt_tokens_of(completions),
        "total_duration": int((monotonic() - call.began) * 1e9),
        "load_duration": int((loaded - call.began) * 1e9)})


async def ollama_embeddings(http: HttpRequest) -> Response:
    """Handles `/api/embeddings`, the older route: one text, and its vector as the model makes it,
    whose length need not be 1."""
    call, body = call_of(http), await bodies.read(http, OllamaEmbedBody)
    model = await body.model_of(call)
    if not body.prompt:
        return JsonReply({"embedding": []})
    completions = await pooled(call, model, PoolingParams(task="embed", use_activation=False),
                               [{"prompt": body.prompt}], "prompt", truncate_prompt_tokens=-1)
    return JsonReply({"embedding": (await vectors(completions))[0]})
