"""Parameters of one request, in three shapes:

- `SamplingParams`, on the wire: what every API and the SDK make of a request. It is checked where
  it is made, and once more by the tokenizer, against the model.
- resolved, with every default filled in by the tokenizer (`tokenizer/defaults.py`): one part for
  each reader in `messages.Submit`. `ResolvedParams` goes on to the worker, `TextParams` to the
  detokenizer; `TokenRules` and the grammar stay with the scheduler, which makes masks of them.
- a row of the worker's resident tables (`gpu/step/tables.py`).

A request for a vector or for scores has `PoolingParams` beside them, which the tokenizer resolves
to `ResolvedPooling`.

Only `msgspec` is imported here: this module is part of the light client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from actorium.actors.errors import InvalidRequest

MAX_N = 1024
"""Maximum of choices of a request in any engine; an engine's own is its scheduler's `max_n`."""
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_ALLOWED_IDS = 1 << 18
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1 << 14
"""Characters of all bad words together."""
MAX_STOP_REGEX_CHARS = 1024
MAX_LOGPROB_IDS = 128
MAX_GRAMMAR = 1 << 16
"""Characters of a schema, an expression, a grammar, or of all choices together."""
MAX_CHOICES = 1024
MAX_DIMENSIONS = 1 << 20
MAX_HIDDEN_LAYERS = 1024
"""Layers whose hidden states a request may ask for, and the highest number of one."""
HiddenLayers: TypeAlias = Annotated[
    tuple[Annotated[int, Meta(ge=-MAX_HIDDEN_LAYERS, le=MAX_HIDDEN_LAYERS)], ...],
    Meta(max_length=MAX_HIDDEN_LAYERS)]
MAX_PROCESSORS = 8
"""Logits processors of one request."""
MAX_PROCESSOR_NAME = 256
MAX_PROCESSOR_BYTES = 1 << 16
"""Of the arguments of all logits processors of a request, as messages."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Structured(Struct, frozen=True, kw_only=True, omit_defaults=True,
                 forbid_unknown_fields=True):
    """The form that a completion must have: exactly one of these."""

    json_schema: str | None = None
    """A JSON schema, as JSON text: the completion is a JSON value that it describes."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """An expression (no look-around, no back-references) that matches the whole completion."""
    choice: list[str] | None = None
    """The completion is one of these texts."""
    grammar: str | None = None
    """A grammar in Lark's syntax, or in GBNF (`root ::= ...`)."""
    structural_tag: str | None = None
    """JSON text: tagged parts that follow a schema, amid free text. Either
    `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` or
    `{"type": "structural_tag", "format": {"type": ...}}`."""
    additional_properties: bool = False
    """Of json_schema: objects whose schema names `properties` and does not say
    `additionalProperties` may have others too, as the standard has it. By default they may not."""

    lenient: bool = False
    """Of json_schema: keywords that cannot be enforced are passed over. By default they are
    refused."""

    def check(self) -> None:
        """Raises `ValueError("structured: <what is wrong>")`."""
        given = [name for name in STRUCTURED_KINDS if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"structured: exactly one of {', '.join(STRUCTURED_KINDS)} is needed, "
                             f"got {' and '.join(given) or 'none'}")
        for name in ("additional_properties", "lenient"):
            if getattr(self, name) and self.json_schema is None:
                raise ValueError(f"structured: {name} is for json_schema alone")
        value = getattr(self, given[0])
        if isinstance(value, list):
            if len(value) > MAX_CHOICES or not all(value):
                raise ValueError(f"structured: choice: 1 to {MAX_CHOICES} texts, none of them "
                                 "empty")
            value = "".join(value)
        if isinstance(value, str) and len(value) > MAX_GRAMMAR:
            raise ValueError(f"structured: {given[0]}: {len(value)} characters exceed the limit "
                             f"of {MAX_GRAMMAR}")


STRUCTURED_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")


