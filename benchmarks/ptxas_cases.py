"""Launches of the kernels that serve, at the shapes of models that people run.

Shapes: Llama-3.1-8B, Qwen3-32B, Qwen3.5-27B and 9B (hybrid), Qwen3-30B-A3B, Qwen2.5-7B, Gemma 3,
Llama-3.2-1B, DeepSeek-V3, Granite 4 (Mamba-2). Nothing is run, so tensors are never filled; batches
are small where they decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from ptxas_mixer_cases import (
    BF16,
    F32,
    I32,
    I64,
    OPS,
    PAGE,
    Case,
    decodes,
    empty,
    exacts,
    extends,
    latents,
    of_each,
    recurrent,
    sages,
    scales_of,
)

from actorium.kernels.adapter_rows import AdapterRows, AdapterStack
from actorium.kernels.fp4_weights import Fp4Weight
from actorium.kernels.grouped_rows import RowFormat
from actorium.kernels.reference.activation import ACTIVATIONS
from actorium.kernels.reference.apply_plan import table_addresses
from actorium.kernels.reference.experts import ExpertExtras
from actorium.kernels.reference.text_drafts import TextRules
from actorium.kernels.sampling_tables import (
    WIDTH,
    DecodeState,
    RowLayout,
    SamplingTables,
    WindowRows,
    WindowSizes,
)
from actorium.kernels.scaled_linear import FP8, InputForm, Scaled
from actorium.kernels.triton.all_reduce import PeerRows, room_of, sum_rows, sum_rows_norm
from actorium.kernels.triton.experts import GroupedExperts, SortedExperts
from actorium.kernels.triton.fp4_experts import Fp4Experts
from actorium.kernels.triton.grouped_mm import (
    MANY,
    GroupedWeight,
    grouped_linear,
    widened,
    words_of,
)
from actorium.kernels.triton.int8_mm import Int8Weight, int8_mm, quantise_int8
from actorium.kernels.triton.scaled_experts import ScaledExperts
from actorium.kernels.triton.scaled_mm import quantise, scaled_mm
from actorium.kernels.triton.skinny import CONFIGS, SkinnyConfig, skinny
from actorium.kernels.triton.skinny_linear import FEW
from actorium.kernels.triton.text_drafts import text_drafts

# --- rows -----------------------------------------------------------------------------------------

def norms(width: int) -> None:
    x = empty(64, width)
    OPS.rms_norm(x, x[0], 1e-5)
    OPS.rms_norm_add(x, x[0], 1e-5, x)


def head_norms(heads: int) -> None:
    """LayerNorms of heads, in place."""
    x = empty(64, heads + 8, 128)[:, :heads]
    OPS.layer_norm(x, empty(2, heads, 128), 1e-5, x)


def ranks_sum(ranks: int, width: int, dtype: torch.dtype) -> None:
    """Parts of several GPUs, with the residual and the norm, and without."""
    x, room = empty(64, width, dtype=dtype), room_of(width, dtype.itemsize)
    peers = PeerRows(empty(ranks, dtype=I64), empty(257, dtype=I32), 1, room)
    sum_rows(x, peers)
    sum_rows_norm(x, peers, x, x[0], 1e-5)


def norms_quant(width: int, columns: int, int8: bool = False) -> None:
    """What quantises its result for the next product, in one launch."""
    x, form = empty(64, width), InputForm(columns, plain=False, int8=int8)
    OPS.rms_norm_quant(x, x[0], 1e-5, form)
    OPS.add_rms_norm_quant(x, x, x[0], 1e-5, form)


def rotation(heads: int, kv_heads: int, dim: int, normed: bool = False,
             pages: torch.dtype = BF16) -> None:
    """Queries, keys and values of 64 tokens."""
    qkv, norm = empty(64, heads + 2 * kv_heads, dim), empty(heads + kv_heads, dim)
    OPS.rotate_write(qkv, heads, norm if normed else None, 1e-5, empty(64, 2, 1, dim),
                     empty(PAGE * 99, 2 * kv_heads, dim, dtype=pages), torch.zeros(64, dtype=I64),
                     scales_of(kv_heads, pages))


def tables() -> None:
    table = torch.zeros(257, 4096, dtype=I32)
    OPS.apply_plan([table], table_addresses([table]), torch.zeros(3, 400, dtype=I32))


def rows() -> Iterator[Case]:
    for width in (1152, 4096, 5120, 7168):
        yield Case(f"norm {width}", partial(norms, width))
    yield Case("layer_norm 12288", lambda: OPS.layer_norm(
        empty(64, 12_288), empty(2, 12_288), 1e-5))
    yield Case("layer_norm of heads, Command R+", partial(head_norms, 104))
    for kind in (*ACTIVATIONS, "xielu"):
        yield Case(f"activate {kind} 24576",
                   partial(OPS.activation(kind, (0.7, 1.3)), empty(64, 24_576)))
    for ranks in (2, 4, 8):
        yield Case(f"sum over {ranks} ranks, 8192", partial(ranks_sum, ranks, 8192, BF16))
    yield Case("sum over 2 ranks, 5120, fp32", partial(ranks_sum, 2, 5120, F32))
    yield Case("rotate_write Llama-3.1-8B", partial(rotation, 32, 8, 128))
    yield Case("rotate_write Qwen3-32B", partial(rotation, 64, 8, 128, True))
    yield Case("rotate_write Gemma 3 4B", partial(rotation, 8, 4, 256, True))
    yield Case("rotate_write Llama-3.1-8B, FP8 pages", partial(rotation, 32, 8, 128, False, FP8),
               89)
    yield Case("rotate_write Llama-3.1-8B, INT8 pages",
               partial(rotation, 32, 8, 128, False, torch.int8))
    yield Case("rotate_write Qwen3.5-27B, INT8 pages",
               partial(rotation, 24, 4, 256, True, torch.int8))
    yield Case("silu_mul 14336", lambda: OPS.silu_mul(empty(64, 2 * 14336)))
    yield Case("gelu_mul 21504", lambda: OPS.gelu_mul(empty(64, 2 * 21504)))
    for of, columns, gate in (("a row", 4096, 14336), ("128 columns", 128, 128)):
        yield Case(f"norm_fp8 4096, a scale for {of}", partial(norms_quant, 4096, columns), 89)
        yield Case(f"silu_mul_fp8 14336, a scale for {of}",
                   partial(OPS.silu_mul_quant, empty(64, 2 * 14336),
                           InputForm(gate, plain=False)), 89)
    for width in (4096, 8192):
        yield Case(f"norm_int8 {width}", partial(norms_quant, width, width, True))
    for width in (3072, 14336):
        yield Case(f"silu_mul_int8 {width}", partial(
            OPS.silu_mul_quant, empty(64, 2 * width), InputForm(width, plain=False, int8=True)))
    yield Case("gated_norm Qwen3.5-27B", lambda: OPS.gated_norm(
        empty(64, 48, 128, dtype=F32), empty(128, dtype=F32), empty(64, 48, 128), 1e-6))
    yield Case("norm_gated Granite 4", lambda: OPS.norm_gated(
        empty(64, 3072, dtype=F32), empty(3072, dtype=F32), empty(64, 3072), 1e-5, 1))
    yield Case("apply_plan", tables)


# --- products -------------------------------------------------------------------------------------

def experts(count: int, number: int, width: int, inner: int, dtype: torch.dtype = BF16) -> None:
    own = GroupedExperts(empty(number, 2 * inner, width, dtype=dtype),
                         empty(number, width, inner, dtype=dtype))
    own(empty(count, width, dtype=dtype), empty(count, 8, dtype=dtype), of_each(count, number))


def fp4_experts(count: int, number: int, width: int, inner: int, fp4: bool = True) -> None:
    """With biases, and clamped gates; in MXFP4, or not."""
    extras = ExpertExtras(empty(number, 2 * inner), empty(number, width), (1.702, 7.0))
    shapes = (number, 2 * inner, width), (number, width, inner)
    layer: SortedExperts[Any]
    if fp4:
        layer = Fp4Experts(*(Fp4Weight(*(empty(*shape[:2], shape[2] // each, dtype=torch.uint8)
                                         for each in (2, 32))) for shape in shapes), extras)
    else:
        layer = GroupedExperts(*(empty(*shape) for shape in shapes), extras)
    layer(empty(count, width), empty(count, 8), of_each(count, number))


def scaled_experts(count: int, number: int, width: int, inner: int) -> None:
    """The same in FP8, blocks of 128 x 128 with a scale each."""
    own = object.__new__(ScaledExperts)  # what it is made of would have to be filled
    first, second = (Scaled(empty(number * outs, columns, dtype=FP8),
                            empty(number * outs // 128, columns // 128, dtype=F32), 128)
                     for outs, columns in ((2 * inner, width), (width, inner)))
    SortedExperts.__init__(own, first, second, torch.arange(number), inner)
    own(empty(count, width), empty(count, 8), of_each(count, number))


def scaled(count: int, outs: int, width: int, blocks: bool = True) -> None:
    """An FP8 product, and what quantises its input."""
    size = (outs // 128, width // 128) if blocks else (outs, 1)
    w = Scaled(empty(outs, width, dtype=FP8), empty(*size, dtype=F32), 128 if blocks else 1)
    x = empty(count, width)
    scaled_mm(*quantise(x, 128 if blocks else width), w, BF16, None, empty(count, outs))


def products() -> Iterator[Case]:
    """Mixtures of experts, and FP8."""
    for count in (1, 64, 256, 600, 4096):
        yield Case(f"experts Qwen3-30B-A3B, {count} rows",
                   partial(experts, count, 128, 2048, 768))
        yield Case(f"mxfp4 experts GPT-OSS, {count} rows",
                   partial(fp4_experts, count, 128, 2880, 2880))
    yield Case("experts GPT-OSS, 64 rows", partial(fp4_experts, 64, 128, 2880, 2880, False))
    yield Case("experts Qwen3-30B-A3B, fp32, 64 rows", partial(experts, 64, 128, 2048, 768, F32))
    yield Case("experts Qwen3-30B-A3B, fp32, 4096 rows",
               partial(experts, 4096, 128, 2048, 768, F32))
    for count in (1, 64, 256, 4096):
        yield Case(f"scaled_experts DeepSeek-V3, {count} rows",
                   partial(scaled_experts, count, 256, 7168, 2048), 89)
    for count in (1, 64, 512):
        yield Case(f"scaled_mm DeepSeek-V3, {count} rows", partial(scaled, count, 7168, 2048), 89)
    yield Case("scaled_mm 4096 x 4096, a scale a row, 1 row", partial(scaled, 1, 4096, 4096, False),
               89)
    yield Case("scaled_mm 28672 x 4096, a scale a row, 1 row",
               partial(scaled, 1, 28672, 4096, False), 89)
    yield Case("scaled_mm 4096 x 4096, a scale a row, 512 rows",
               partial(scaled, 512, 4096, 4096, False), 89)


# --- the sampler ----------------------------------------------------------------------------------

def sample(vocab: int, samples: bool, truncates: bool) -> None:
    slots = torch.zeros(64, dtype=I32)
    OPS.sampling.choose(empty(64, vocab, dtype=F32), slots, slots, resident(vocab), samples,
                        truncates)


def resident(vocab: int) -> SamplingTables:
    return SamplingTables(empty(99, WIDTH, dtype=I32), empty(99, 64, dtype=I32),
                          empty(99, 2, dtype=I64),
                          empty(99, vocab, dtype=I32), empty(99, 4, dtype=I32),
                          empty(99, 4, dtype=I32))


def change(vocab: int) -> None:
    """What changes logits, and reads their probabilities."""
    logits, slots = empty(64, vocab, dtype=F32), torch.zeros(64, dtype=I32)
    OPS.sampling.adjust(logits, slots, slots, resident(vocab), RowLayout(64), True, True, True)
    OPS.sampling.mask(logits, slots, empty(64, -(-vocab // 32), dtype=I32))
    OPS.sampling.logprobs(torch.zeros(2, vocab), slots[:2].long(), 3)


def fill(q_len: int) -> None:
    slots, own = torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I64)
    i32, rows = partial(empty, dtype=I32), empty(64 * q_len, dtype=I64)
    windows = WindowRows(rows, rows, empty(1, 64 * q_len, dtype=I64), i32(1, 64, 512), i32(64),
                         i32(64 * q_len), i32(64 * q_len))
    OPS.sampling.fill(slots, DecodeState(own, slots, slots.bool(), own), empty(99, 2, dtype=I64),
                      i32(99, WIDTH), i32(1, 99, 512), WindowSizes(q_len, PAGE, 512, 8192), windows)


def commit(q_len: int, counts: bool) -> None:
    slots, own = torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I64)
    progress = DecodeState(own, slots, slots.bool(), own)
    OPS.sampling.commit(slots, slots, own, resident(4096), progress, RowLayout(1, q_len), counts)


def commit_likeliest(vocab: int, q_len: int) -> None:
    slots, own = torch.zeros(64, dtype=I32), torch.zeros(64, dtype=I64)
    OPS.sampling.commit_likeliest(empty(64, vocab), slots, slots, resident(vocab),
                                  DecodeState(own, slots, slots.bool(), own), RowLayout(1, q_len),
                                  False)


def skinny_products(config: SkinnyConfig) -> None:
    """Products of a few rows: normed, gated, and added."""
    x, inner = empty(config.rows, 4096), empty(config.rows, 14336)
    skinny(x, empty(6144, 4096), config, None, x[0], 1e-5)
    if config.gated:
        skinny(x, empty(28672, 4096), config, None, x[0], 1e-5, "silu")
    if config.rows <= FEW:
        skinny(inner, empty(4096, 14336), config, residual=x)


def grouped_weight(outs: int, ins: int, form: RowFormat) -> GroupedWeight:
    own = object.__new__(GroupedWeight)  # what it is made of would have to be filled
    words, upper = outs * ins // words_of(form.bits), {5: torch.uint8, 6: torch.int16}
    own.form, own.outs, own.ins, own.factor = form, outs, ins, 1.0
    own.codes = empty(words, dtype=I32)
    own.upper = empty(words, dtype=upper[form.bits]) if form.bits in upper else None
    own.scales = (empty(outs // 16, ins // form.group, 16, dtype=torch.float16) if form.group
                  else empty(outs // 16, 1, 16, dtype=F32))
    own.mins = own.scales if form.mins else None
    return own


def grouped_products(form: RowFormat, count: int) -> None:
    """Plain, added, gated; of few rows to f32 as well."""
    x, inner = empty(count, 4096), empty(count, 14336)
    grouped_linear(x, grouped_weight(6144, 4096, form))
    grouped_linear(inner, grouped_weight(4096, 14336, form), residual=empty(count, 4096))
    grouped_linear(x, grouped_weight(28672, 4096, form), gate="silu")
    if count <= FEW:
        grouped_linear(x, grouped_weight(128256, 4096, form), dtype=F32)


def grouped_widened(form: RowFormat) -> None:
    """Rows that are looked up, and those of a product of many rows."""
    own = grouped_weight(6144, 4096, form)
    widened(own, BF16, torch.zeros(64, dtype=I64))
    widened(own, BF16, count=6144)


def int8(count: int) -> None:
    """A product of integers, and what quantises its input."""
    own = object.__new__(Int8Weight)  # what it is made of would have to be filled
    own.form, own.outs, own.ins, own.mins = RowFormat(8, 0, False, 128), 4096, 4096, None
    own.codes, own.scales = empty(4096, 4096, dtype=torch.int8), empty(4096, dtype=F32)
    int8_mm(*quantise_int8(empty(count, 4096)), own, BF16, None, empty(count, 4096))


def adapters(rank: int) -> None:
    """What adapters add to queries, keys and values of Llama-3.1-8B."""
    stack = AdapterStack(8, rank, 4096, (4096, 1024, 1024), BF16, torch.device("cpu"))
    rows = AdapterRows(torch.zeros(64, dtype=I32), torch.zeros(8, 3, dtype=I32))
    OPS.adapt(empty(64, 4096), empty(64, 6144), rows, stack)


FORMATS = (("4 bits, groups of 128", RowFormat(4, 128, False, 8)),
           ("4 bits, groups of 32 with mins", RowFormat(4, 32, True)),
           ("4 bits, a scale a row", RowFormat(4, 0, False, 8)),
           ("5 bits, groups of 32 with mins", RowFormat(5, 32, True)),
           ("6 bits, groups of 16", RowFormat(6, 16, False, 32)),
           ("8 bits, groups of 32", RowFormat(8, 32, False, 128)))


def grouped() -> Iterator[Case]:
    """Llama-3.1-8B's products in 4 to 8 bits; SmolLM2-135M's columns are not whole blocks."""
    for name, form in FORMATS:
        for count in (1, 32, MANY):
            yield Case(f"grouped {name}, {count} rows", partial(grouped_products, form, count))
        yield Case(f"widened {name}", partial(grouped_widened, form))
    yield Case("grouped 4 bits, 16 rows", lambda: grouped_linear(
        empty(16, 4096), grouped_weight(28672, 4096, RowFormat(4, 32, True)), gate="silu"))
    for rank in (16, 64):
        yield Case(f"adapters of rank {rank}", partial(adapters, rank))
    for count in (1, 64, 512):
        yield Case(f"int8 4096 x 4096, {count} rows", partial(int8, count))
    for count in (1, 32, MANY):
        yield Case(f"grouped 4 bits, 576 columns, {count} rows", lambda n=count: grouped_linear(
            empty(n, 576), grouped_weight(3072, 576, RowFormat(4, 32, True)), gate="silu"))


def few_rows() -> Iterator[Case]:
    for config in CONFIGS:
        yield Case(f"skinny {config.outs} x {config.columns}, {config.rows} rows",
                   partial(skinny_products, config))


def guesses(votes: bool) -> None:
    """Drafts of the texts of 64 sequences of up to 32,768 tokens."""
    text_drafts(torch.zeros(65, 32_777, dtype=I32), torch.ones(65, dtype=I32),
                torch.zeros(64, dtype=I32), 32_768, TextRules(2, 24, 8, votes, 1.0, 0.1),
                torch.zeros(65, 8, dtype=I64), 8)


def sampler() -> Iterator[Case]:
    """Vocabularies of Llama 3, Qwen3 and Gemma 3."""
    for vocab in (128256, 151936, 262208):
        yield Case(f"choose {vocab}, greedy", partial(sample, vocab, False, False))
        yield Case(f"choose {vocab}, sampled", partial(sample, vocab, True, False))
        yield Case(f"choose {vocab}, truncated", partial(sample, vocab, True, True))
    yield Case("adjust, mask, logprobs 151936", partial(change, 151936))
    yield Case("fill q1", partial(fill, 1))
    yield Case("fill q3", partial(fill, 3))
    yield Case("commit q1", partial(commit, 1, False))
    yield Case("commit q3, counts", partial(commit, 3, True))
    yield Case("commit_likeliest 151936, q1", partial(commit_likeliest, 151936, 1))
    yield Case("commit_likeliest 262208, q3", partial(commit_likeliest, 262208, 3))
    for votes in (False, True):
        yield Case(f"text_drafts 32768, {'suffix' if votes else 'ngram'}", partial(guesses, votes))


def cases() -> list[Case]:
    parts = (rows, decodes, extends, exacts, sages, latents, recurrent, products, grouped,
             few_rows, sampler)
    return [case for part in parts for case in part()]
