"""Encoders by the names of their classes: which there are, and what makes scores of their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
"""What classes of encoders end with."""


class EncoderHead(NamedTuple):
    """What comes between rows and the product that makes scores of them."""

    activation: str = "tanh"
    """Of a dense layer."""
    tokens: bool = False
    """It is there where tokens are classified as well, not only whole texts."""
    biased: bool = True
    """The dense layer has a bias; else where the config's `classifier_bias` says so."""
    norm: bool = False
    """A LayerNorm comes behind the activation."""


ENCODERS = {
    **dict.fromkeys(("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "NomicBert", "Gte",
                     "New"), EncoderHead()),
    "DistilBert": EncoderHead("relu"), "EuroBert": EncoderHead("gelu"),
    "ModernBert": EncoderHead("gelu", tokens=True, biased=False, norm=True),
}
"""By what the names of their classes begin with. `New` is what GTE's own code calls itself."""


def encoder_family(architecture: str) -> str:
    """The key of `ENCODERS` of this class; "" where it is none of an encoder."""
    return next((family for family in ENCODERS if architecture.startswith(family)
                 and architecture.removeprefix(family) in SUFFIXES), "")


def attends_to_both_sides(config: dict[str, Any], architecture: str) -> bool:
    """Whether tokens attend to those behind them, too: of an encoder, and of a decoder whose config
    says so."""
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    return bool(encoder_family(architecture)) or own.get("is_causal") is False or (
        own.get("use_bidirectional_attention") is True)
