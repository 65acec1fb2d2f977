"""What each attention backend can do, and what a model asks of one: plain facts, without torch.

Extends (chunks of prompts) and decodes (a sequence's last token, or a window of it and the drafts
behind it, which one forward pass verifies) are asked for apart: a backend may do one of them alone,
or do them for different models. All read the same pages, `ModelShape.kv_row` numbers a token, so
that any two of them can share a step.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.gpu.families.model_shape import WEIGHT_DTYPES, ModelShape

FP8_PAGES = ("fp8_e4m3", "fp8_e5m2")
"""Pages with no scales, or with one for each key head of a layer."""
INT8_PAGES = "int8"
"""Pages with a scale for each token and head."""
HALVES = ("bfloat16", "float16")
"""Of 16 bits."""
EXTEND, DECODE = "extend", "decode"


class AttentionNeeds(NamedTuple):
    """What a model asks of its attention, as a configuration serves it."""

    device: str
    """cpu | cuda"""
    dtype: str
    """Of the queries."""
    cache_dtype: str
    """Of the pages, a name of `--kv-cache-dtype`. What scales lie beside them goes with it."""
    head_dim: int
    """With latents, of the rotated part."""
    page_size: int
    windows: bool = False
    """Some layers see no more than a window."""
    latent_rank: int = 0
    """Width of the latents, where pages hold those (MLA); 0 = keys and values."""
    query_len: int = 1
    """Rows of a decode, at most: the last token, and drafts to verify."""
    soft_cap: bool = False
    """Scores are capped."""
    sinks: bool = False
    """Heads have attention sinks."""
    alibi: bool = False
    """Scores fall with the distance of tokens."""
    other_dim: int = 0
    """Head size of other layers, which is smaller; 0 = all have the same."""


class Capabilities(NamedTuple):
    """What one backend can do, in extends or in decodes."""

    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = WEIGHT_DTYPES
    cache_dtypes: tuple[str, ...] = (*WEIGHT_DTYPES, *FP8_PAGES)
    """Of pages whose scales it applies, too."""
    most_head_dim: int = 0
    """0 = any."""
    head_dim_step: int = 1
    """What head sizes must be multiples of."""
    page_sizes: tuple[int, ...] = ()
    """() = any power of two."""
    windows: bool = True
    latents: bool = False
    """What is said of heads does not bind their rows."""
    most_latent_row: int = 0
    """Latent and rotated key; 0 = any."""
    query_len: int = 0
    """Of decodes: rows of a window of drafts at most, 0 = any."""
    soft_caps: bool = False
    sinks: bool = False
    alibi: bool = False
    graphs: bool = False
    """Of decodes: lengths are read when the kernels run, so steps can be captured and replayed."""


class BackendCard(NamedTuple):
    """A backend as lists show it."""

    name: str
    what: str
    extend: Capabilities | None
    """None: it does not extend."""
    decode: Capabilities | None

    def part(self, name: str) -> Capabilities | None:
        """Of `EXTEND` or `DECODE`."""
        return self.extend if name == EXTEND else self.decode


_TORCH = Capabilities(("cpu", "cuda"), cache_dtypes=(*WEIGHT_DTYPES, *FP8_PAGES, INT8_PAGES),
                      latents=True, soft_caps=True, sinks=True, alibi=True)
_NATIVE = Capabilities(("cpu",), ("bfloat16",), ("bfloat16", *FP8_PAGES, INT8_PAGES),
                       most_head_dim=512, latents=True, most_latent_row=1024, soft_caps=True,
                       sinks=True, alibi=True, graphs=True)
_TRITON = Capabilities(("cpu", "cuda"), cache_dtypes=(*WEIGHT_DTYPES, *FP8_PAGES, INT8_PAGES),
                       latents=True, soft_caps=True, sinks=True, alibi=True, graphs=True)
_SAGE = Capabilities(("cpu", "cuda"), HALVES, (*HALVES, INT8_PAGES), most_head_dim=256,
                     head_dim_step=32)

CARDS = {card.name: card for card in (
    BackendCard("native", "C, built for this CPU",
                _NATIVE._replace(head_dim_step=32, graphs=False), _NATIVE),
    BackendCard("triton", "Triton", _TRITON, _TRITON),
    BackendCard("torch", "torch", _TORCH, _TORCH),
    BackendCard("sage", "queries and keys in 8 bits", _SAGE, _SAGE),
)}
"""The backends that are built in, by name."""


def unmet(can: Capabilities | None, needs: AttentionNeeds) -> str:
    """Why what can do this does not serve these needs, all reasons in one line; empty if it does.

    >>> unmet(CARDS["native"].decode, AttentionNeeds("cpu", "float32", "float32", 64, 16))
    'it takes no queries in float32 (bfloat16), it reads no pages in float32 (--kv-cache-dtype \
bfloat16, fp8_e4m3, fp8_e5m2, int8)'
    """
    if can is None:
        return "it has no such part"
    checks = (
        (needs.device in can.devices, f"it does not run on {needs.device}"),
        (needs.dtype in can.dtypes,
         f"it takes no queries in {needs.dtype} ({', '.join(can.dtypes)})"),
        (needs.cache_dtype in can.cache_dtypes,
         f"it reads no pages in {needs.cache_dtype} (--kv-cache-dtype "
         f"{', '.join(can.cache_dtypes)})"),
        (not needs.latent_rank or can.latents, "it does not attend to latents (MLA)"),
        (not needs.latent_rank or not can.most_latent_row
         or needs.latent_rank + needs.head_dim <= can.most_latent_row,
         f"its latents are of {can.most_latent_row} numbers at most, with the rotated key"),
        (bool(needs.latent_rank) or not can.most_head_dim or needs.head_dim <= can.most_head_dim,
         f"its heads are of {can.most_head_dim} numbers at most, the model's of {needs.head_dim}"),
        *((bool(needs.latent_rank) or dim % can.head_dim_step == 0,
           f"its heads are of multiples of {can.head_dim_step} numbers, the model's of {dim}")
          for dim in (needs.head_dim, needs.other_dim)),
        (not can.page_sizes or needs.page_size in can.page_sizes,
         f"its pages are of {' or '.join(map(str, can.page_sizes))} tokens, not {needs.page_size}"),
        (can.windows or not needs.windows, "it has no sliding windows"),
        (not can.query_len or needs.query_len <= can.query_len,
         f"it verifies {can.query_len - 1} drafts at most, not {needs.query_len - 1}"),
        (can.soft_caps or not needs.soft_cap, "it does not cap scores"),
        (can.sinks or not needs.sinks, "it has no attention sinks"),
        (can.alibi or not needs.alibi, "it has no ALiBi"),
    )
    return ", ".join(why for met, why in checks if not met)


def needs_of(shape: ModelShape, device: str, kv_cache_dtype: str, page_size: int,
             drafts: int = 0) -> AttentionNeeds:
    """What this model asks for. kv_cache_dtype: as configured; drafts: of a step, at most."""
    cache = shape.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    latent, (*others, widest) = shape.latent, sorted({own.head_dim for own in shape.kinds})
    return AttentionNeeds(device, shape.dtype, cache, widest, page_size,
                          not shape.chunked and any(group.window for group in shape.groups),
                          latent.rank if latent else 0, 1 + drafts, shape.attention_cap > 0,
                          shape.sinks, bool(shape.alibi), *others)
