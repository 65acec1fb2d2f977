"""The body of `/generate`, with SGLang's names: prompts, and for each its sampling parameters and
which log-probabilities to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from actorium.actors.gateway.api.sampling_fields import (
    MAX_PROMPTS,
    Unsupported,
    check_ids,
    named_call,
    unsupported_in,
)
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.params import MAX_LOGPROBS, MAX_N, SamplingParams, Structured

DEFAULT_NEW_TOKENS = 128
"""SGLang's default limit."""
SAME = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
        "no_stop_trim": "include_stop_str_in_output"}
"""SGLang's names of the SDK's parameters."""
FORMATS = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar",
           "structural_tag": "structural_tag"}
"""SGLang's names of what a completion must be, and those of `Structured`."""
HIDDEN_FIELD = "return_hidden_states"
NO_LIMIT = 1 << 30
"""SGLang's own way of saying that top_k is off."""


class SglangSampling(SamplingParams, frozen=True, kw_only=True, omit_defaults=True,
                     forbid_unknown_fields=True):
    """SGLang's sampling parameters; the SDK's names are accepted as well."""

    max_new_tokens: int | None | UnsetType = UNSET
    """Default 128, or what the context has room for; 0 = the prompt alone is computed."""
    min_new_tokens: int | UnsetType = UNSET
    sampling_seed: int | None | UnsetType = UNSET
    no_stop_trim: bool | UnsetType = UNSET
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    spaces_between_special_tokens: bool = True
    """No difference: the tokenizers here put no spaces between them."""
    stream_interval: int | None = None
    """No difference: a stream sends what there is."""
    custom_params: dict[str, Any] | None = None

    def resolved(self, processor: str | None = None) -> SamplingParams:
        """Returns them by the SDK's names; max_tokens is None where no limit is given. processor:
        the name of the prompt's logits processor. Raises `HttpError`."""
        if self.custom_params and not processor:
            raise _bad("custom_params", "goes with custom_logit_processor")
        if self.hidden_states:
            raise _bad("hidden_states", f"by the name of {HIDDEN_FIELD}")
        given = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        for theirs, ours in SAME.items():
            value = getattr(self, theirs)
            if value is UNSET:
                continue
            if given[ours] != getattr(SamplingParams(), ours) and given[ours] != value:
                raise _bad(theirs, f"not together with {ours}")
            given[ours] = value
        if (self.top_k or 0) >= NO_LIMIT:
            given["top_k"] = -1
        if processor:
            given["logits_processors"] = [
                *(self.logits_processors or ()),
                named_call(processor, self.custom_params, "custom_logit_processor")]
        given["structured"] = self._structured()
        return SamplingParams(**given)

    @property
    def unlimited(self) -> bool:
        """True if the limit is given by neither name."""
        return self.max_new_tokens is UNSET and self.max_tokens is None

    def _structured(self) -> Structured | None:
        wanted = {name: value for name in FORMATS if (value := getattr(self, name)) is not None}
        if len(wanted) + (self.structured is not None) > 1:
            raise _bad(next(iter(wanted)), f"only one of {', '.join(FORMATS)} and structured")
        for name, value in wanted.items():
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            return msgspec.convert({FORMATS[name]: text}, Structured)
        return self.structured


class GenerateBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's `/generate`: one prompt or several, as text or as token ids."""

    input_embeds: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    lora_id: Unsupported = None
    session_params: Unsupported = None
    return_sampling_mask: Unsupported = None
    return_flat_raw_top_logprobs: Unsupported = None
    return_entropy: Unsupported = None
    return_bytes: Unsupported = None
    require_reasoning: Unsupported = None
    max_thinking_tokens: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    background: Unsupported = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    stream: bool = False
    """Each event has all the text so far."""
    rid: str | list[str] | None = None
    """Names the request for `/abort_request`; of several prompts each, or with their numbers."""
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    """First token of the prompt whose log-probability is shown; -1 = those of the completion."""
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int | list[int]] | None = None
    """Tokens whose log-probabilities are shown at each place."""
    return_text_in_logprobs: bool = False
    custom_logit_processor: str | list[str | None] | None = None
    """Name of the logits processor, of all prompts or of each; `custom_params` of the sampling
    parameters are its arguments."""
    return_hidden_states: bool | tuple[int, ...] = False
    """Of each token of prompt and completion, with max_new_tokens=0 of the prompt: base64 of a
    safetensors file with the tensor hidden_states, [tokens, layers, hidden]. A list names layers,
    see `PoolingParams`; true = the last one."""
    return_routed_experts: bool = False
    """Base64 of little-endian int32[tokens, layers, experts chosen], of all tokens but the last."""
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    """Keeps cached prefixes apart, as cache_salt does."""
    priority: int = 0
    timeout: float | None = None
    """Seconds until the request ends."""
    model: str | None = None
    lora_path: str | list[str | None] | None = None
    """Name of the LoRA adapter, of all prompts or of each; `model` may name one as well."""
    modalities: list[str] | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    routing_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    custom_labels: dict[str, str] | None = None
    log_metrics: bool = True
    no_logs: bool = False

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        for name in unsupported_in(GenerateBody):
            value = getattr(self, name)
            if any(value) if isinstance(value, list) else value:
                raise bad_field(name, "not supported")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Returns the layers of which hidden states are wanted."""
        layers = self.return_hidden_states
        return layers if isinstance(layers, tuple) else (-1,) * layers

    def prompts(self, max_model_len: int) -> list[str | list[int]]:
        """Returns one or several prompts. Raises `HttpError`."""
        field = "text" if self.input_ids is None else "input_ids"
        if (self.text is None) == (self.input_ids is None):
            raise bad_field("text", "exactly one of text and input_ids is needed")
        given: Any = self.text if self.input_ids is None else self.input_ids
        if len({isinstance(one, list) for one in given}) > 1:
            raise bad_field(field, "token ids and lists of them are mixed")
        found = list(given) if self.several else [given]
        if not found or not all(found):
            raise bad_field(field, "must not be empty")
        if len(found) > MAX_PROMPTS:
            raise bad_field(field, f"at most {MAX_PROMPTS}, got {len(found)}")
        for one in found:
            if not isinstance(one, str):
                check_ids(one, max_model_len, field)
        return found

    @property
    def several(self) -> bool:
        """True if the prompts are a list, and so the answer."""
        if self.input_ids is None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)

    def samplings(self, prompts: int) -> list[SglangSampling]:
        """Returns the sampling parameters of each prompt. Raises `HttpError`."""
        found = _each(self.sampling_params or SglangSampling(), prompts, "sampling_params")
        if len({one.n for one in found}) > 1:
            raise bad_field("sampling_params", "n must be the same for all prompts")
        if not 1 <= found[0].n <= MAX_N:  # before there is something for each choice
            raise _bad("n", f"must be between 1 and {MAX_N}, got {found[0].n}")
        return found

    def logprob_options(self, prompts: int, choices: int) -> list[LogprobOptions]:
        """Returns the options of each prompt, which has `choices` choices. Raises `HttpError`."""
        columns: dict[str, list[Any]] = {}
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
            columns[name] = _each(getattr(self, name), prompts, name)
            if choices > 1 and isinstance(getattr(self, name), list):
                raise bad_field(name, "no list together with n above 1")
        given: Any = self.token_ids_logprob or None
        nested = given is not None and isinstance(given[0], list)
        ids = _each(given, prompts, "token_ids_logprob") if nested else [given] * prompts
        return [LogprobOptions(*row).checked()
                for row in zip(*columns.values(), ids, strict=True)]

    def adapters(self, prompts: int) -> list[str | None]:
        """Returns the name of each prompt's adapter. Raises `HttpError`."""
        return [name or None for name in _each(self.lora_path, prompts, "lora_path")]

    def processors(self, prompts: int) -> list[str | None]:
        """Returns the name of each prompt's logits processor. Raises `HttpError`."""
        return _each(self.custom_logit_processor, prompts, "custom_logit_processor")

    def salts(self, prompts: int) -> list[str | None]:
        """Returns the cache salt of each prompt, which separates cached prefixes. Raises
        `HttpError`."""
        pairs = zip(_each(self.cache_salt, prompts, "cache_salt"),
                    _each(self.extra_key, prompts, "extra_key"), strict=True)
        return ["\0".join((salt or "", key or "")) if key else salt for salt, key in pairs]

    def labels(self, prompts: int, choices: int, fallback: str) -> list[str]:
        """Returns the labels of all choices, the first prompt's first. Raises `HttpError`."""
        if isinstance(self.rid, list):
            names = _each(self.rid, prompts, "rid")
            if len(set(names)) < len(names):
                raise bad_field("rid", "each must be another")
            return names if choices == 1 else [
                f"{name}_{choice}" for name in names for choice in range(choices)]
        own = self.rid or fallback
        if not self.several and choices == 1:
            return [own]
        return [f"{own}_{number}" for number in range(prompts * choices)]


class LogprobOptions(NamedTuple):
    """Which log-probabilities are shown of a prompt and its completion."""

    wanted: bool
    start: int
    """First token of the prompt; -1 = none of them."""
    top: int
    ids: list[int] | None

    def checked(self) -> LogprobOptions:
        """Returns itself. Raises `HttpError`."""
        if not 0 <= self.top <= MAX_LOGPROBS:
            raise bad_field("top_logprobs_num", f"must be between 0 and {MAX_LOGPROBS}, got "
                            f"{self.top}")
        if self.start < -1:
            raise bad_field("logprob_start_len", "must be -1 or a place in the prompt")
        if self.ids and not self.wanted:
            raise bad_field("token_ids_logprob", "only with return_logprob=true")
        if self.ids and self.top:
            raise bad_field("token_ids_logprob", "not together with top_logprobs_num")
        if self.ids and self.start >= 0:
            raise bad_field("token_ids_logprob", "of the completion alone; not together with "
                            "logprob_start_len")
        return self

    def params(self) -> dict[str, Any]:
        """Returns the SDK's parameters."""
        if not self.wanted:
            return {}
        params: dict[str, Any] = {"logprobs": self.top}
        if self.start >= 0:
            params["prompt_logprobs"] = self.top
        if self.ids:
            params["logprob_token_ids"] = self.ids
        return params


def _each(value: Any, count: int, field: str) -> list[Any]:
    """Returns a value for each prompt: the given list, or the same for all. Raises `HttpError`."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_field(field, f"{len(value)} for {count} prompts")
    return value


def renamed(error: str, names: Sequence[str]) -> str:
    """Rewrites a message about one of the SDK's parameters to the name that the caller used."""
    field, colon, rest = error.partition(":")
    theirs = next((one for one in names if SAME.get(one) == field), field)
    return f"sampling_params.{theirs}{colon}{rest}"


def _bad(field: str, what: str) -> HttpError:
    return bad_field(f"sampling_params.{field}", what)
