"""Resolves request parameters: fills in defaults and checks limits. Pure."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from msgspec import Struct

from actorium.actors.config.reasoning_formats import NONE
from actorium.actors.detokenizer.linear_regex import MAX_OF_CHOICES, compiled
from actorium.actors.errors import ContextOverflow, InvalidRequest, context_overflow
from actorium.actors.messages import ThoughtRule, TokenRules
from actorium.actors.models.pooling_shape import PoolingShape
from actorium.actors.params import (
    MAX_N,
    ProcessorCall,
    ResolvedParams,
    SamplingParams,
    TextParams,
)
from actorium.actors.runtime.splitmix64 import splitmix64


class ModelFacts(Struct, frozen=True):
    """What resolving a request needs to know about the model."""

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]
    """Sampling defaults of generation_config.json."""
    has_tokenizer: bool
    max_n: int = MAX_N
    """The most choices of a request."""
    max_new_tokens: int | None = None
    """The longest completion, whatever its request asks for."""
    reasoning: str = NONE
    """The format of the model's thoughts."""
    pooling: PoolingShape | None = None
    """How prompts are pooled; None: they are completed alone."""
    embeds_hidden: int = 0
    """Width of the rows of prompts given as embeddings; 0 = none are taken."""
    strict_max_tokens: bool = False
    """Refuse a max_tokens that does not fit the context, instead of cutting it."""


def check_params(params: SamplingParams, facts: ModelFacts) -> None:
    """Raises `InvalidRequest`, naming the field, on anything out of range for this model."""
    try:
        params.check()
    except ValueError as error:
        raise InvalidRequest(str(error), str(error).split(":")[0]) from None
    if params.n > facts.max_n:
        raise InvalidRequest(f"n: {params.n} choices; the engine allows {facts.max_n} (--max-n)",
                             "n")
    for field in _OF_TEXT:
        if getattr(params, field) and not facts.has_tokenizer:
            raise InvalidRequest(f"{field}: the engine runs without a tokenizer (skip_tokenizer)"
                                 f"{_OF_TEXT[field]}", field)
    if params.thinking_token_budget is not None and facts.reasoning == NONE:
        raise InvalidRequest("thinking_token_budget: the model does not reason, as far as its chat "
                             "template shows (--reasoning-parser names a format)",
                             "thinking_token_budget")
    for field in _OF_IDS:
        _check_ids(field, getattr(params, field) or (), facts.vocab_size)
    _check_expressions(params)
    ends = {*facts.eos_ids, *(params.stop_token_ids or ())}
    if params.allowed_token_ids and params.min_tokens and ends.issuperset(params.allowed_token_ids):
        raise InvalidRequest("allowed_token_ids: nothing but end tokens, which min_tokens="
                             f"{params.min_tokens} holds back", "allowed_token_ids")


def _check_expressions(params: SamplingParams) -> None:
    wanted = tuple(params.stop_expressions())
    if not wanted:
        return
    try:
        states = len(compiled(wanted, tuple(params.stops())).steps)
    except ValueError as error:
        raise InvalidRequest(f"stop_regex: {error}", "stop_regex") from None
    if states * params.n > MAX_OF_CHOICES:
        raise InvalidRequest(f"stop_regex: {states} characters with repeats counted out, for each "
                             f"of n={params.n} choices, exceed the limit of {MAX_OF_CHOICES}",
                             "stop_regex")


_OF_TEXT = {"stop": "; use stop_token_ids", "stop_regex": "", "bad_words": ""}
_OF_IDS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def _check_ids(field: str, ids: Any, vocab_size: int) -> None:
    token = max(ids, default=0)
    if token >= vocab_size:
        raise InvalidRequest(f"{field}: token id {token} is outside the vocabulary "
                             f"of {vocab_size}", field)


def check_prompt(ids: Any, facts: ModelFacts, field: str, room: int = 1) -> None:
    """Raises `InvalidRequest` or `ContextOverflow` unless there are ids, each in the vocabulary,
    and max_model_len leaves `room` tokens beside them. `ids` supports len, min, max."""
    if not len(ids):
        raise InvalidRequest("prompt: must not be empty", field)
    if len(ids) + room > facts.max_model_len:
        raise context_overflow(facts.max_model_len, len(ids), room, field)
    low, high = min(ids), max(ids)
    if low < 0 or high >= facts.vocab_size:
        raise InvalidRequest(f"prompt: token id {low if low < 0 else high} is outside the "
                             f"vocabulary of {facts.vocab_size}", field)


