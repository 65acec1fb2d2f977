"""What the routes share whose answers are vectors or scores: their bodies, the requests to the
engine, and vectors as JSON.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator, Sequence
from time import time
from typing import Any, Literal, TypeAlias

from msgspec import Raw, Struct, structs

from actorium.actors.client.relevance import pooled_of
from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.api.chat_body import ChatBody, MessageParam
from actorium.actors.gateway.api.sampling_fields import check_turns
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import bad_field, http_error
from actorium.actors.gateway.http.replies import encode_json
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.messages import Pooled
from actorium.actors.params import PoolingParams, PoolingTask

MAX_INPUTS = 2048
"""Of one request, as OpenAI has it."""
Inputs: TypeAlias = str | list[str | int | list[int]]
"""A text, a list of token ids, or a list of either."""
VectorForm = Literal["float", "base64"]
"""base64: of the vector's float32 numbers, little-endian."""
HIDDEN_STATES: PoolingTask = "hidden_states"
"""The task, and the name of the tensor in an answer."""
MAX_HIDDEN_PROMPTS = 8
"""Of one HTTP request for them: all are in memory at once, up to `MAX_RESULT` bytes each."""
BYTES_AT_ONCE = 1 << 20
"""Of JSON that are written before other requests of the process have their turn: some 3 ms."""


class PooledBody(Struct, kw_only=True):
    """The fields of vLLM's routes: exactly one of input and messages."""

    model: str | None = None
    input: Inputs | None = None
    messages: list[MessageParam] | None = None
    """A conversation, which the model's chat template turns into one text."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    mm_processor_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    """False = texts are encoded without those that the model's tokenizer adds."""
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of each text, the first ones; -1 = as many as fit the model."""
    truncation_side: Literal["right"] | None = None
    use_activation: bool | None = None
    """Vectors get the length 1, scores go through softmax or sigmoid; None = as the model says."""
    normalize: bool | None = None
    """vLLM's older name of the same for vectors."""
    activation: bool | None = None
    """vLLM's older name of the same for scores."""
    encoding_format: VectorForm = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    prompt_name: str | None = None
    """Which of the prompts that sentence-transformers has for the model stands before each text."""
    keep_alive: str | float | None = None
    """How long the model's engine stays after this request, where there are several models."""
    user: str | None = None
    request_id: str | None = None

    @property
    def inputs_field(self) -> str:
        """Returns the name of the field that has the texts."""
        return "input"

    def check(self) -> None:
        """Raises `HttpError` on fields that do not fit together."""
        if (self.inputs is None) == (self.messages is None):
            raise bad_field("input", "exactly one of input and messages is needed")
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_field("continue_final_message", "not together with add_generation_prompt")

    @property
    def inputs(self) -> Inputs | None:
        """Returns the texts, by whichever name they have."""
        texts: Inputs | None = getattr(self, self.inputs_field)
        return texts

    @property
    def activates(self) -> bool | None:
        """Returns `use_activation` by whichever name it has."""
        return next((value for value in (self.use_activation, self.normalize, self.activation)
                     if value is not None), None)

    def prompts(self) -> list[dict[str, Any]]:
        """Returns the fields of each `Request` that say what is pooled. Raises `HttpError`."""
        if self.messages is not None:
            check_turns(self.messages, "messages")
            turns = list(ChatBody(messages=self.messages).turns())
            return [{"messages": turns, "chat_template": self.chat_template,
                     "template_args": self.chat_template_kwargs,
                     "mm_processor_kwargs": self.mm_processor_kwargs,
                     "add_generation_prompt": self.add_generation_prompt,
                     "continue_final_message": self.continue_final_message}]
        assert self.inputs is not None  # by `check`
        return [{"prompt": text} for text in texts_of(self.inputs, self.inputs_field)]

    @property
    def pooled_fields(self) -> dict[str, Any]:
        """Returns what `pooled` takes beside the prompts."""
        return {"truncate_prompt_tokens": self.truncate_prompt_tokens, "priority": self.priority,
                "timeout": self.timeout, "cache_salt": self.cache_salt,
                "add_special_tokens": self.add_special_tokens, "prompt_name": self.prompt_name}


def texts_of(inputs: Inputs, field: str) -> list[str | list[int]]:
    """Returns the texts, or lists of token ids. Raises `HttpError` naming the field."""
    if isinstance(inputs, str):
        return [inputs]
    kinds = set(map(type, inputs))
    if kinds == {int}:
        return [[token for token in inputs if isinstance(token, int)]]
    if int in kinds:
        raise bad_field(field, "token ids are mixed with texts or lists")
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise bad_field(field, f"1 to {MAX_INPUTS} of them, got {len(inputs)}")
    return [text for text in inputs if not isinstance(text, int)]