WRITTEN = " "
"""Stands before a grammar in a language that callers write: such a one may be ambiguous, and a mask
then takes time by the square of what it is bounded by (`grammar.ROWS`). Twice where it is for more
than `FEW` choices, whose masks are made at once."""
FEW = 4
MAX_WRITTEN_N = 16
"""Choices of a request with such a grammar: their masks are some 8 ms each, at the worst."""
TOO_MANY_WRITTEN = f"n: at most {MAX_WRITTEN_N} choices with a grammar, got {{}}"


def for_choices(grammar: str, n: int) -> str:
    """Returns a grammar for a request of n choices. Raises `InvalidRequest`: a structural tag may
    hold a grammar that the caller wrote, too."""
    if n > MAX_WRITTEN_N and grammar.startswith(WRITTEN):
        raise InvalidRequest(TOO_MANY_WRITTEN.format(n), "n")
    return WRITTEN + grammar if n > FEW and grammar.startswith(WRITTEN) else grammar


class ProcessorCall(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A logits processor that a request names."""

    name: Annotated[str, Meta(max_length=MAX_PROCESSOR_NAME)]
    """The plug-in's; empty = every processor that has one of these arguments."""
    args: dict[str, Any] = {}
    """Its arguments, of JSON values."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True,
                     forbid_unknown_fields=True):
    """How to sample one request. `None` means: the model's generation_config, else the default.

    `check` raises `ValueError`, naming the field. The tokenizer actor calls it for every request,
    so that a hand-made message is checked as well as one made by the SDK.
    """

    n: int = 1
    """Choices to sample, 1 to the engine's `max_n`. Choice i of a seeded request is sampled with a
    seed derived from (seed, i); choice 0 with the seed itself."""
    max_tokens: int | None = None
    """Maximum of tokens to emit; None = to the end of the context."""
    min_tokens: int = 0
    """No end-of-sequence, stop token or stop string takes effect before so many tokens."""
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
    """The same seed gives the same tokens whatever else is in the batch. None = a random one."""
    deterministic: bool = False
    """The same request gets the same tokens and log-probabilities each time, under any load and
    through any recovery; without a seed, seed 0 is used. An engine that is not exact refuses it."""
    stop: list[str] | str | None = None
    """End when one of these strings appears in the text of the completion."""
    stop_regex: list[str] | str | None = None
    """End at the first character with which one of these expressions matches text of the
    completion. Python's syntax without look-around, back-references, `$` and `\\b`; a match of
    more than 1,024 characters may not be seen."""
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    """Only these tokens may be sampled; the end-of-sequence token, too, must be named."""
    bad_words: list[str] | None = None
    """Texts that must not be generated: their tokens, as at the start of a text and after a space,
    never follow on each other in the completion."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens (stop_token_ids still end the request)."""
    logprobs: int | None = None
    """None = none; k = log-probability of each sampled token and of the k likeliest, k <= 20."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    logprob_token_ids: list[int] | None = None
    """Log-probabilities of exactly these tokens at each position, beside that of the sampled one
    and instead of the likeliest."""
    skip_special_tokens: bool = True
    structured: Structured | None = None
    """What the completion must be: a JSON value, a match of an expression, ..."""
    routed_experts: bool = False
    """Which experts each layer of a mixture of experts chose for each token of the prompt and the
    completion (docs/rollouts.md). Nothing of the prompt then comes from the prefix cache."""
    hidden_states: tuple[int, ...] = ()
    """Layers, numbered as `PoolingParams.layers`, of which the hidden states of every token of
    prompt and completion are wanted (docs/pooling.md). They are computed once it has ended."""
    thinking_token_budget: int | None = None
    """The most tokens of the completion's thoughts: behind these the text that ends a thought is
    written, and the model goes on with its answer. None = no limit, as is max_tokens or more."""
    logits_processors: list[ProcessorCall] | None = None
    """Plug-ins that change the logits before anything else does, in this order."""

    def stops(self) -> list[str]:
        """Returns the stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def stop_expressions(self) -> list[str]:
        """Returns the expressions of `stop_regex` as a list."""
        if self.stop_regex is None:
            return []
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex

    def check(self) -> None:
        """Raises `ValueError("<field>: <what is wrong>")` at the first field out of range."""
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if self.top_p is not None and self.top_p == 0:
            raise ValueError("top_p: must be above 0")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError("repetition_penalty: must be above 0")
        _check_layers("hidden_states", self.hidden_states)
        self._check_lists()
        self._check_tokens()
        if self.structured is not None:
            self._check_structured(self.structured)

    def thought_limit(self, max_tokens: int) -> int | None:
        """Returns the most tokens of the thoughts of a completion of at most `max_tokens`; None
        where that limits nothing."""
        budget = self.thinking_token_budget
        return None if budget is None or budget >= max_tokens else budget

    def _check_structured(self, structured: Structured) -> None:
        structured.check()
        if structured.grammar is not None and self.n > MAX_WRITTEN_N:
            raise ValueError(TOO_MANY_WRITTEN.format(self.n))
        if self.min_tokens:
            raise ValueError("min_tokens: not with structured output, whose grammar says when it "
                             "may end")

    def _check_lists(self) -> None:
        _check_texts("stop", self.stops(), MAX_STOPS, MAX_STOP_CHARS)
        _check_texts("stop_regex", self.stop_expressions(), MAX_STOPS, MAX_STOP_REGEX_CHARS)
        _check_texts("bad_words", self.bad_words or (), MAX_BAD_WORDS, MAX_STOP_CHARS)
        if (chars := sum(map(len, self.bad_words or ()))) > MAX_BAD_WORD_CHARS:
            raise ValueError(f"bad_words: at most {MAX_BAD_WORD_CHARS} characters in all, got "
                             f"{chars}")
        if len(self.stop_token_ids or ()) > MAX_STOPS:
            raise ValueError(f"stop_token_ids: at most {MAX_STOPS}")
        for token in self.stop_token_ids or ():
            _check_range("stop_token_ids", token, 0, MAX_TOKEN_ID)
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
        for token, value in bias.items():
            _check_range("logit_bias", token, 0, MAX_TOKEN_ID)
            _check_range("logit_bias", value, -100.0, 100.0)

    def _check_tokens(self) -> None:
        _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
        _check_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_IDS)
        if self.logits_processors:
            _check_processors(self.logits_processors)
        if self.logprob_token_ids is not None and self.logprobs:
            raise ValueError("logprob_token_ids: these tokens are shown instead of the likeliest: "
                             f"not with logprobs={self.logprobs}")


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "hidden_states"]


