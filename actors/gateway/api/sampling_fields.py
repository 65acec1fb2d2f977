"""Fields that the request bodies share, and their conversion to the engine's parameters.

Unknown fields are ignored, since routers and clients add some. Other engines' fields that would
change the answer are refused: the caller would get something else than what was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from actorium.actors.client.requests import Request
from actorium.actors.errors import context_overflow
from actorium.actors.gateway.api.response_formats import (
    SCHEMA_OPTIONS,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    constraint_of,
)
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.messages import MAX_TURNS
from actorium.actors.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PROCESSOR_NAME,
    ProcessorCall,
    SamplingParams,
    Structured,
)

TOKEN = re.compile(r"[0-9]{1,10}")
"""A token id as a text."""
MAX_PROMPTS = 256
"""Prompts of one request."""
SEED_MASK = (1 << 63) - 1
LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "n_predict")
"""The names of the limit of a completion in all bodies, the first that is given counts."""
NO_LIMIT = -1
"""Several clients' value for: to the end of the context."""


Unsupported: TypeAlias = Any
"""Of a field that is accepted with a value that changes nothing, else refused."""


def unsupported_in(body: type[Struct]) -> tuple[str, ...]:
    """Returns the names of a body's fields that are declared `Unsupported`."""
    return tuple(name for name, kind in body.__annotations__.items() if kind == "Unsupported")


class StreamOptions(Struct):
    """What a stream includes beside its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    resumable: bool = False
    """Each event has an id; a call with that as `Last-Event-ID` goes on behind it."""


class NamedProcessor(Struct, kw_only=True):
    """A logits processor as vLLM's bodies name it."""

    qualname: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None


class SamplingFields(Struct, kw_only=True):
    """OpenAI's fields, and those that vLLM and SGLang add. None = the model's own default."""

    # the completion's format, of which at most one applies: see `FORMAT_FIELDS`
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    # vLLM's
    use_beam_search: Unsupported = None
    length_penalty: Unsupported = None
    early_stopping: Unsupported = None
    prompt_embeds: Unsupported = None
    repetition_detection: Unsupported = None
    # SGLang's
    session_params: Unsupported = None
    return_hidden_states: Unsupported = None
    # llama-server's
    typical_p: Unsupported = None
    tfs_z: Unsupported = None
    mirostat: Unsupported = None
    dynatemp_range: Unsupported = None
    xtc_probability: Unsupported = None
    dry_multiplier: Unsupported = None
    top_n_sigma: Unsupported = None
    # OpenAI's
    audio: Unsupported = None
    modalities: Unsupported = None
    web_search_options: Unsupported = None

    # logits processors, as vLLM, then SGLang have them
    logits_processors: list[str | NamedProcessor] | None = None
    vllm_xargs: dict[str, Any] | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None

    model: str | None = None
    lora_path: str | None = None
    """Name of a LoRA adapter, as SGLang has it; `model` may name it as well."""
    n: int | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Of a negative seed the lowest 63 bits are used."""
    deterministic: bool = False
    """The same answer each time, or 400 where this engine cannot keep that."""
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    """-1 = to the end of the context, as absent in chats."""
    n_predict: int | None = None
    """llama-server's name of the same."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    """llama-server's name of the same."""
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    best_of: int | None = None
    """Must equal n: completions are not ranked."""
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    """SGLang's name of the same."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Where the prompt loses tokens; default: left."""
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] = {}
    """How images and videos are processed (docs/media.md)."""
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    """The most tokens of a thought."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Log-probabilities call a token `token_id:5`."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    timeout: float | None = None
    keep_alive: str | float | None = None
    """How long the model's engine stays after this request, where there are several models."""
    user: str | None = None
    request_id: str | None = None

    @property
    def alternatives_field(self) -> str:
        """Returns the name of the field with the number of alternatives of each token."""
        return "top_logprobs" if "top_logprobs" in self.__struct_fields__ else "logprobs"

    @property
    def limit(self) -> int | None:
        """Returns the most tokens of a completion, or None if no limit is given."""
        given: int | None = getattr(self, self.limit_field)
        return None if given == NO_LIMIT else given

    @property
    def limit_field(self) -> str:
        """Returns the name under which the limit is given; "max_tokens" if it is not."""
        return next((name for name in LIMITS if getattr(self, name, None) is not None),
                    "max_tokens")

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True if each chunk has usage. (It says how usage comes, not whether.)"""
        return self.include_usage and self.stream_options is not None \
            and self.stream_options.continuous_usage_stats

    @property
    def resumable(self) -> bool:
        """True if events have ids."""
        return self.stream_options is not None and self.stream_options.resumable

    def truncated(self, ids: list[int], max_model_len: int, max_tokens: int | None) -> list[int]:
        """Returns the part of a prompt that `truncate_prompt_tokens` keeps, as the engine would cut
        it."""
        keep = self.truncate_prompt_tokens
        beyond = keep == -1 and (max_tokens or 1) >= max_model_len
        if keep is None or not -1 <= keep <= max_model_len or keep == 0 or beyond:
            return ids  # the engine reports the error
        size = keep if keep > 0 else max(1, max_model_len - (max_tokens or 1))
        return ids[:size] if self.cuts_right else ids[-size:]

    @property
    def cuts_right(self) -> bool:
        """True if the prompt's first tokens are kept, which the engine itself does not do."""
        return self.truncation_side == "right" and self.truncate_prompt_tokens is not None


