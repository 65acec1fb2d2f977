"""Tensors of checkpoints that a served model does without, and how the others are named that no
part of it reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from actorium.actors.models.model_dir import text_config
from actorium.gpu.families.decoder_config import MTP_FIELDS
from actorium.gpu.families.model_shape import ModelShape

IGNORED = {
    "tables of rotary embeddings, which are computed":
        r"(^|\.)rotary(_pos)?_emb\.|\.rope\.freqs$|inv_freq$",
    "causal masks of GPT-2 and GPT-NeoX": r"\.(attn|attention|crossattention)\.(masked_)?bias$",
    "a head that is the embedding": r"^lm_head\.weight$",
    "layers that draft": r"(^|\.)mtp(_\w+)?\.",
    "scales of a KV cache in FP8": r"\.([qkv]|kv|qk)_scale$|\.([kv]_proj)\.output_scale$",
    "what reads images, video and sound":
        r"^(model\.)?(visual\w*|vision\w*|audio\w*|sound\w*|speech\w*|embed_vision|embed_audio"
        r"|image_newline|multi_modal_projector|mm_projector|connector|merger|aligner)(\.|$)",
    "what speaks and draws":
        r"^(model\.)?(talker|token2wav|code2wav|vqmodel|generation_\w+|gen_\w+)\.",
}
"""What they are -> a regular expression of names as `plain_name` has them, of tensors that are not
read: a tower that is served is."""
MOST_NAMED = 12
"""Names in a line of the log."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def ignored_tensors(shape: ModelShape, raw: dict[str, Any]) -> re.Pattern[str]:
    """A pattern of the names of tensors that this model does without. raw: its config."""
    patterns, text = list(IGNORED.values()), text_config(raw)
    if any(text.get(field) or raw.get(field) for field in MTP_FIELDS):  # they lie behind the others
        drafting = "|".join(str(shape.layers + i) for i in range(8))
        patterns.append(rf"^model\.layers\.({drafting})\.")
    # These attend to keys and values of an earlier layer; files have tensors for them all the same.
    sharing = "|".join(str(i) for i in shape.attention_layers if not shape.owns_kv(i))
    if sharing:
        patterns.append(rf"^model\.layers\.({sharing})\.self_attn\.[kv]_(proj|norm)\.")
    if shape.bidirectional:  # heads of other uses, and what the first token is made into
        patterns.append(r"^(cls|lm_head|vocab_\w+|head|decoder|predictions)\.|position_ids$")
    if "index_topk" in text:  # sequences that are shorter need no indexer, nor do some layers
        patterns.append(r"\.indexer\.")
    return re.compile("|".join(patterns))


def unread_warning(names: Collection[str]) -> str:
    """A line that names them, those that differ in numbers alone as one with their count."""
    counts = Counter(_NUMBER.sub("*", name) for name in names)
    kinds = [f"{name} ({count})" if "*" in name else name for name, count in sorted(counts.items())]
    more = len(kinds) - MOST_NAMED
    return (f"no part of the model reads {len(names)} of the tensors, so it may be another than "
            f"its config says: {', '.join(kinds[:MOST_NAMED])}"
            + (f" and {more} more kinds" if more > 0 else ""))
