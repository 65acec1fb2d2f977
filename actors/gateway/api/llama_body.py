"""The bodies of llama-server's `/completion` and `/infill`, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from actorium.actors.gateway.api.fill_in_middle import ExtraFile
from actorium.actors.gateway.api.response_formats import Schema, constraint_of
from actorium.actors.gateway.api.sampling_fields import (
    MAX_PROMPTS,
    StreamOptions,
    Unsupported,
    unsupported_in,
)
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    SamplingParams,
    Structured,
)

RANDOM_SEEDS = (-1, 2**32 - 1)
"""llama.cpp's values for a random seed."""
LAST_N = 64
"""llama.cpp's default of `repeat_last_n`, which clients send with any penalty."""
NEVER = -100.0
"""OpenAI's bias of a token that is not to be generated."""
ENGINE_FIELDS = {
    "n": "n_cmpl", "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs", "stop_regex": "n_indent", "token_ids": "prompt", "tokens": "prompt"}
"""The engine's fields that have other names here."""
INACTIVE: dict[str, tuple[float, float, float]] = {
    "typical_p": (1.0, 1e9, 1), "top_n_sigma": (-1e9, 0.0, -1), "xtc_probability": (0, 0, 0),
    "dry_multiplier": (0, 0, 0), "dynatemp_range": (0, 0, 0), "mirostat": (0, 0, 0),
    "adaptive_target": (-1e9, -1e-9, -1), "min_keep": (0, 1, 0)}
"""Of samplers that this engine does not have: the range of values that switch them off, and the
usual one."""
SAMPLER_NAMES = {
    "penalties": "penalties", "dry": "dry", "top_n_sigma": "top_n_sigma", "top_k": "top_k",
    "typ_p": "typ_p", "typical_p": "typ_p", "typical": "typ_p", "top_p": "top_p",
    "nucleus": "top_p", "min_p": "min_p", "xtc": "xtc", "temperature": "temperature",
    "temp": "temperature", "infill": "infill", "adaptive_p": "adaptive_p"}
SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p"}
"""How llama.cpp writes samplers in a list, and as one string."""
INFILL = "infill"
"""The sampler that this engine does not have and passes over, because editors always ask for it."""
ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""The samplers of this engine, in the order in which it applies them."""
INTERCHANGEABLE = ({"temperature", "top_k"}, {"top_k", "min_p"})
"""Pairs of samplers whose order makes no difference."""


class PromptObject(Struct, kw_only=True):
    """A prompt that may have images."""

    prompt_string: str
    multimodal_data: list[str] = []


Prompt = str | list[int | str] | PromptObject


class LlamaCompletionBody(Struct, kw_only=True):
    """llama-server's `/completion`. None = the model's own default."""

    typical_p: Unsupported = None
    top_n_sigma: Unsupported = None
    xtc_probability: Unsupported = None
    dry_multiplier: Unsupported = None
    dynatemp_range: Unsupported = None
    mirostat: Unsupported = None
    adaptive_target: Unsupported = None
    min_keep: Unsupported = None
    post_sampling_probs: Unsupported = None
    return_progress: Unsupported = None
    lora: Unsupported = None
    grammar_lazy: Unsupported = None
    grammar_triggers: Unsupported = None
    preserved_tokens: Unsupported = None

    prompt: str | PromptObject | list[int | str | PromptObject | list[int | str]]
    """A text, token ids, both mixed, or a list of prompts."""
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n_predict: Annotated[int, Meta(ge=-1)] | None = None
    """The most tokens; -1, the default = to the end of the context; 0 = the prompt alone."""
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Other names of the same."""
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    """Completions of each prompt."""
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    """Another name of the same."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    """The tokens that penalties look at: -1, or as many as the context has, or 0 for none. 64 is
    taken as -1."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    samplers: str | list[str] | None = None
    """The samplers that apply, in their order. Others are off."""
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    """Token id or text -> what is added to the logit of its tokens; false = never."""
    grammar: str | None = None
    json_schema: Schema | None = None
    n_probs: int | None = None
    """Log-probabilities of each token and of so many likeliest ones."""
    logprobs: int | None = None
    """Another name of the same."""
    n_indent: Annotated[int, Meta(ge=0, le=MAX_STOP_CHARS)] = 0
    """Ends before a line, from the second on, that begins with fewer spaces and tabs."""
    t_max_predict_ms: int = 0
    """Milliseconds after the first token from which the next line ends the completion; 0 = none."""
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] = []
    """The answer's fields that are shown; `timings/prompt_n` is one within another."""
    cache_prompt: bool = True
    """False = no cached prefix is used."""

    def check(self) -> None:
        """Raises `HttpError` for what this engine does not do."""
        for name in unsupported_in(LlamaCompletionBody):
            value = getattr(self, name)
            if name in INACTIVE:
                low, high, usual = INACTIVE[name]
                if value is not None and not (isinstance(value, int | float)
                                              and low <= value <= high):
                    raise bad_field(name, "this engine does not have that sampler: leave it out, "
                                    f"or use {usual}, which switches it off")
            elif value:
                raise bad_field(name, "not supported")
        if self.grammar and self.json_schema is not None:
            raise bad_field("grammar", "not together with json_schema")
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "only with stream=true")
        if len(self.logit_bias or ()) > MAX_LOGIT_BIAS:
            raise bad_field("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        if not 0 <= self.probabilities <= MAX_LOGPROBS:
            raise bad_field("n_probs", f"must be between 0 and {MAX_LOGPROBS}, got "
                            f"{self.probabilities}")

    def prompts(self) -> list[Prompt]:
        """Returns the prompts. Raises `HttpError`."""
        given: Any = self.prompt
        mixed = isinstance(given, list) and any(isinstance(one, int) for one in given)
        prompts: list[Any] = [given] if mixed or not isinstance(given, list) else given
        if len(prompts) > MAX_PROMPTS:
            raise bad_field("prompt", f"at most {MAX_PROMPTS} of them, got {len(prompts)}")
        if not prompts:
            raise bad_field("prompt", "must not be empty")
        for prompt in prompts:
            parts = prompt if isinstance(prompt, list) else [prompt]
            if any(isinstance(part, list | PromptObject) for part in parts) \
                    and isinstance(prompt, list):
                raise bad_field("prompt", "a list of prompts within a list of prompts")
            if sum(isinstance(part, str) for part in parts) > MAX_PROMPTS:
                raise bad_field("prompt", f"at most {MAX_PROMPTS} texts among token ids")
            if isinstance(prompt, PromptObject) and prompt.multimodal_data:
                raise bad_field("prompt.multimodal_data", "images come with messages here "
                                "(/v1/chat/completions)")
        return prompts

    @property
    def limit(self) -> int | None:
        """Returns the most tokens of a completion; None = to the end of the context."""
        given = (self.n_predict, self.max_completion_tokens, self.max_tokens)
        most = next((one for one in given if one is not None), -1)
        return None if most < 0 else most

    @property
    def completions(self) -> int:
        """Returns the number of completions of each prompt."""
        return self.n_cmpl or self.n or 1

    @property
    def probabilities(self) -> int:
        """Returns how many of the likeliest tokens are shown at each place."""
        return (self.logprobs if self.n_probs is None else self.n_probs) or 0

    @property
    def resumable(self) -> bool:
        """True if events have ids."""
        return self.stream_options is not None and self.stream_options.resumable

    @property
    def indent_stop(self) -> str | None:
        """Returns the expression of a line that has too little indentation."""
        return rf"\n[ \t]{{0,{self.n_indent - 1}}}[^ \t]" if self.n_indent else None

    def stops(self) -> list[str]:
        """Returns the stop strings."""
        return [one for one in ([self.stop] if isinstance(self.stop, str) else self.stop or [])
                if one]

    def structured(self) -> Structured | None:
        """Returns the constraint on the completion."""
        return constraint_of("grammar", self.grammar) \
            or constraint_of("json_schema", self.json_schema)

    def sampling(self, defaults: dict[str, Any], context: int) -> dict[str, Any]:
        """Returns the SDK's parameters for sampling: all that the request or `samplers` set.
        defaults: the model's; context: tokens. Raises `HttpError`."""
        given: dict[str, Any] = {
            "temperature": None if self.temperature is None else max(0.0, self.temperature),
            "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty}
        wanted = {name: value for name, value in given.items() if value is not None}
        wanted["presence_penalty"] = self.presence_penalty
        wanted["frequency_penalty"] = self.frequency_penalty
        if self.samplers is not None:
            listed = sampler_names(self.samplers)
            for name, neutral in _OFF.items():
                if ("penalties" if name in _PENALTIES else name) not in listed:
                    wanted[name] = neutral
            _check_order(listed, active_samplers(defaults | wanted), defaults | wanted)
        if self.repeat_last_n is not None and "penalties" in active_samplers(defaults | wanted):
            if self.repeat_last_n == 0:
                wanted |= {name: _OFF[name] for name in _PENALTIES}
            elif 0 < self.repeat_last_n < context and self.repeat_last_n != LAST_N:
                raise bad_field("repeat_last_n", "penalties look at all tokens here: leave it "
                                f"out, or use -1; got {self.repeat_last_n}")
        return wanted

    def passed_over(self, active: Sequence[str]) -> list[str]:
        """Returns what clients ask for by default, is accepted and does not happen. active: the
        samplers that do something."""
        listed = () if self.samplers is None else sampler_names(self.samplers)
        names = [f"samplers.{INFILL}"] if INFILL in listed else []
        if self.repeat_last_n == LAST_N and "penalties" in active:
            names.append("repeat_last_n")
        return names


class InfillBody(LlamaCompletionBody, kw_only=True):
    """llama-server's `/infill`: the text between a prefix and a suffix."""

    prompt: str | PromptObject | list[int | str | PromptObject | list[int | str]] = ""
    """How the text begins."""
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_PROMPTS)] = []
    """Other files of the repository, which come before the prefix."""


