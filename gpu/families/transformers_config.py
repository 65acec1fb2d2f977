"""Models that transformers' own classes run (`gpu/models/transformers_model.py`): a shape from the
fields that text configs have in common. The worker reads it again from the config as transformers
completes it, and takes from the model itself what attention and head are."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel
from actorium.actors.models.model_dir import checkpoint_bytes, max_model_len, text_config
from actorium.gpu.families.decoder_config import Fields, weight_dtype
from actorium.gpu.families.model_shape import DTYPE_BYTES, ModelShape

SYNONYMS = {"num_hidden_layers": ("n_layer", "n_layers"), "hidden_size": ("n_embd", "d_model"),
            "num_attention_heads": ("n_head", "n_heads"),
            "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size")}
"""What some configs call a field."""
KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}
"""Values of `layer_types` that pages of keys and values serve, and whether they have a window."""
REFUSED = {
    "is_encoder_decoder": "cross attention to an encoder is not served",
    "kv_lora_rank": "attention over latents (MLA) is not served by transformers' classes",
}
"""Fields that must be false or absent, and why."""


@cache
def text_classes() -> frozenset[str]:
    """Names of transformers' classes for text generation, read from its table of them: importing
    it takes seconds, and torch."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    table = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    _, _, after = table.partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return frozenset(re.findall(r'"([A-Z]\w+)"', after.partition("\n)")[0]))


def require_class(name: str, raw: dict[str, Any], where: Path, near: str) -> None:
    """Raise `BadModel` where transformers has no class of this name either; near: what is said of
    a class that is none of ours."""
    if name in text_classes():
        return
    code = ("; the checkpoint's own code (auto_map) is never run, whatever --trust-remote-code says"
            if raw.get("auto_map") else "")
    raise BadModel(f"{where}: {near}; nor has transformers {version('transformers')} such a class "
                   f"for text generation{code}")


def any_decoder(raw: dict[str, Any], where: Path, dtype: str, bits: float = 0) -> ModelShape:
    """Reader of any text config. bits: of a number in the files' layers, its share of scales
    counted, where they are quantised. Raises `BadModel` naming the field that is missing, or that
    asks for what is not served."""
    text = text_config(raw)
    kept = {key: raw[key] for key in ("dtype", "torch_dtype", *REFUSED) if raw.get(key)}
    text = {**kept, **text}
    for name, others in SYNONYMS.items():
        text.setdefault(name, next((text[own] for own in others if text.get(own)), None))
    get = Fields(text, where)
    for name, why in REFUSED.items():
        if text.get(name):
            raise get.bad(name, why)
    layers, hidden = get.layers(), get.int("hidden_size")
    heads = get.int("num_attention_heads")
    widths = text["intermediate_size"]  # some name one for each layer
    inner = max([Fields({"intermediate_size": own}, where).int("intermediate_size", 4 * hidden)
                 for own in (widths if isinstance(widths, list) and widths else [widths])])
    name, vocab, tied = weight_dtype(get, dtype), get.int("vocab_size"), get.flag(
        "tie_word_embeddings", True)
    head_dim = get.int("head_dim", max(1, hidden // heads))
    kv_heads = get.int("num_key_value_heads", heads)
    stored = checkpoint_bytes(where.parent)
    asked = text.get("dtype") or text.get("torch_dtype") or "float32"
    plain, outer = 8 * DTYPE_BYTES.get(str(asked), 4), (2 - tied) * vocab * hidden
    numbers = outer + layers * hidden * (2 * (heads + kv_heads) * head_dim + 3 * inner)
    if stored:
        outer = min(outer, 8 * stored // plain)
        numbers = outer + int((8 * stored - outer * plain) // (bits or plain))
    return ModelShape(
        architecture=str(raw["architectures"][0]), vocab_size=vocab, hidden=hidden,
        intermediate=inner, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        norm_eps=1e-6, tied=tied, ropes=(), windows=_windows(get, layers),
        max_model_len=max_model_len(raw), dtype=name, attention_scale=head_dim**-0.5,
        by_transformers=numbers)


def _windows(get: Fields, layers: int) -> tuple[int, ...]:
    """Of each layer, as `layer_types` say."""
    if get.raw.get("layer_types") is None:
        return (0,) * layers
    try:
        kinds = get.kinds("layer_types", tuple(KINDS), layers)
    except BadModel:
        listed = get.raw["layer_types"]
        others = sorted({str(kind) for kind in listed} - set(KINDS)) if isinstance(
            listed, list) else []
        if not others:
            raise
        raise get.bad("layer_types", f"{', '.join(others[:3])}: transformers' classes are served "
                      f"with {' and '.join(KINDS)} alone") from None
    window = get.int("sliding_window") if get.raw.get("sliding_window") else 0
    return tuple(window if KINDS[kind] else 0 for kind in kinds)
