"""Launches of attention and of layers with a state, at the shapes of models that people run; see
`ptxas_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import TritonAttention
from actorium.gpu.step.batch import ExtendRow
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.kda import KdaInputs
from actorium.kernels.reference.sage import KeyMeans
from actorium.kernels.reference.selective_scan import ScanInputs
from actorium.kernels.reference.ssd import SSDSizes, split_inputs
from actorium.kernels.scaled_linear import FP8
from actorium.kernels.triton.exact_experts import ExactExperts
from actorium.kernels.triton.exact_product import exact_product
from actorium.kernels.triton.experts import GroupedExperts
from actorium.kernels.triton.grouped_mm import (
    MANY,
)
from actorium.kernels.triton.sage import sage_decode, sage_extend
from actorium.kernels.triton.triton_ops import TritonOps

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
OPS = TritonOps()
PAGE = 16
CPU = torch.device("cpu")


class Case(NamedTuple):
    name: str
    """What is launched; of which model."""
    launch: Callable[[], Any]
    oldest: int = 80
    """Compute capability that it needs: FP8 begins with 89."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Memory that is never touched."""
    return torch.empty(shape, dtype=dtype)


# --- attention ------------------------------------------------------------------------------------

def scales_of(kv_heads: int, pages: torch.dtype) -> Tensor | None:
    if pages is torch.int8:
        return empty(PAGE * 99, 2 * kv_heads)
    return empty(2 * kv_heads, dtype=F32) if pages is FP8 else None