async def pooled(call: EngineCall, model: ServedModel, params: PoolingParams,
                 prompts: Sequence[dict[str, Any]], field: str = "input",
                 add_special_tokens: bool = True, prompt_name: str | None = None,
                 **fields: Any) -> list[Completion]:
    """Returns what the model makes of each prompt, in order. All go to the engine at once.

    fields: of every `Request`; field: the body's name of the prompts, for errors, which say the
    number of the prompt. Raises `HttpError`.
    """
    model.check_task(params.task)
    if prompt_name is not None:
        prompts = _with_prompt(model, prompt_name, prompts, field)
        if params.task == "embed":
            params = structs.replace(params, instruction=model.text_prompts[prompt_name])
    if not add_special_tokens:
        prompts = [await _without_special(call, prompt) for prompt in prompts]
    try:
        completions = await call.complete([
            Request(pooling=params, tenant=call.tenant, **prompt, **fields) for prompt in prompts])
    except ActoriumError as error:
        number = call.failed_number
        several = number is not None and len(prompts) > 1
        named = http_error(error, {"prompt": f"{field}[{number}]" if several else field})
        named.param = field if (named.param or "").startswith(field) else named.param
        raise named from None
    return [choices[0] for choices in completions]


def _with_prompt(model: ServedModel, name: str, prompts: Sequence[dict[str, Any]],
                 field: str) -> list[dict[str, Any]]:
    """Returns the prompts with what sentence-transformers puts before such texts."""
    begin = model.text_prompts.get(name)
    if begin is None:
        names = ", ".join(model.text_prompts) or "none"
        raise bad_field("prompt_name", f"{name[:100]!r} is none of the model's: {names}")
    if not all(isinstance(prompt.get("prompt"), str) for prompt in prompts):
        raise bad_field("prompt_name", f"only where {field} is texts")
    return [{"prompt": begin + prompt["prompt"]} for prompt in prompts]


async def _without_special(call: EngineCall, prompt: dict[str, Any]) -> dict[str, Any]:
    text = prompt.get("prompt")
    return {"prompt": await call.engine.client.tokenize(text, False)} \
        if isinstance(text, str) and text else prompt


# --- answers --------------------------------------------------------------------------------------

async def vectors(completions: Sequence[Completion], form: VectorForm = "float") -> list[Raw]:
    """Returns what was pooled as JSON: lists of numbers (of lists, where each token has its own),
    or texts of base64."""
    encoded, left = [], BYTES_AT_ONCE
    for completion in completions:
        parts = []
        for part in _json_parts(pooled_of(completion), form):
            parts.append(part)
            left -= len(part)
            if left <= 0:
                await asyncio.sleep(0)
                left = BYTES_AT_ONCE
        encoded.append(Raw(b"".join(parts)))
    return encoded


def _json_parts(vector: Pooled, form: VectorForm) -> Iterator[bytes]:
    if form == "base64":
        yield b'"%b"' % b64encode(vector.data)
        return
    numbers, width = memoryview(vector.data).cast("f"), vector.shape[-1]
    if len(vector.shape) == 1:
        yield encode_json(numbers.tolist())
        return
    yield b"["
    for row in range(vector.shape[0]):
        yield (b"," if row else b"") + encode_json(numbers[row * width:(row + 1) * width].tolist())
    yield b"]"


def check_hidden(prompts: int, field: str) -> None:
    """Raises `HttpError` where hidden states of so many prompts are asked for at once."""
    if prompts > MAX_HIDDEN_PROMPTS:
        raise bad_field(field, f"at most {MAX_HIDDEN_PROMPTS} texts where hidden states are asked "
                        f"for, got {prompts}")


def shown_hidden(found: Pooled) -> str:
    """Returns hidden states as base64 of a safetensors file."""
    return b64encode(found.safetensors(HIDDEN_STATES)).decode()


def list_answer(call: EngineCall, model: ServedModel, prefix: str, data: list[Any],
                prompt_tokens: int) -> dict[str, Any]:
    """Returns a list in OpenAI's form. prefix: of its id."""
    return {"id": f"{prefix}-{call.answer_id}", "object": "list", "created": int(time()),
            "model": model.name, "data": data, "usage": pooled_usage(prompt_tokens)}


def prompt_tokens_of(completions: Sequence[Completion]) -> int:
    """Returns the tokens of all prompts together."""
    return sum(completion.usage.prompt_tokens for completion in completions)


def pooled_usage(prompt_tokens: int) -> dict[str, int]:
    """Returns the usage of an answer without a completion."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}
