"""What a caller may ask of one request: `SamplingParams`, public, and its resolved twin.

Only `msgspec` is imported here: this module is part of the light client.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_N = 8
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_GRAMMAR = 1 << 16
"""Characters of a schema, an expression, a grammar, or of all choices together."""
MAX_CHOICES = 1024

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Structured(Struct, frozen=True, kw_only=True, omit_defaults=True,
                 forbid_unknown_fields=True):
    """What a completion must be: exactly one of these."""

    json_schema: str | None = None
    """A JSON schema, as JSON text: the completion is a JSON value that it describes."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """An expression (no look-around, no back-references) that matches all of it."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in Lark's syntax, or in GBNF (`root ::= ...`)."""

    def check(self) -> None:
        """Raise `ValueError("structured: <what is wrong>")`."""
        given = [name for name in self.__struct_fields__ if getattr(self, name)]
        if len(given) != 1:
            raise ValueError("structured: exactly one of json_schema, json_object, regex, choice "
                             f"and grammar is needed, got {' and '.join(given) or 'none'}")
        value = getattr(self, given[0])
        if isinstance(value, list):
            if len(value) > MAX_CHOICES or not all(value):
                raise ValueError(f"structured: choice: 1 to {MAX_CHOICES} texts, none of them "
                                 "empty")
            value = "".join(value)
        if isinstance(value, str) and len(value) > MAX_GRAMMAR:
            raise ValueError(f"structured: {given[0]}: {len(value)} characters exceed the limit "
                             f"of {MAX_GRAMMAR}")


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True,
                     forbid_unknown_fields=True):
    """How to sample one request. `None` means: the model's generation_config, else the default.

    Raises `ValueError`, naming the field, from `check`, which the tokenizer actor runs on every
    request (so that a hand-made message is checked as well as one made by the SDK).
    """

    n: int = 1
    """Choices to sample, 1..8. Choice i of a seeded request is sampled with a seed derived from
    (seed, i); choice 0 with the seed itself."""
    max_tokens: int | None = None
    """Tokens to emit at the most; None = to the end of the context."""
    min_tokens: int = 0
    """No end-of-sequence and no stop token before so many tokens; stop strings wait as well."""
    temperature: float | None = None
    """0 = greedy. Default: generation_config.json, else 1.0."""
    top_k: int | None = None
    """0 or -1 = all tokens."""
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Token id -> added to its logit, -100..100."""
    seed: int | None = None
    """The same seed gives the same tokens whatever runs beside it. None = a fresh one."""
    stop: list[str] | str | None = None
    """End when one of these strings appears in the text of the completion."""
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens (stop_token_ids still end the request)."""
    logprobs: int | None = None
    """None = none; k = log-probability of each sampled token and of the k likeliest, k <= 20."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    skip_special_tokens: bool = True
    structured: Structured | None = None
    """What the completion must be: a JSON value, a match of an expression, ..."""

    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self) -> None:
        """Raise `ValueError("<field>: <what is wrong>")` at the first field out of range."""
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if self.top_p is not None and self.top_p == 0:
            raise ValueError("top_p: must be above 0")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError("repetition_penalty: must be above 0")
        self._check_lists()
        if self.structured is not None:
            self._check_structured(self.structured)

    def _check_structured(self, structured: Structured) -> None:
        structured.check()
        if self.min_tokens:
            raise ValueError("min_tokens: not with structured output, whose grammar says when it "
                             "may end")

    def _check_lists(self) -> None:
        stops = self.stops()
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop: at most {MAX_STOPS} strings, got {len(stops)}")
        for stop in stops:
            if not stop or len(stop) > MAX_STOP_CHARS:
                raise ValueError(f"stop: a string must have 1 to {MAX_STOP_CHARS} characters")
        for token in self.stop_token_ids or ():
            _check_range("stop_token_ids", token, 0, MAX_TOKEN_ID)
        if len(self.stop_token_ids or ()) > MAX_STOPS:
            raise ValueError(f"stop_token_ids: at most {MAX_STOPS}")
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
        for token, value in bias.items():
            _check_range("logit_bias", token, 0, MAX_TOKEN_ID)
            _check_range("logit_bias", value, -100.0, 100.0)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_N),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: must be a number, got {type(value).__name__}")
    if math.isnan(value) or not low <= value <= high:
        raise ValueError(f"{name}: must be between {low} and {high}, got {value}")


class Resolved(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Sampling parameters with every default filled in: what scheduler and worker see."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[TokenId, float] = {}
    eos_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """Tokens that end the sequence: the model's (empty with ignore_eos) and stop_token_ids.
    Held back (masked) until min_tokens have been emitted."""
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """-1 = none, else how many alternatives beside the sampled token."""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    masked: bool = False
    """Plans bring a mask of allowed tokens for each of its rows (structured output)."""


class TextParams(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What the detokenizer needs to know of a request."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
