"""Kernel by kernel: achieved bandwidth or arithmetic beside the ceilings of the same run, and the
best public kernel that can be had here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import Part, Timer
from gpu_case import BF16, Case, Run, Setting
from gpu_recurrent import deltas, mambas
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from actorium.gpu.batch import ExtendRow
from actorium.kernels import record as columns
from actorium.kernels.experts import EachExpert, route
from actorium.kernels.ops import TorchOps, select_ops
from actorium.kernels.record import Resident
from actorium.kernels.rope import rope_rows, rope_table
from actorium.kernels.sampling_ops import select_sampling


def norms(s: Setting) -> Iterator[Case]:
    rows, width = s.size(8192, 4), s.size(4096, 64)
    x, residual, weight = s.randn(rows, width), s.randn(rows, width), s.randn(width)
    shape, moved = f"[{rows}, {width}]", rows * width * 2
    yield Case("rms_norm", shape, lambda: s.ops.rms_norm(x, weight, 1e-6), 2 * moved,
               peers={"torch": lambda: F.rms_norm(x, (width,), weight, 1e-6)})
    yield Case("rms_norm_add", shape, lambda: s.ops.rms_norm_add(x, weight, 1e-6, residual),
               3 * moved, peers={"torch": lambda: residual + F.rms_norm(x, (width,), weight, 1e-6)})


def gates(s: Setting) -> Iterator[Case]:
    rows, width = s.size(8192, 4), s.size(14336, 64)
    x = s.randn(rows, 2 * width)
    yield Case("silu_mul", f"[{rows}, 2 x {width}]", lambda: s.ops.silu_mul(x), 6 * rows * width,
               peers={"torch": lambda: F.silu(x[:, :width]) * x[:, width:]})


def rotation(s: Setting) -> Iterator[Case]:
    rows, heads, kv, dim = s.size(8192, 4), s.size(32, 4), s.size(8, 2), s.size(128, 32)
    qkv, pages = s.randn(rows, heads + 2 * kv, dim), s.randn(rows + 16, 2 * kv, dim)
    inv = 1e4 ** (-s.arange(dim // 2).float() * 2 / dim)
    index = s.arange(rows, torch.int64) + 16
    rope = rope_rows(rope_table(inv, 1.0, rows, BF16), s.arange(rows, torch.int64))
    moved = rows * dim * 2 * (2 * (heads + 2 * kv))
    yield Case("rotate_write", f"[{rows}, {heads} + 2 x {kv}, {dim}]",
               lambda: s.ops.rotate_write(qkv, heads, None, 1e-6, rope, pages, index), moved)


def products(s: Setting) -> Iterator[Case]:
    """What decode is mostly made of: cuBLAS's, as we call it."""
    out, inner = s.size(28672, 128), s.size(4096, 64)
    weight = s.randn(out, inner)
    linear = s.ops.linear(weight)
    for rows in (1, 8, 32, 256):
        x = s.randn(rows, inner)
        yield Case("linear", f"[{rows}, {inner}] x [{inner}, {out}]", lambda x=x: linear(x),
                   2 * (out * inner + rows * (out + inner)))


def mixtures(s: Setting) -> Iterator[Case]:
    """Qwen3-30B-A3B's experts; the bytes of those that somebody wants. Beside them each expert's
    products one by one, as the host would have them run."""
    number, width, inner, chosen = s.size(128, 4), s.size(2048, 64), s.size(768, 32), s.size(8, 2)
    gate_up = s.randn(number, 2 * inner, width) * width**-0.5
    down = s.randn(number, width, inner) * inner**-0.5
    ours = s.ops.experts(gate_up, down)
    each = EachExpert([lambda y, g=g, d=d: F.linear(s.ops.silu_mul(F.linear(y, g)), d)
                       for g, d in zip(gate_up, down, strict=True)])
    for rows in (2,) if s.toy else (1, 8, 64, 256, 4096):
        x, logits = s.randn(rows, width), s.randn(rows, number)
        weights, experts = route(logits, chosen, True)
        wanted = len(experts.unique())
        flops = rows * chosen * 6 * width * inner
        yield Case("experts", f"{rows} rows, {chosen} of {number}",
                   lambda x=x, w=weights, e=experts: ours(x, w, e),
                   wanted * 6 * width * inner if rows < 4096 else 0.0,
                   flops if rows >= 4096 else 0.0,
                   waiting={"one by one": lambda x=x, w=weights, e=experts: each(x, w, e)})