def resolve(params: SamplingParams, facts: ModelFacts, prompt_tokens: int,
            processors: tuple[ProcessorCall, ...] = ()) -> ResolvedParams:
    """Fills in every default: the request's value, else generation_config.json's, else none.
    processors: the request's, checked.

    max_tokens None = generation_config.json's max_new_tokens, else the rest of the context. More
    than that is cut to it, or raises `ContextOverflow` (`strict_max_tokens`).
    """
    room = facts.max_model_len - prompt_tokens
    max_tokens = _max_tokens(params, facts, room)
    if max_tokens > room and facts.strict_max_tokens:
        raise context_overflow(facts.max_model_len, prompt_tokens, max_tokens, "max_tokens")
    max_tokens = min(max_tokens, room)
    if params.min_tokens > max_tokens:
        if max_tokens < room:
            raise InvalidRequest(f"min_tokens: {params.min_tokens} exceeds the {max_tokens} tokens "
                                 "that the engine gives (max_new_tokens)", "min_tokens")
        raise ContextOverflow(f"min_tokens: {params.min_tokens} exceeds the {max_tokens} tokens "
                              "left of the context", "min_tokens")
    # A complete grammar allows the end token only.
    eos = () if params.ignore_eos and params.structured is None else facts.eos_ids
    return ResolvedParams(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=float(_pick(params, facts, "temperature", 1.0)),
        top_k=max(0, int(_pick(params, facts, "top_k", 0))),
        top_p=float(_pick(params, facts, "top_p", 1.0)),
        min_p=float(_pick(params, facts, "min_p", 0.0)),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(_pick(params, facts, "repetition_penalty", 1.0)),
        logit_bias=params.logit_bias or {},
        eos_ids=tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ())))),
        logprobs=_logprobs(params),
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        logprob_ids=tuple(dict.fromkeys(params.logprob_token_ids or ())),
        routed_experts=params.routed_experts,
        hidden_states=tuple(params.hidden_states),
        masked=bool(params.structured or params.allowed_token_ids or params.bad_words
                    or params.thought_limit(max_tokens) is not None),
        processors=processors,
    )


def _max_tokens(params: SamplingParams, facts: ModelFacts, room: int) -> int:
    """room: tokens left of the context."""
    most = facts.max_new_tokens or 2**31 - 1
    if params.max_tokens is not None:
        return min(params.max_tokens, most)
    return min(room, facts.generation.get("max_tokens", room), most)


def _logprobs(params: SamplingParams) -> int:
    if params.logprobs is None:
        return -1 if params.logprob_token_ids is None else 0
    return params.logprobs


def _pick(params: SamplingParams, facts: ModelFacts, name: str, builtin: float) -> float:
    value = getattr(params, name)
    return facts.generation.get(name, builtin) if value is None else value


def text_params(params: SamplingParams) -> TextParams:
    """Returns the detokenizer's share of the parameters."""
    return TextParams(stop=tuple(params.stops()), include_stop=params.include_stop_str_in_output,
                      skip_special_tokens=params.skip_special_tokens,
                      min_tokens=params.min_tokens,
                      stop_regex=tuple(params.stop_expressions()))


class Seeds:
    """Generates seeds for requests that name none: SplitMix64 over a counter.

    The start is `entropy` (63 random bits of the process) for model seed 0, else the model seed
    itself: then a restarted engine gives out the same seeds in the same order of arrival.
    """

    def __init__(self, model_seed: int, entropy: int) -> None:
        self._start = splitmix64(model_seed if model_seed else entropy)
        self._count = 0

    def next(self) -> int:
        """Returns 63 bits."""
        self._count += 1
        return splitmix64(self._start, self._count + 1) >> 1


class TextEncoder(Protocol):
    """The part of `text_model.TextModel` that token rules need."""

    facts: ModelFacts

    def encode_all(self, texts: list[str], field: str) -> list[list[int]]: ...


def token_rules(params: SamplingParams, model: TextEncoder, thought: ThoughtRule | None = None
                ) -> TokenRules | None:
    """Returns the token rules of a checked request; None where it has none. thought: the limit on
    its thoughts.

    A bad word counts both at the start of a text and after a space: most tokenizers have different
    tokens for the two. (vLLM drops the second one where it has another number of tokens.)
    """
    if not (params.allowed_token_ids or params.bad_words or thought):
        return None
    words = [word.lstrip(" ") or word for word in params.bad_words or ()]
    found = model.encode_all([*words, *(f" {word}" for word in words)], "bad_words")
    sequences = dict.fromkeys(array("i", ids).tobytes() for ids in found if ids)
    return TokenRules(model.facts.vocab_size, array("i", params.allowed_token_ids or ()).tobytes(),
                      list(sequences), thought)