UNSUPPORTED = unsupported_in(SamplingFields)
_NEUTRAL: dict[str, Any] = {"length_penalty": 1, "typical_p": 1, "tfs_z": 1, "top_n_sigma": -1,
                            "modalities": ["text"]}
"""Values that change nothing, beside null, false, 0 and what is empty."""
FORMAT_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex",
                 "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "grammar")


def refuse_unsupported(body: SamplingFields) -> None:
    """Raises `HttpError` 400 naming the first unsupported field whose value would change the
    answer."""
    for name in UNSUPPORTED:
        if name in type(body).__annotations__:
            continue  # a body of its own kind takes it
        value = getattr(body, name)
        # An empty object of options still asks for the feature.
        nothing = value is None or (not value and not isinstance(value, dict))
        if not nothing and value != _NEUTRAL.get(name):
            raise bad_field(name, "not supported")


def format_field(body: SamplingFields, otherwise: str = "structured") -> str:
    """Returns the name of the field that constrains the completion."""
    return next((name for name in FORMAT_FIELDS if getattr(body, name) is not None), otherwise)


def structured_of(body: SamplingFields) -> Structured | None:
    """Returns the constraint on the completion. Raises `HttpError` naming the field."""
    wanted = {name: constraint for name in FORMAT_FIELDS
              if (constraint := constraint_of(name, getattr(body, name))) is not None}
    if len(wanted) > 1:
        first, second = list(wanted)[:2]
        raise bad_field(second, f"not together with {first}")
    chosen = next(iter(wanted.values()), None)
    more = body.structured_outputs
    options = {name: True for name in SCHEMA_OPTIONS if getattr(more, name, False)}
    for name in options:
        if chosen is None or chosen.json_schema is None:
            raise bad_field(f"structured_outputs.{name}", "only with a JSON schema")
    return None if chosen is None else msgspec.structs.replace(chosen, **options)


def sampling(fields: SamplingFields, logprobs: int | None, **more: Any) -> SamplingParams:
    """Returns the engine's parameters. logprobs: alternatives of each token; more: other
    parameters.

    Raises `HttpError` on a field that only HTTP has.
    """
    refuse_unsupported(fields)
    if fields.stream_options is not None and not fields.stream:
        raise bad_field("stream_options", "only with stream=true")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        name = fields.alternatives_field
        raise bad_field(name, f"must be between 0 and {MAX_LOGPROBS}, got {logprobs}")
    if fields.cache_salt == "":
        raise bad_field("cache_salt", "must not be empty")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise bad_field("best_of", "must equal n")
    given: dict[str, Any] = {
        "max_tokens": fields.limit, "min_tokens": fields.min_tokens,
        "presence_penalty": fields.presence_penalty, "frequency_penalty": fields.frequency_penalty,
        "n": fields.n, "temperature": fields.temperature, "top_p": fields.top_p,
        "top_k": fields.top_k, "min_p": fields.min_p,
        "repetition_penalty": fields.repeat_penalty if fields.repetition_penalty is None
        else fields.repetition_penalty, "stop_token_ids": fields.stop_token_ids,
        "prompt_logprobs": fields.prompt_logprobs, "bad_words": fields.bad_words or None,
        "stop_regex": fields.stop_regex or None, "allowed_token_ids": fields.allowed_token_ids,
        "logprob_token_ids": fields.logprob_token_ids,
        "thinking_token_budget": fields.thinking_token_budget,
        "logits_processors": processor_calls(fields) or None, **more}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        seed=None if fields.seed is None else fields.seed & SEED_MASK,
        deterministic=fields.deterministic, routed_experts=fields.return_routed_experts,
        stop=fields.stop or None, logprobs=logprobs, logit_bias=_bias(fields.logit_bias),
        include_stop_str_in_output=fields.include_stop_str_in_output or fields.no_stop_trim,
        ignore_eos=fields.ignore_eos, skip_special_tokens=fields.skip_special_tokens)