# --- attention -----------------------------------------------------------------------------------

def decodes(s: Setting) -> Iterator[Case]:
    """Paged decode; the public kernels get keys and values as one tensor a sequence, unpaged."""
    shapes = [(1, 4096, 1, 128), (8, 4096, 1, 128), (32, 4096, 1, 128), (256, 1024, 1, 128),
              (128, 4096, 1, 128), (32, 4096, 3, 128), (64, 4096, 1, 256)]
    if s.toy:
        shapes = [(2, 40, 1, 32), (2, 40, 3, 32)]
    for batch, length, q_len, dim in shapes:
        heads, kv = (s.size(32, 4), s.size(8, 2)) if dim < 256 else (16, 4)
        yield _decode(s, batch, length, q_len, heads, kv, dim)


def _decode(s: Setting, batch: int, length: int, q_len: int, heads: int, kv: int, dim: int) -> Case:
    size = 16
    width = -(-length // size)
    layer = s.randn((batch * width + 1) * size, 2 * kv, dim)
    order = torch.randperm(batch * width, device=s.device).to(torch.int32) + 1
    pages = order.view(batch, width)
    lens = torch.full((batch,), length, device=s.device, dtype=torch.int32)
    q, scale = s.randn(batch * q_len, heads, dim), dim**-0.5
    out = torch.empty_like(q)
    attend = s.ops.decode(pages, lens, length, q_len, size, 0, scale)
    peers = {"sdpa": _sdpa_decode(s, batch, length, q_len, heads, kv, dim)}
    if find_spec("flashinfer") and not s.toy and q_len == 1:
        peers["flashinfer"] = _flashinfer(layer, pages, length, q.view(batch, heads, dim), kv)
    return Case("paged decode", f"{batch} x {length}, q {q_len}, {heads}/{kv} heads of {dim}",
                lambda: attend(q, layer, out), batch * length * 2 * kv * dim * 2, peers=peers)


def latents(s: Setting) -> Iterator[Case]:
    """DeepSeek-V3's decode over latents, 16 heads as on one of eight devices, and all of them."""
    rank, rope, size = s.size(512, 16), s.size(64, 8), 16
    for batch, length, heads in [(2, 40, 4)] if s.toy else [(32, 4096, 16), (32, 4096, 128),
                                                           (1, 4096, 128)]:
        width = -(-length // size)
        layer = s.randn((batch * width + 1) * size, 1, rank + rope)
        order = torch.randperm(batch * width, device=s.device).to(torch.int32) + 1
        pages, q = order.view(batch, width), s.randn(batch, heads, rank + rope)
        lens = torch.full((batch,), length, dtype=torch.int32, device=s.device)
        ours, torchs = (ops.decode(pages, lens, length, 1, size, 0, (rank + rope)**-0.5)
                        for ops in (s.ops.latent(rank), TorchOps().latent(rank)))
        yield Case("latent decode", f"{batch} x {length}, {heads} heads",
                   lambda run=ours, q=q, layer=layer: run(q, layer),
                   batch * length * (rank + rope) * 2,
                   peers={"torch": lambda run=torchs, q=q, layer=layer: run(q, layer)})


def _sdpa_decode(s: Setting, batch: int, length: int, q_len: int, heads: int, kv: int, dim: int
                 ) -> Run:
    q, k, v = (s.randn(batch, h, n, dim) for h, n in ((heads, q_len), (kv, length), (kv, length)))
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flashinfer(layer: Tensor, pages: Tensor, length: int, q: Tensor, kv: int) -> Run:
    import flashinfer

    batch, width = pages.shape
    size = layer.shape[0] // (batch * width + 1)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=layer.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(batch + 1, device=layer.device, dtype=torch.int32) * width
    last = torch.full((batch,), (length - 1) % size + 1, device=layer.device, dtype=torch.int32)
    wrapper.plan(starts, pages.flatten(), last, q.shape[1], kv, q.shape[2], size,
                 q_data_type=BF16, kv_data_type=BF16)
    both = layer.view(-1, size, 2 * kv, q.shape[2])
    caches = both[:, :, :kv].contiguous(), both[:, :, kv:].contiguous()
    return lambda: wrapper.run(q, caches)


def extends(s: Setting) -> Iterator[Case]:
    """Ragged chunks over pages; the public kernels get whole prompts of one length."""
    ways = [([(0, 4096)], 128), ([(0, 4096)] * 4, 128),
            ([(4096, 2048), (0, 1024), (512, 1000)], 128), ([(0, 4096)] * 2, 256)]
    if s.toy:
        ways = [([(0, 20)], 32), ([(16, 10), (0, 7)], 32)]
    for spans, dim in ways:
        heads, kv = (s.size(32, 4), s.size(8, 2)) if dim < 256 else (16, 4)
        yield _extend(s, spans, heads, kv, dim)


def _extend(s: Setting, spans: list[tuple[int, int]], heads: int, kv: int, dim: int) -> Case:
    size, at, rows = 16, 1, []
    for i, (start, count) in enumerate(spans):
        width = -(-(start + count) // size)
        rows.append(ExtendRow(i, start, count, s.arange(width) + at))
        at += width
    layer, total = s.randn(at * size, 2 * kv, dim), sum(count for _, count in spans)
    q, scale = s.randn(total, heads, dim), dim**-0.5
    out = torch.empty_like(q)
    attend = s.ops.extend(rows, size, 0, scale)
    pairs = sum(count * start + count * (count + 1) / 2 for start, count in spans)
    same = len(set(spans)) == 1 and spans[0][0] == 0
    peers = _sdpa_extend(s, len(spans), spans[0][1], heads, dim) if same else {}
    return Case("paged extend", " + ".join(f"{c} after {b}" for b, c in spans)
                + f", {heads}/{kv} heads of {dim}", lambda: attend(q, layer, out),
                flops=4 * heads * dim * pairs, peers=peers)


def _sdpa_extend(s: Setting, batch: int, length: int, heads: int, dim: int) -> dict[str, Run]:
    q, k, v = (s.randn(batch, heads, length, dim) for _ in range(3))

    def by(backend: SDPBackend) -> Run:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return run

    if s.toy:
        return {"sdpa": by(SDPBackend.MATH)}
    return {"sdpa flash": by(SDPBackend.FLASH_ATTENTION),
            "sdpa cudnn": by(SDPBackend.CUDNN_ATTENTION)}


# --- sampling ------------------------------------------------------------------------------------

def samplings(s: Setting) -> Iterator[Case]:
    rows, vocab = s.size(256, 3), s.size(151_936, 200)
    ops = select_sampling(s.device, "auto" if not s.toy else "triton")
    for name, top_k, top_p in (("greedy", 0, 0.0), ("temperature", 0, 1.0), ("top_p 0.9", 0, 0.9),
                               ("top_k 50, top_p 0.9", 50, 0.9)):
        record = torch.zeros(rows + 1, columns.WIDTH, dtype=torch.int32)
        real = record.view(torch.float32)
        record[:, columns.TOP_K], record[:, columns.SEED_LOW] = top_k, torch.arange(rows + 1)
        real[:, columns.TEMPERATURE] = 1.0 if top_p else 0.0
        real[:, columns.TOP_P], real[:, columns.REPETITION] = top_p or 1.0, 1.0
        tables = Resident(record.to(s.device), torch.full((rows + 1, 1), -1, dtype=torch.int32,
                                                          device=s.device),
                          torch.zeros(rows + 1, 0, dtype=torch.int64, device=s.device))
        logits, slots = s.randn(rows, vocab, dtype=torch.float32) * 4, s.arange(rows) + 1
        chosen = partial(ops.choose, logits, slots, slots, tables, top_p > 0,
                         0 < top_p < 1 or top_k > 0)
        yield Case("sampling", f"[{rows}, {vocab}] {name}", chosen, rows * vocab * 4,
                   peers=_torch_sampling(logits, top_k, top_p))


def _torch_sampling(logits: Tensor, top_k: int, top_p: float) -> dict[str, Run]:
    if not top_p:
        return {"torch": lambda: logits.argmax(-1)}
    if top_p == 1.0:
        return {"torch": lambda: logits.softmax(-1).multinomial(1)}

    def sorted_out() -> Tensor:
        found, order = logits.sort(-1, descending=True)
        if top_k:
            found, order = found[:, :top_k], order[:, :top_k]
        p = found.softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p > top_p, 0.0)
        return order.gather(-1, p.multinomial(1))

    return {"torch, sorted": sorted_out}


CASES: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "paged decode": decodes, "paged extend": extends, "delta": deltas, "experts": mixtures,
    "latent decode": latents, "mamba-2 step": mambas, "sampling": samplings, "linear": products,
    "norm": norms, "rotation": rotation, "gate": gates}
"""The most telling first: time may run out."""
NEEDS = 8.0
"""Seconds to begin another group with: kernels are compiled, tensors filled."""


def run(part: Part, ceilings: Mapping[str, float]) -> None:
    """Every case; a kernel that fails is a line of its own. ceilings: as `gpu_bench.ceilings`."""
    copy_gbs, matmul_tflops = ceilings["copy_gbs"], ceilings["matmul_tflops"]
    timer = Timer(part.toy)
    ops = select_ops(BF16, part.device, 128, False, "triton" if part.toy else "auto")
    setting = Setting(part.device, part.toy, ops)
    part.facts["kernels"] = ops.name
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, make in CASES.items():
            with part.trying(name, 0.0 if part.toy else NEEDS) as go:
                if go:
                    for case in make(setting):
                        _measure(part, timer, case, copy_gbs, matmul_tflops)
                        del case  # before the next one is made: some hold gigabytes


def _measure(part: Part, timer: Timer, case: Case, copy_gbs: float, matmul_tflops: float) -> None:
    what = f"{case.kernel} {case.shape}"
    with part.trying(what, 0.0 if part.toy else 1.0) as go:
        if not go:
            return
        us = timer.us(case.run)
        row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "us": us}
        if case.bytes:
            row |= {"gbs": case.bytes / us / 1e3, "share": case.bytes / us / 1e3 / copy_gbs}
        else:
            row |= {"tflops": case.flops / us / 1e6, "share": case.flops / us / 1e6 / matmul_tflops}
        best, spent = _best(part, timer.us, case.peers, what)
        if best:
            row |= {"peer": best, "peer_us": spent}
        best, spent = _best(part, timer.launched_us, case.waiting, what)
        if best:
            row |= {"launched_us": timer.launched_us(case.run), "waiting_peer": best,
                    "waiting_peer_us": spent}
        part.add(**row)


def _best(part: Part, time: Callable[[Run], float], peers: dict[str, Run], what: str
          ) -> tuple[str, float]:
    """The fastest of them and its microseconds; "" if there is none."""
    best, us = "", math.inf
    for name, run_peer in peers.items():
        with part.trying(f"{what}, {name}"):
            spent = time(run_peer)
            if spent < us:
                best, us = name, spent
    return best, us
