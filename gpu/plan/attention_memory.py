"""Bytes that attention of a step takes beside what has the size of its tokens: of what grows with
the tokens before a chunk, or with those of all sequences, nothing is without its place here."""

from __future__ import annotations

import math

from actorium.actors.config.attention_names import asked_backends
from actorium.actors.config.tree import Config
from actorium.gpu.attention.capabilities import CARDS, DECODE, EXTEND, needs_of, unmet
from actorium.gpu.families.model_shape import CODE_SCALE_BYTES, DTYPE_BYTES, ModelShape
from actorium.gpu.plan.memory_plan import Demand, kv_dtype

BLOCKS = 256 << 20
"""Of `kernels.reference.attention_blocks`."""
COPIES, WIDE = 4, 4
"""Likewise; and the bytes of fp32."""
SPLITS, SPLIT_ROWS = 64, 160 * 128
"""Of `kernels.triton.extend`: parts of each row, and rows of all programs of 160 SMs."""


def torch_attends(config: Config, shape: ModelShape, device: str) -> bool:
    """Whether torch's attention serves prompts or decodes on cpu or cuda, if what else is asked for
    can be had there."""
    asked, own = asked_backends(config.device), config.device
    first = (own.kernels if own.kernels != "auto" else "triton" if device == "cuda" else
             "native" if own.native_kernels else "torch")
    needs = needs_of(shape, device, config.memory.kv_cache_dtype, config.memory.page_size)
    chosen = [(part, first if name == "auto" else name)
              for part, name in ((EXTEND, asked.extend), (DECODE, asked.decode))]
    return any(name == "torch" or name == "native" and unmet(CARDS[name].part(part), needs)
               for part, name in chosen)


def attention_bytes(shape: ModelShape, demand: Demand, device: str, by_torch: bool) -> int:
    """At most, of one layer, and of what a step keeps for all; by_torch: see `torch_attends`."""
    row, latent, kept = math.prod(shape.kv_row), shape.latent, kv_dtype(shape, demand)
    width, longest = latent.row if latent else shape.head_dim, shape.max_model_len
    rows, chunk = demand.max_num_seqs * (demand.drafts + 1), min(demand.chunk, longest)
    if device == "cuda":
        if by_torch:
            return max(BLOCKS, 2 * COPIES * WIDE * rows * (row + shape.heads * (1 + width)))
        return min(SPLITS * chunk * shape.heads, SPLIT_ROWS) * WIDE * (width + 1)
    if not by_torch:  # C's widens a sequence's pages in FP8
        return longest * row * shape.itemsize if kept.startswith("fp8") else 0
    codes = kept in CODE_SCALE_BYTES
    mask = WIDE if codes else shape.itemsize
    read = longest * row * (DTYPE_BYTES[kept] + (2 * WIDE if codes else shape.itemsize))
    spans = [min(longest, window + chunk) if window else longest for window, _ in shape.groups]
    # Masks, twice while they are made, and places of tokens, an i64 each, of all sequences.
    planned = sum(spans) * (2 * chunk + (2 + 4 * 8) * rows)
    return planned + max(spans, default=0) * max(chunk, rows) * mask + max(
        read, min(rows * read, BLOCKS))