class Attention(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    dtype: torch.dtype = BF16
    pages: torch.dtype = BF16
    sinks: bool = False
    slopes: bool = False
    """Scores fall with the distance (ALiBi)."""


LLAMA, QWEN3 = Attention(32, 8, 128), Attention(64, 8, 128)
QWEN2, QWEN35 = Attention(28, 4, 128), Attention(24, 4, 256)
QWEN35_9B = Attention(16, 4, 256)
GEMMA_27B, GEMMA_4B = Attention(32, 16, 128, 1024), Attention(8, 4, 256, 1024)
GEMMA4_E4B = Attention(8, 2, 512)
GPT_OSS = Attention(64, 8, 64, sinks=True)
LLAMA_1B = Attention(32, 8, 64)
MPT_7B, FALCON_RW = Attention(32, 32, 128, slopes=True), Attention(32, 32, 64, slopes=True)


def decode(a: Attention, q_len: int, sequences: int = 64) -> None:
    """Few sequences are split, many are not."""
    pages, lens = torch.zeros(sequences, 512, dtype=I32), torch.ones(sequences, dtype=I32)
    q = empty(sequences * q_len, a.heads, a.dim, dtype=a.dtype)
    attend = TritonAttention().decode(pages, lens, 8192, q_len, PAGE, a.window, a.dim**-0.5,
                                      slopes=slopes_of(a))
    attend(q, empty(99 * PAGE, 2 * a.kv_heads, a.dim, dtype=a.pages), None,
           scales_of(a.kv_heads, a.pages), sinks_of(a))


def extend(a: Attention, start: int, count: int, chunks: int = 1) -> None:
    """A chunk that few programs would serve is split."""
    own = [ExtendRow(0, start, count, torch.zeros(2048, dtype=I32)) for _ in range(chunks)]
    q = empty(chunks * count, a.heads, a.dim, dtype=a.dtype)
    attend = TritonAttention().extend(own, PAGE, a.window, a.dim**-0.5, slopes=slopes_of(a))
    attend(q, empty(99 * PAGE, 2 * a.kv_heads, a.dim, dtype=a.pages), None,
           scales_of(a.kv_heads, a.pages), sinks_of(a))


def sinks_of(a: Attention) -> Tensor | None:
    return empty(a.heads, dtype=F32) if a.sinks else None


def slopes_of(a: Attention) -> Tensor | None:
    return empty(a.heads, dtype=F32) if a.slopes else None


def wide(a: Attention) -> Attention:
    return a._replace(dtype=F32, pages=F32)


def fp8(a: Attention) -> Attention:
    return a._replace(pages=FP8)


def coded(a: Attention) -> Attention:
    return a._replace(pages=torch.int8)


def exact_attends(a: Attention, q_len: int) -> None:
    """What `--exact on` decodes with, in parts, and extends with: the same kernel."""
    pages, lens = torch.zeros(64, 512, dtype=I32), torch.ones(64, dtype=I32)
    layer, scales = empty(99 * PAGE, 2 * a.kv_heads, a.dim, dtype=a.pages), scales_of(a.kv_heads,
                                                                                     a.pages)
    attention = TritonAttention(exact_for=8192)
    attention.decode(pages, lens, 8192, q_len, PAGE, a.window, a.dim**-0.5, slopes=slopes_of(a))(
        empty(64 * q_len, a.heads, a.dim), layer, None, scales, sinks_of(a))
    own = [ExtendRow(0, 0, 2048, torch.zeros(2048, dtype=I32))]
    attention.extend(own, PAGE, a.window, a.dim**-0.5, slopes=slopes_of(a))(
        empty(2048, a.heads, a.dim), layer, None, scales, sinks_of(a))


def exacts() -> Iterator[Case]:
    """Kernels of `--exact on`."""
    for name, a in (("Llama-3.1-8B", LLAMA), ("Qwen2.5-7B, window", QWEN2._replace(window=4096)),
                    ("Qwen3.5-27B", QWEN35), ("Gemma 3 4B, window", GEMMA_4B),
                    ("Llama-3.2-1B", LLAMA_1B), ("Llama-3.1-8B, INT8 pages", coded(LLAMA)),
                    ("Qwen3.5-27B, INT8 pages", coded(QWEN35)), ("GPT-OSS, sinks", GPT_OSS),
                    ("MPT-7B, slopes", MPT_7B), ("Gemma 4 E4B", GEMMA4_E4B)):
        yield Case(f"exact attention {name}", partial(exact_attends, a, 1))
    yield Case("exact attention Llama-3.1-8B, FP8 pages", partial(exact_attends, fp8(LLAMA), 3), 89)
    yield Case("exact experts Qwen3-30B-A3B", partial(exact_experts, 128, 2048, 768))
    for outs, ins in ((6144, 4096), (28672, 4096), (3848, 2560)):
        for count in (1, MANY + 1):
            yield Case(f"exact product {outs} x {ins}, {count} rows",
                       partial(exact_rows, count, outs, ins))


def exact_experts(number: int, width: int, inner: int) -> None:
    """Eight of a token, which are chosen, and summed."""
    own = ExactExperts(GroupedExperts(empty(number, 2 * inner, width),
                                      empty(number, width, inner)))
    weights, _ = own.choose(empty(64, number), 8, True)
    own(empty(64, width), weights, of_each(64, number))


def of_each(count: int, number: int) -> Tensor:
    """Eight experts a token, all of them as often."""
    return torch.arange(count * 8).view(count, 8) % number


def exact_rows(count: int, outs: int, ins: int) -> None:
    """A product, and one that adds."""
    x, weight = empty(count, ins), empty(outs, ins)
    exact_product(x, weight, empty(outs))
    exact_product(x, weight, residual=empty(count, outs))


def decodes() -> Iterator[Case]:
    """One token a sequence, and windows of drafts."""
    for name, a, lengths in (
            ("Llama-3.1-8B", LLAMA, (1, 3, 8)), ("Qwen3-32B", QWEN3, (1, 3, 8)),
            ("Qwen2.5-7B, window", QWEN2._replace(window=4096), (1, 8)),
            ("Gemma 3 27B, window", GEMMA_27B, (1, 3)), ("Gemma 3 4B, window", GEMMA_4B, (1, 3)),
            ("Qwen3.5-27B", QWEN35, (1, 3, 8)), ("Qwen3.5-9B", QWEN35_9B, (1, 3)),
            ("Gemma 4 E4B", GEMMA4_E4B, (1,)), ("Gemma 4 E4B, INT8 pages", coded(GEMMA4_E4B), (1,)),
            ("MPT-7B, slopes", MPT_7B, (1,)), ("Falcon-RW-1B, slopes", FALCON_RW, (1,)),
            ("Llama-3.2-1B", LLAMA_1B, (1, 3, 8)), ("GPT-OSS, sinks", GPT_OSS, (1, 3)),
            ("GPT-OSS, sinks, window", GPT_OSS._replace(window=128), (1,)),
            ("Llama-3.1-8B, fp32", wide(LLAMA), (1, 3, 8)),
            ("Qwen3.5-27B, fp32", wide(QWEN35), (1, 3)),
            ("Llama-3.2-1B, fp32", wide(LLAMA_1B), (1, 3))):
        for q_len in lengths:
            yield Case(f"decode {name}, q{q_len}", partial(decode, a, q_len))
    for sequences in (1, 1024):
        yield Case(f"decode Llama-3.1-8B, q1, {sequences} sequences",
                   partial(decode, LLAMA, 1, sequences))
    for name, a in (("Llama-3.1-8B", LLAMA), ("Qwen3-32B", QWEN3), ("Qwen3.5-27B", QWEN35)):
        for q_len in (1, 3, 8):
            yield Case(f"decode {name}, FP8 pages, q{q_len}", partial(decode, fp8(a), q_len), 89)
            yield Case(f"decode {name}, INT8 pages, q{q_len}", partial(decode, coded(a), q_len))
    yield Case("decode Gemma 3 27B, window, INT8 pages, q1", partial(decode, coded(GEMMA_27B), 1))


def extends() -> Iterator[Case]:
    """Chunks of prompts; a question behind a long text."""
    for name, a in (("Llama-3.1-8B", LLAMA), ("Qwen3-32B", QWEN3),
                    ("Gemma 3 27B, window", GEMMA_27B), ("Gemma 3 4B, window", GEMMA_4B),
                    ("Qwen3.5-27B", QWEN35), ("Qwen3.5-9B", QWEN35_9B), ("Llama-3.2-1B", LLAMA_1B),
                    ("Gemma 4 E4B", GEMMA4_E4B), ("MPT-7B, slopes", MPT_7B),
                    ("Falcon-RW-1B, slopes", FALCON_RW),
                    ("GPT-OSS, sinks, window", GPT_OSS._replace(window=128)),
                    ("Llama-3.1-8B, fp32", wide(LLAMA)), ("Qwen3.5-27B, fp32", wide(QWEN35)),
                    ("Llama-3.2-1B, fp32", wide(LLAMA_1B))):
        yield Case(f"extend {name}", partial(extend, a, 0, 2048, 4))
        yield Case(f"extend {name}, split", partial(extend, a, 16000, 64))
    yield Case("extend Llama-3.1-8B, few tokens", partial(extend, LLAMA, 16000, 3))
    for name, a in (("Llama-3.1-8B", LLAMA), ("Qwen3.5-27B", QWEN35)):
        yield Case(f"extend {name}, FP8 pages", partial(extend, fp8(a), 0, 2048, 4), 89)
        yield Case(f"extend {name}, INT8 pages", partial(extend, coded(a), 0, 2048, 4))
        yield Case(f"extend {name}, INT8 pages, split", partial(extend, coded(a), 16000, 64))


def sage(a: Attention, start: int, count: int, q_len: int = 0) -> None:
    """Queries and keys in 8 bits: chunks of prompts, or decodes of so many tokens."""
    means, page = KeyMeans(), torch.zeros(2048, dtype=I32)
    if q_len:
        lens = torch.ones(1, dtype=I32)
        attend = sage_decode(page[None], lens, start, q_len, PAGE, 0, 0.1, means)
    else:
        attend = sage_extend([ExtendRow(0, start, count, page)] * 4, PAGE, a.window, 0.1, means)
    attend(empty(4 * count, a.heads, a.dim), empty(99 * PAGE, 2 * a.kv_heads, a.dim, dtype=a.pages),
           None, scales_of(a.kv_heads, a.pages))


def sages() -> Iterator[Case]:
    """Prompts, whose keys are coded first; a question behind a long text, and a decode."""
    for name, a in (("Llama-3.1-8B", LLAMA), ("Gemma 3 4B, window", GEMMA_4B),
                    ("Qwen3.5-27B", QWEN35), ("Llama-3.2-1B", LLAMA_1B)):
        yield Case(f"sage {name}", partial(sage, a, 0, 2048))
        yield Case(f"sage {name}, split", partial(sage, a, 16000, 64))
    yield Case("sage Llama-3.1-8B, decode", partial(sage, LLAMA, 8192, 1, 4))
    for name, a in (("Llama-3.1-8B", LLAMA), ("Qwen3.5-27B", QWEN35)):
        yield Case(f"sage {name}, INT8 pages", partial(sage, coded(a), 0, 2048))
    yield Case("sage Llama-3.1-8B, INT8 pages, decode", partial(sage, coded(LLAMA), 8192, 1, 4))


def latent(heads: int, q_len: int, dtype: torch.dtype = BF16, kept: torch.dtype = BF16,
           sequences: int = 32) -> None:
    pages, lens = torch.zeros(sequences, 512, dtype=I32), torch.ones(sequences, dtype=I32)
    attend = TritonAttention(512).decode(pages, lens, 8192, q_len, PAGE, 0, 0.1)
    attend(empty(sequences * q_len, heads, 576, dtype=dtype), empty(99 * PAGE, 1, 576, dtype=kept),
           None, latent_scales(kept))


def latent_scales(kept: torch.dtype) -> torch.Tensor | None:
    return empty(99 * PAGE, 1) if kept is torch.int8 else (
        empty(1, dtype=F32) if kept is FP8 else None)


def latent_chunk(heads: int, start: int, count: int, dtype: torch.dtype = BF16,
                 kept: torch.dtype = BF16) -> None:
    """A chunk of a prompt over them; a short one is split."""
    own = [ExtendRow(0, start, count, torch.zeros(2048, dtype=I32))]
    TritonAttention(512).extend(own, PAGE, 0, 0.1)(
        empty(count, heads, 576, dtype=dtype), empty(99 * PAGE, 1, 576, dtype=kept), None,
        latent_scales(kept))


def latents() -> Iterator[Case]:
    """All heads, and those of one of eight devices."""
    for heads, q_len in ((128, 1), (128, 2), (16, 1), (16, 2), (16, 4)):
        yield Case(f"latent DeepSeek-V3, {heads} heads, q{q_len}", partial(latent, heads, q_len))
    yield Case("latent DeepSeek-V3, 16 heads, q1, fp32", partial(latent, 16, 1, F32, F32))
    for heads, q_len in ((128, 1), (16, 2)):
        yield Case(f"latent DeepSeek-V3, {heads} heads, FP8, q{q_len}",
                   partial(latent, heads, q_len, BF16, FP8), 89)
        yield Case(f"latent DeepSeek-V3, {heads} heads, INT8, q{q_len}",
                   partial(latent, heads, q_len, BF16, torch.int8))
    for heads in (128, 16):
        yield Case(f"latent prompt, {heads} heads", partial(latent_chunk, heads, 16000, 2048))
        yield Case(f"latent prompt, {heads} heads, split", partial(latent_chunk, heads, 16000, 9))
        for name, kept, oldest in (("FP8", FP8, 89), ("INT8", torch.int8, 80)):
            yield Case(f"latent prompt, {heads} heads, {name}",
                       partial(latent_chunk, heads, 16000, 2048, BF16, kept), oldest)
    yield Case("latent prompt, 16 heads, fp32", partial(latent_chunk, 16, 16000, 9, F32, F32))


# --- layers with a state --------------------------------------------------------------------------

GDN, GDN_9B = Heads(16, 48, 128, 128), Heads(16, 32, 128, 128)


def delta(new: int, states: torch.dtype, heads: Heads = GDN) -> None:
    of = heads.values
    layer = DeltaLayer(heads, empty(4, heads.channels, dtype=F32), empty(of, dtype=F32),
                       empty(of, dtype=F32))
    p, columns = empty(64 * new, heads.channels + of * 130), empty(99, 3, heads.channels)
    kept, at = empty(99, of, 128, 128, dtype=states), torch.zeros(64, dtype=I64)
    if new == 1:
        OPS.delta_step(p, kept, columns, at, layer)
    else:
        pending = empty(99, new - 1, heads.channels + 2 * of)
        OPS.delta_window(p, kept, columns, pending, at, at, layer)


def delta_chunks(states: torch.dtype, heads: Heads = GDN) -> None:
    of = heads.values
    layer = DeltaLayer(heads, empty(4, heads.channels, dtype=F32), empty(of, dtype=F32),
                       empty(of, dtype=F32))
    OPS.delta_extend(empty(200, heads.channels + of * 130), empty(3, of, 128, 128, dtype=states),
                     empty(99, 3, heads.channels), plan_ragged([ExtendRun(1, 200)], 4, CPU), layer)


def convolution(channels: int, biased: bool) -> None:
    x, plan = empty(200, channels), plan_ragged([ExtendRun(1, 200)], 4, CPU)
    OPS.conv_extend(x, empty(9, 3, channels), empty(4, channels, dtype=F32), plan,
                    empty(channels, dtype=F32) if biased else None)


def mamba(states: torch.dtype) -> None:
    """Granite 4's, with the convolution before it."""
    sizes, at = SSDSizes(48, 1, 64, 128), torch.zeros(64, dtype=I64)
    OPS.conv_step(empty(64, sizes.channels), empty(99, 3, sizes.channels), at,
                  empty(4, sizes.channels, dtype=F32), empty(sizes.channels, dtype=F32))
    inputs = split_inputs(empty(64, sizes.channels, dtype=F32), empty(64, 48, dtype=F32), sizes)
    OPS.ssd_step(inputs, empty(99, 48, 64, 128, dtype=states), at, empty(48, dtype=F32),
                 empty(48, dtype=F32))


def scan(states: torch.dtype) -> None:
    """Jamba's, of prompts and of single tokens."""
    channels, at = 8192, torch.zeros(64, dtype=I64)
    wide, x = empty(64, 32, dtype=F32), empty(64, channels, dtype=F32)
    inputs, a = ScanInputs(x, x, *wide.split(16, 1)), empty(channels, 16, dtype=F32)
    held, skip = empty(99, 1, channels, 16, dtype=states), empty(channels, dtype=F32)
    OPS.scan_extend(inputs, held, plan_ragged([ExtendRun(1, 64)], 4, CPU), a, skip)
    OPS.scan_step(inputs, held, at, a, skip)


def kda(states: torch.dtype) -> None:
    """Kimi Linear's, of prompts and of single tokens."""
    qkv, g, beta = (empty(64, width, dtype=F32) for width in (3 * 4096, 4096, 32))
    inputs, held = KdaInputs(qkv, g, beta), empty(99, 32, 128, 128, dtype=states)
    OPS.kda_extend(inputs, held, plan_ragged([ExtendRun(1, 64)], 4, CPU))
    OPS.kda_step(inputs, held, torch.zeros(64, dtype=I64))


def plain_convolution() -> None:
    """LFM2's, without SiLU."""
    x, plan = empty(200, 2048), plan_ragged([ExtendRun(1, 200)], 3, CPU)
    columns, weight = empty(99, 2, 2048), empty(3, 2048, dtype=F32)
    OPS.conv_tokens(x, columns, weight, plan, F32, None, False)
    OPS.conv_step(x[:64], columns, torch.zeros(64, dtype=I64), weight, None, False)


def recurrent() -> Iterator[Case]:
    yield Case("conv LFM2", plain_convolution)
    for name, dtype in (("", F32), (", bf16 states", BF16)):
        yield Case(f"delta Qwen3.5-27B, q1{name}", partial(delta, 1, dtype))
        yield Case(f"delta Qwen3.5-27B, q3{name}", partial(delta, 3, dtype))
        yield Case(f"delta_extend Qwen3.5-27B{name}", partial(delta_chunks, dtype))
        yield Case(f"ssd_step Granite 4{name}", partial(mamba, dtype))
        yield Case(f"scan Jamba{name}", partial(scan, dtype))
        yield Case(f"kda Kimi Linear{name}", partial(kda, dtype))
    for new in (1, 3):
        yield Case(f"delta Qwen3.5-9B, q{new}", partial(delta, new, F32, GDN_9B))
    yield Case("delta_extend Qwen3.5-9B", partial(delta_chunks, F32, GDN_9B))
    yield Case("conv_extend Qwen3.5-27B", partial(convolution, GDN.channels, False))
    yield Case("conv_extend Granite 4", partial(convolution, 3328, True))