def processor_calls(fields: SamplingFields) -> list[ProcessorCall]:
    """Returns the logits processors that a body names, by any of its fields. Raises `HttpError`."""
    calls: list[ProcessorCall] = []
    for named in fields.logits_processors or ():
        one = NamedProcessor(qualname=named) if isinstance(named, str) else named
        if one.args:
            raise bad_field("logits_processors", "arguments need names: use kwargs, not args")
        calls.append(named_call(one.qualname, one.kwargs, "logits_processors"))
    if fields.custom_logit_processor:
        calls.append(named_call(fields.custom_logit_processor, fields.custom_params,
                                "custom_logit_processor"))
    elif fields.custom_params:
        raise bad_field("custom_params", "goes with custom_logit_processor")
    if fields.vllm_xargs:
        calls.append(ProcessorCall("", fields.vllm_xargs))
    return calls


def named_call(name: str, args: dict[str, Any] | None, field: str) -> ProcessorCall:
    """Returns the call of a logits processor. Raises `HttpError` naming the field for what is no
    plug-in's name: SGLang's clients send serialised code, which nobody here runs."""
    if not 1 <= len(name) <= MAX_PROCESSOR_NAME or name.lstrip().startswith("{"):
        raise bad_field(field, "must be the name of a plug-in that is installed beside the engine; "
                               "code is not taken")
    return ProcessorCall(name, args or {})


def request_for(fields: SamplingFields, params: SamplingParams, tenant: str,
                **prompt: Any) -> Request:
    """Returns the request to the engine. prompt: the prompt or the messages, and their options."""
    return Request(params=params, timeout=fields.timeout, tenant=tenant, priority=fields.priority,
                   truncate_prompt_tokens=fields.truncate_prompt_tokens,
                   cache_salt=fields.cache_salt,
                   mm_processor_kwargs=fields.mm_processor_kwargs, **prompt)


def effort_args(effort: str | None) -> dict[str, Any]:
    """Returns the chat template's variables for `reasoning_effort`. Templates use `enable_thinking`
    or `thinking`."""
    if effort is None:
        return {}
    return {"enable_thinking": False, "thinking": False} if effort == "none" \
        else {"reasoning_effort": effort}


def thought_budget(fields: SamplingFields, reasoning: int | None) -> int | None:
    """Returns the most tokens of the completion's thoughts, None = no limit. reasoning: what
    `reasoning.max_tokens` says. Raises `HttpError`."""
    if reasoning is None or fields.thinking_token_budget is None:
        return fields.thinking_token_budget if reasoning is None else reasoning
    raise bad_field("reasoning.max_tokens", "not together with thinking_token_budget")


def check_turns(given: Sequence[object], field: str) -> None:
    """Raises `HttpError` 400 naming the field where a conversation is empty or too long."""
    if not given:
        raise bad_field(field, "must not be empty")
    if len(given) > MAX_TURNS:
        raise bad_field(field, f"at most {MAX_TURNS} of them, got {len(given)}")


def check_ids(ids: Sequence[int], max_model_len: int, field: str, completion: int = 1) -> None:
    """Raises `ContextOverflow` naming the field where token ids, and so many tokens of completion,
    do not fit the context."""
    if len(ids) + completion > max_model_len:
        raise context_overflow(max_model_len, len(ids), completion, field)


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_LOGIT_BIAS:
        raise bad_field("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens, got {len(given)}")
    for token in given:
        if not TOKEN.fullmatch(token):
            raise bad_field("logit_bias", f"{token[:40]!r} is no token id")
    return {int(token): value for token, value in given.items()}
