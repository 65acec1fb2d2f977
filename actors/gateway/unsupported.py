"""Fields of other engines that would change the answer, and that are refused here.

Unknown fields are ignored, since routers and clients add some. These are known: who sends one would
get something else than what was asked for.
"""

from __future__ import annotations

from typing import Any

from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.formats import FormatFields


class UnsupportedFields(FormatFields, kw_only=True):
    """The fields of a format, and these: taken with a value that changes nothing, else refused."""

    # vLLM's
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    # SGLang's
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    # llama-server's
    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None
    dynatemp_range: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    top_n_sigma: Any = None
    # OpenAI's
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None


UNSUPPORTED = tuple(UnsupportedFields.__annotations__)
_NEUTRAL: dict[str, Any] = {"length_penalty": 1, "typical_p": 1, "tfs_z": 1, "top_n_sigma": -1,
                            "modalities": ["text"]}
"""Values that change nothing, beside null, false, 0 and what is empty."""


def refuse_unsupported(body: UnsupportedFields) -> None:
    """Raise `HttpError` 400 naming the first field that asks for what is not offered."""
    for name in UNSUPPORTED:
        value = getattr(body, name)
        # An empty object of options still asks for what the options are of.
        nothing = value is None or (not value and not isinstance(value, dict))
        if not nothing and value != _NEUTRAL.get(name):
            raise HttpError(400, f"{name}: not supported", name)