class PoolingParams(Struct, frozen=True, kw_only=True, omit_defaults=True,
                    forbid_unknown_fields=True):
    """What a request wants of its prompt in place of a completion."""

    task: PoolingTask
    """embed: one vector; classify: one row of scores, of a text or (by cross-encoders) of a pair of
    texts; token_embed, token_classify: the same of every token; hidden_states: what goes from layer
    to layer, of every token, where `enable_return_hidden_states` allows it."""
    dimensions: int | None = None
    """Of embed: keep so many leading numbers of the vector, of models that were trained for it
    (Matryoshka, arXiv 2205.13147); None = all."""
    use_activation: bool | None = None
    """Vectors get the length 1, scores go through softmax or sigmoid; None = as the model says."""
    layers: tuple[int, ...] = ()
    """Of hidden_states, as transformers numbers its `hidden_states`: 0 = what goes into the first
    layer, i = what the i-th layer gives, the number of layers = the last rows behind the final
    norm; from the end, -1 is those. Empty = (-1,)."""
    instruction: str = ""
    """Of embed: how the prompt's text begins that says what the vector is for. Models that leave it
    out of the mean of the rows (`include_prompt: false`) need it; others pool all of a prompt."""

    def check(self) -> None:
        """Raises `ValueError("<field>: <what is wrong>")`."""
        _check_range("dimensions", self.dimensions, 1, MAX_DIMENSIONS)
        if self.instruction and self.task != "embed":
            raise ValueError(f"instruction: for embed alone, the task is {self.task}")
        if self.dimensions is not None and self.task != "embed":
            raise ValueError(f"dimensions: for embed alone, the task is {self.task}")
        if self.layers and self.task != "hidden_states":
            raise ValueError(f"layers: for hidden_states alone, the task is {self.task}")
        if self.use_activation is not None and self.task == "hidden_states":
            raise ValueError("use_activation: not of hidden_states")
        _check_layers("layers", self.layers)


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
    ("thinking_token_budget", 0, 2**31 - 1),
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