_OFF: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                          "repetition_penalty": 1.0, "presence_penalty": 0.0,
                          "frequency_penalty": 0.0}
"""The values with which a sampler does nothing."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def sampler_names(given: str | list[str]) -> list[str]:
    """Returns the names of `samplers`. Raises `HttpError` 400."""
    known = SAMPLER_LETTERS if isinstance(given, str) else SAMPLER_NAMES
    for name in given:
        if name not in known:
            raise bad_field("samplers", f"{name[:40]!r} is not known; known are "
                            f"{', '.join(known)}")
    return [known[name] for name in given]


def active_samplers(params: Mapping[str, Any]) -> list[str]:
    """Returns which samplers do something with these of the SDK's parameters, in this engine's
    order."""
    active = {name for name, neutral in _OFF.items() if params.get(name, neutral) != neutral}
    if params.get("top_k", 0) <= 0:
        active.discard("top_k")
    return [name for name in ORDER if name in active
            or (name == "penalties" and not active.isdisjoint(_PENALTIES))]


def _check_order(listed: Sequence[str], active: Sequence[str], params: Mapping[str, Any]) -> None:
    """Raises `HttpError` if samplers would give another answer in the order that is listed."""
    wanted = [name for name in listed if name in active]
    if len(set(wanted)) < len(wanted):
        raise bad_field("samplers", "each may be listed once")
    if params.get("temperature") == 0:  # the likeliest stays the likeliest
        wanted = [name for name in wanted if name in ("penalties", "top_k")]
    for i, first in enumerate(wanted):
        for second in wanted[i + 1:]:
            if ORDER.index(second) < ORDER.index(first) and {first, second} not in INTERCHANGEABLE:
                raise bad_field("samplers", f"{second} comes before {first} here, which gives "
                                "another answer: list them in that order, or leave samplers out")


def generation_settings(body: LlamaCompletionBody, params: SamplingParams,
                        defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `generation_settings` of an answer: the values that apply. defaults: the model's."""
    applied = {name: getattr(params, name) for name in _OFF}
    applied = {name: defaults.get(name, _OFF[name]) if value is None else value
               for name, value in applied.items()}
    most = -1 if params.max_tokens is None else body.limit
    return {
        "seed": RANDOM_SEEDS[1] if params.seed is None else params.seed,
        "temperature": applied["temperature"], "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
        "top_k": applied["top_k"], "top_p": applied["top_p"], "min_p": applied["min_p"],
        "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "typical_p": 1.0,
        "repeat_last_n": -1, "repeat_penalty": applied["repetition_penalty"],
        "presence_penalty": applied["presence_penalty"],
        "frequency_penalty": applied["frequency_penalty"], "dry_multiplier": 0.0, "mirostat": 0,
        "stop": body.stops(), "max_tokens": most, "n_predict": most, "n_keep": 0,
        "ignore_eos": body.ignore_eos, "stream": body.stream,
        "logit_bias": [{"token": token, "bias": bias}
                       for token, bias in (params.logit_bias or {}).items()],
        "n_probs": body.probabilities, "min_keep": 0, "grammar": body.grammar or "",
        "samplers": active_samplers(applied), "timings_per_token": body.timings_per_token,
        "post_sampling_probs": False, "lora": []}
