"""Sampling flags: the defaults of every request that a command makes."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.params import SamplingParams
from actorium.tools.cli.command_line import Parsed

_PARAMS = frozenset(SamplingParams.__struct_fields__)


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """Sampling: what a request that does not say otherwise is made with."""

    max_tokens: int | None = None
    """Tokens to emit at the most; default: to the end of the context."""
    min_tokens: int = 0
    """No end before so many tokens."""
    temperature: float | None = None
    """0 = greedy; default: the model's generation_config.json, else 1."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; 0 or -1 = all."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the likeliest."""
    presence_penalty: float = 0.0
    """-2..2, once for a token that has appeared."""
    frequency_penalty: float = 0.0
    """-2..2, for each time that a token has appeared."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens that have appeared, prompt included; 1 = off."""
    n: int = 1
    """Choices for each prompt, up to the engine's --max-n."""
    stop: list[str] = []
    """End when one of these strings appears."""
    stop_token_ids: list[int] = []
    """End at one of these tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    logprobs: int | None = None
    """Log-probabilities of each token and of the k likeliest, k <= 20."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""


def sampling_of(parsed: Parsed[Any]) -> dict[str, Any]:
    """The sampling parameters that were written as flags; --seed is one of them.

    Raises `BadConfig`, naming the flag, on a value out of range.
    """
    options = msgspec.structs.asdict(parsed.options)
    values = {name: options[name] for name in parsed.written if name in _PARAMS & options.keys()}
    if "seed" in parsed.written:
        values["seed"] = parsed.config.model.seed
    try:
        SamplingParams(**values).check()
    except ValueError as error:
        name, _, what = str(error).partition(": ")
        raise BadConfig(f"{parsed.written.get(name, name)}: {what}", name) from None
    return values