def _check_layers(name: str, layers: Sequence[int]) -> None:
    if len(layers) > MAX_HIDDEN_LAYERS:
        raise ValueError(f"{name}: at most {MAX_HIDDEN_LAYERS}, got {len(layers)}")
    for layer in layers:
        _check_range(name, layer, -MAX_HIDDEN_LAYERS, MAX_HIDDEN_LAYERS)


def _check_processors(calls: list[ProcessorCall]) -> None:
    if len(calls) > MAX_PROCESSORS:
        raise ValueError(f"logits_processors: at most {MAX_PROCESSORS}, got {len(calls)}")
    size = len(msgspec.msgpack.encode(calls))
    if size > MAX_PROCESSOR_BYTES:
        raise ValueError(f"logits_processors: {size} bytes of arguments exceed the limit of "
                         f"{MAX_PROCESSOR_BYTES}")


def _check_ids(name: str, ids: list[int] | None, limit: int) -> None:
    if ids is None:
        return
    if not 1 <= len(ids) <= limit:
        raise ValueError(f"{name}: 1 to {limit} token ids, got {len(ids)}")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return  # there may be a quarter of a million of them
    for token in ids:
        _check_range(name, token, 0, MAX_TOKEN_ID)


def _check_texts(name: str, texts: Sequence[str], limit: int, chars: int) -> None:
    if len(texts) > limit:
        raise ValueError(f"{name}: at most {limit} strings, got {len(texts)}")
    for text in texts:
        if not text or len(text) > chars:
            raise ValueError(f"{name}: a string must have 1 to {chars} characters")


class ResolvedParams(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The sampling parameters with every default filled in, as the worker takes them."""

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
    Masked until min_tokens have been emitted."""
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """-1 = none, else how many alternatives beside the sampled token."""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    masked: bool = False
    """Plans may carry a mask of allowed tokens for each of its rows (structured output, allowed
    tokens, bad words, budgets of thoughts)."""
    logprob_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROB_IDS)] = ()
    """Tokens whose logprobs are reported instead of those of the likeliest ones."""
    processors: Annotated[tuple[ProcessorCall, ...], Meta(max_length=MAX_PROCESSORS)] = ()
    """Logits processors, in the order in which they are applied."""
    routed_experts: bool = False
    hidden_states: HiddenLayers = ()
    """For the check alone that they will fit into a message: the client asks for them at the end.
    """


class ResolvedPooling(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The pooling parameters with the model's defaults filled in."""

    task: PoolingTask
    every_row: bool = False
    """The result depends on what the model gives for every token of the prompt, so that none may
    come from the prefix cache; else on the last token alone."""
    dimensions: Annotated[int, Meta(ge=0, le=MAX_DIMENSIONS)] = 0
    """0 = all."""
    activation: bool = True
    """As `PoolingParams.use_activation`."""
    pair_start: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Index of the first token that belongs to the second text, for models that tell the two texts
    apart; 0 = there is none."""
    layers: HiddenLayers = ()
    """See `PoolingParams.layers`; none but of hidden_states."""
    skipped: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens of the instruction that a prompt begins with, whose rows the mean leaves out."""


class TextParams(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The parameters that the detokenizer needs."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    stop_regex: tuple[str, ...] = ()
