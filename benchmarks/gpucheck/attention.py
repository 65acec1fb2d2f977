"""Cases: paged attention. Public kernels get keys and values unpaged, one tensor a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from actorium.gpu.attention.attention_backend import TorchAttention
from actorium.gpu.step.batch import ExtendRow

from . import shapes
from .case import BF16, Case, Named, Run, Setting, Truth, ready

PAGE = 16
AT_ONCE = 512
"""Queries of a prompt."""


def decodes(s: Setting) -> Named:
    for own in shapes.DECODES:
        yield own.name, partial(_decode, s, own.small() if s.toy else own)


def _decode(s: Setting, own: shapes.Decode) -> Case:
    batch, length, q_len, heads, kv, dim, fp8 = own
    width = -(-length // PAGE)
    layer = s.randn((batch * width + 1) * PAGE, 2 * kv, dim,
                    dtype=torch.float8_e4m3fn if fp8 else BF16)
    pages = _scattered(s, batch, width)
    lens = torch.full((batch,), length, device=s.device, dtype=torch.int32)
    q, scale = s.randn(batch * q_len, heads, dim), dim**-0.5
    out = torch.empty_like(q)
    attend = s.attention().decode(pages, lens, length, q_len, PAGE, 0, scale)
    truth = Truth("attention", "fp8" if fp8 else "bf16",
                  partial(decoded, q, layer, pages, lens, length, q_len, scale))
    return Case(lambda: attend(q, layer, out), truth, own.bytes, peers={
        "sdpa in bf16" if fp8 else "sdpa": partial(_sdpa_decode, s, own)})


def decoded(q: Tensor, layer: Tensor, pages: Tensor, lens: Tensor, length: int, q_len: int,
            scale: float, rank: int = 0) -> Tensor:
    """The reference in fp32, one sequence at a time: all at once may not fit into memory."""
    reference = TorchAttention(rank)
    parts = [reference.decode(pages[b:b + 1], lens[b:b + 1], length, q_len, PAGE, 0, scale)(
        own.float(), layer) for b, own in enumerate(q.split(q_len))]
    return torch.cat(parts)


def _scattered(s: Setting, batch: int, width: int) -> Tensor:
    order = torch.randperm(batch * width, device=s.device).to(torch.int32) + 1
    return order.view(batch, width)


def _sdpa_decode(s: Setting, own: shapes.Decode) -> Run:
    """torch's SDPA over bf16 keys and values."""
    q, k, v = (s.randn(own.batch, h, n, own.dim) for h, n in (
        (own.heads, own.q_len), (own.kv, own.length), (own.kv, own.length)))
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def latents(s: Setting) -> Named:
    """DeepSeek-V3's decode over latents."""
    for batch, length, heads in shapes.LATENTS:
        small = (2, 20, 4)
        yield f"{batch} x {length}, {heads} heads", partial(
            _latent, s, *(small if s.toy else (batch, length, heads)))


def _latent(s: Setting, batch: int, length: int, heads: int) -> Case:
    rank, rope = s.size(512, 16), s.size(64, 8)
    width = -(-length // PAGE)
    layer = s.randn((batch * width + 1) * PAGE, 1, rank + rope)
    pages, q = _scattered(s, batch, width), s.randn(batch, heads, rank + rope)
    lens = torch.full((batch,), length, dtype=torch.int32, device=s.device)
    ours, torchs = (ops.decode(pages, lens, length, 1, PAGE, 0, (rank + rope)**-0.5)
                    for ops in (s.attention(rank), TorchAttention(rank)))
    truth = Truth("attention", "bf16", lambda: decoded(
        q, layer, pages, lens, length, 1, (rank + rope)**-0.5, rank)[..., :rank])
    return Case(lambda: ours(q, layer)[..., :rank], truth, batch * length * (rank + rope) * 2,
                peers={"torch": ready(lambda: torchs(q, layer))})


def extends(s: Setting) -> Named:
    """Ragged chunks; the public kernels get whole prompts of one length."""
    for own in shapes.EXTENDS:
        yield own.name, partial(_extend, s, own.small() if s.toy else own)


def _extend(s: Setting, own: shapes.Extend) -> Case:
    spans, heads, kv, dim = own
    at, rows = 1, []
    for i, (start, count) in enumerate(spans):
        width = -(-(start + count) // PAGE)
        rows.append(ExtendRow(i, start, count, s.arange(width) + at))
        at += width
    layer, total = s.randn(at * PAGE, 2 * kv, dim), sum(count for _, count in spans)
    q, scale = s.randn(total, heads, dim), dim**-0.5
    out = torch.empty_like(q)
    attend = s.attention().extend(rows, PAGE, 0, scale)
    pairs = sum(count * start + count * (count + 1) / 2 for start, count in spans)
    same = len(set(spans)) == 1 and not spans[0][0]
    backends = {"sdpa": SDPBackend.MATH} if s.toy else {
        "sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    truth = Truth("attention", "bf16", partial(extended, q, layer, rows, scale))
    return Case(lambda: attend(q, layer, out), truth, flops=4 * heads * dim * pairs, peers={
        name: partial(_sdpa_extend, s, own, backend) for name, backend in backends.items()
    } if same else {})


def extended(q: Tensor, layer: Tensor, rows: Sequence[ExtendRow], scale: float) -> Tensor:
    """The reference in fp32, some queries at a time: all scores at once may not fit into memory."""
    some = [replace(row, start=row.start + at, count=min(AT_ONCE, row.count - at),
                    pages=row.pages[:-(-(row.start + at + AT_ONCE) // PAGE)])
            for row in rows for at in range(0, row.count, AT_ONCE)]
    reference = TorchAttention()
    return torch.cat([reference.extend([row], PAGE, 0, scale)(own.float(), layer) for row, own in
                      zip(some, q.split([row.count for row in some]), strict=True)])


def _sdpa_extend(s: Setting, own: shapes.Extend, backend: SDPBackend) -> Run:
    """torch's SDPA with as many key heads as query heads, its fastest case."""
    q, k, v = (s.randn(len(own.spans), own.heads, own.spans[0][1], own.dim) for _ in range(3))

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return run
