"""Full sizes of everything measured; without torch, since the list of rows is made from them."""

from __future__ import annotations

from typing import Any, NamedTuple

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 128_001}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 248_044,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mtp_num_hidden_layers": 1,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
         "max_position_embeddings": 512, "eos_token_id": 127}
SMALL_HYBRID = SMALL | {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"]}

GIB = float(1 << 30)
LLAMA_GIB, HYBRID_GIB = 15.0, 19.0
"""Weights."""
ROOM_GIB = 3.5
"""Memory beside weights and pages: workspace of a 2,048-token step, graphs, the CUDA context."""
KV_GIB = 2 * 8 * 128 * 32 * 2 / GIB
"""Pages of the Llama shape, a token."""
NEW = 80
"""Tokens that a sequence may grow by, while it is measured."""


class Batch(NamedTuple):
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.context}"

    @property
    def gib(self) -> float:
        """Memory that decoding it with the Llama shape takes."""
        return LLAMA_GIB + ROOM_GIB + self.batch * (self.context + NEW) * KV_GIB

    def small(self) -> Batch:
        return Batch({1: 1, 8: 2, 64: 3, 256: 4}.get(self.batch, 2), 24)


DECODED = (Batch(1, 1024), Batch(8, 1024), Batch(64, 1024), Batch(256, 1024))
LONGER = (Batch(1, 4096), Batch(8, 4096), Batch(64, 4096))
FIRST = (DECODED[0], DECODED[3])
"""What a first contact asks of decode, FP8 and the profiler."""
PROFILED, RING = FIRST, (DECODED[0], DECODED[2])
GRAPHS = "1,2,4,8,16,64,128,256"
"""Eight sizes: the aim is for so many."""
SEGMENTS = "16,32,64,128,256,512"
"""Tokens of steps with prompts that are run in segments."""
MIXED = (16, 32, 64, 128, 256, 512)
"""Tokens of a step, of a piece of a prompt and eight decodes."""
DRAFTING = (1, 4, 8)
ACCEPTANCE = "0.8,0.6"


# --- kernels -------------------------------------------------------------------------------------

class Decode(NamedTuple):
    batch: int
    length: int
    q_len: int = 1
    heads: int = 32
    kv: int = 8
    dim: int = 128
    fp8: bool = False

    @property
    def name(self) -> str:
        pages = ", e4m3 pages" if self.fp8 else ""
        return (f"{self.batch} x {self.length}, q {self.q_len}, {self.heads}/{self.kv} heads of "
                f"{self.dim}{pages}")

    @property
    def bytes(self) -> float:
        return self.batch * self.length * 2 * self.kv * self.dim * (1 if self.fp8 else 2)

    def small(self) -> Decode:
        return Decode(2, 20, self.q_len, 4, 2, 32, self.fp8)


DECODES = (Decode(1, 4096), Decode(8, 4096), Decode(32, 4096), Decode(64, 1024),
           Decode(256, 1024), Decode(128, 4096), Decode(32, 4096, 3), Decode(64, 4096, 1, 16, 4,
                                                                             256),
           Decode(256, 1024, fp8=True))


class Extend(NamedTuple):
    """Paged attention of prompts; (tokens before, tokens) of each."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 32
    kv: int = 8
    dim: int = 128

    @property
    def name(self) -> str:
        each = self.spans[0]
        spans = (f"{len(self.spans)} of {each[1]}" if len(set(self.spans)) == 1 and not each[0]
                 else " + ".join(f"{count} after {before}" for before, count in self.spans))
        return f"{spans}, {self.heads}/{self.kv} heads of {self.dim}"

    def small(self) -> Extend:
        spans = tuple((start // 256, 7 + count % 5) for start, count in self.spans)
        return Extend(spans[:2], 4, 2, 32)


EXTENDS = (Extend(((0, 4096),)), Extend(((0, 4096),) * 4),
           Extend(((4096, 2048), (0, 1024), (512, 1000))), Extend(((0, 4096),) * 2, 16, 4, 256))
DELTA_HEADS = ((16, 16), (16, 32))
"""(keys, values)"""
DELTA_BATCHES = (1, 32, 256)
DELTA_TOKENS = 4096
LATENTS = ((32, 4096, 16), (32, 4096, 128), (1, 4096, 128))
"""(batch, length, heads): 16 as on one of eight devices, and all."""
EXPERT_ROWS = (1, 8, 64, 256, 4096)
MAMBA_BATCHES = (1, 32, 256)
SUM_ROWS = (1, 64, 256)
PRODUCT_ROWS = (1, 8, 32, 256, 4096)
CODES = {"int4, groups of 128": (4, 128, False, 8), "int4, groups of 32 with mins": (4, 32, True),
         "int8, groups of 32": (8, 32, False, 128), "int8, a scale a row": (8, 0, False, 128)}
"""Formats of weights: `RowFormat`'s fields."""
DRAWS = {"greedy": (0, 0.0, False), "temperature": (0, 1.0, False), "top_p 0.9": (0, 0.9, False),
         "top_k 50, top_p 0.9": (50, 0.9, False), "top_p 0.9, flat logits": (0, 0.9, True)}
"""(top_k, top_p, flat); top_p 0.0: greedy."""

EXACT_PRODUCTS = (
    *((f"{outs} x {ins}, {rows} rows", "bf16", outs, ins, rows)
      for outs, ins in ((6144, 4096), (28_672, 4096)) for rows in (1, 64, 2048)),
    *((f"{kind}, {rows} rows", kind, 6144, 4096, rows)
      for kind in ("fp8", "int8", "int4") for rows in (64, 2048)))
"""Name, format of the weight, its rows and columns, rows of x: of `--exact on`."""
EXACT_DECODES = (("decode 16 x 4096", 16, 4096), ("decode 1 x 16384", 1, 16_384))
"""Name, sequences, their lengths."""
EXACT_PROMPT = "prompt of 2048"
