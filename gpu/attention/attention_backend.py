"""The contract of an attention backend, and the backends that are built in.

A step is planned once for each group of layers with one window, and what that gives, an `Attend`,
is called for every layer of the group: so lists of work are made once. Where a step goes on in a
graph, the same calls are captured. Writing keys and values to pages is not a backend's: all of them
read the same layout, `[pages * page_size, *ModelShape.kv_row]`. Scales of pages are given with them
at each call: f32[2 * kv_heads], of a layer in FP8; bf16[pages * page_size, 2 * kv_heads] of one in
INT8, see `kernels.reference.kv`."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.attention.capabilities import CARDS, EXTEND, AttentionNeeds, BackendCard, unmet
from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.attention_native import (
    NativeDecode,
    NativeExtend,
    NativeSage,
    chunk_rows,
)
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference.latent import latent_causal, latent_masked
from actorium.kernels.reference.paged_attention import (
    Attend,
    ExtendChunk,
    causal_extend,
    paged_decode,
    torch_decode,
    torch_extend,
)
from actorium.kernels.reference.sage import KeyMeans

E4M3_CAPABILITY = (8, 9)
"""Below it Triton does not convert from e4m3."""


class AttentionBackend(ABC):
    """Kernels of paged attention, for one model on one device. What it can do is on its card; it is
    asked for nothing else, and one whose card has no extends, or no decodes, not for those."""

    card: BackendCard

    @property
    def name(self) -> str:
        """As `--attention-backend` has it."""
        return self.card.name

    @property
    def graphs(self) -> bool:
        """Whether decodes can be captured."""
        return self.card.decode is not None and self.card.decode.graphs

    @classmethod
    @abstractmethod
    def missing(cls, part: str, device: torch.device) -> str:
        """What this machine lacks for extends, or decodes, on this device; empty: nothing."""

    @classmethod
    def fault(cls, part: str, needs: AttentionNeeds, device: torch.device) -> str:
        """Why it cannot serve these needs here, what this machine lacks first; empty if it can."""
        faults = cls.missing(part, device), unmet(cls.card.part(part), needs)
        return ", ".join(filter(None, faults))

    @abstractmethod
    def extend(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
               soft_cap: float = 0.0, slopes: Tensor | None = None) -> Attend:
        """Chunks of sequences, whose rows in q follow one another; each token sees its sequence up
        to itself.

        window: tokens seen at most, itself among them, 0 = all; scale: on products of query and
        key; soft_cap: scores become soft_cap * tanh(score / soft_cap), 0 = they stay; slopes:
        f32[H], see `attend_blocks`; None: scores do not depend on distance.
        """

    @abstractmethod
    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0,
               slopes: Tensor | None = None) -> Attend:
        """The last q_len tokens of each of B sequences; with more than one, a window of drafts that
        is verified: each sees those up to itself, and reads nothing behind itself.

        pages: i32[B, P], beyond a length and behind a window of any page's number; lens: i32[B],
        with the q_len tokens in them; span >= max(lens), on the host.
        """


    def chunk_tables(self, pages: Tensor, lens: Tensor, q_len: int, page_size: int,
                     chunk: int) -> tuple[Tensor, Tensor]:
        """Page tables and lengths of the rows of `decode`, each a sequence of its own that begins
        where its chunk of so many tokens, whole pages, does."""
        seen = lens.unsqueeze(1) + torch.arange(1 - q_len, 1, device=lens.device)
        last = seen.clamp_min(1).flatten() - 1
        width = min(chunk // page_size, pages.shape[1])
        columns = (last // chunk * (chunk // page_size)).unsqueeze(1) + torch.arange(
            width, device=lens.device)
        return pages.repeat_interleave(q_len, 0).gather(
            1, columns.clamp_max(pages.shape[1] - 1).long()), (last % chunk + 1).int()


class TorchAttention(AttentionBackend):
    """The reference: any device and dtype."""

    card = CARDS["torch"]

    def __init__(self, latent_rank: int = 0) -> None:
        """latent_rank: see `AttentionNeeds`."""
        self._masked = latent_masked if latent_rank else paged_decode
        self._causal = latent_causal if latent_rank else causal_extend

    @classmethod
    def missing(cls, part: str, device: torch.device) -> str:
        return ""

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
               soft_cap: float = 0.0, slopes: Tensor | None = None) -> Attend:
        return torch_extend(rows, page_size, window, scale, self._masked, self._causal,
                            soft_cap, slopes)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0,
               slopes: Tensor | None = None) -> Attend:
        return torch_decode(pages, lens, span, q_len, page_size, window, scale, self._masked,
                            soft_cap, slopes)


class NativeAttention(AttentionBackend):
    """C's kernels: bf16 on a CPU, over pages in bf16, FP8 or INT8."""

    card = CARDS["native"]

    def __init__(self, lib: ctypes.CDLL, threads: int, exact: bool = False,
                 latent_rank: int = 0) -> None:
        """threads: of each call, torch's own. exact: decodes have the bits of extends, as those
        over latents have anyway; latent_rank: see `AttentionNeeds`."""
        self.lib, self.threads = lib, threads
        self.exact, self._latents = exact or latent_rank > 0, latent_rank > 0
        self.two_ways = exact and not self._latents
        """`exact` may be changed between two steps."""
        self.recorder: Callable[..., None] | None = None
        """Of decodes; see `NativeDelta`."""

    @classmethod
    def missing(cls, part: str, device: torch.device) -> str:
        lib = library() if device.type == "cpu" else None
        if lib is None:
            return ("its kernels are C's, for a CPU" if device.type != "cpu" else
                    "its kernels cannot be built: no C compiler, or torch with another OpenMP")
        if part == EXTEND and not lib.extend_ready():
            return "this CPU has no instructions for its kernel"
        return ""

    @classmethod
    def fault(cls, part: str, needs: AttentionNeeds, device: torch.device) -> str:
        """See `AttentionBackend`. Over latents, decodes are by the kernel of extends."""
        faults = (cls.missing(EXTEND if needs.latent_rank else part, device),
                  unmet(cls.card.part(part), needs))
        return ", ".join(filter(None, faults))

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
               soft_cap: float = 0.0, slopes: Tensor | None = None) -> Attend:
        return NativeExtend(self.lib, self.threads, chunk_rows(rows), [r.pages for r in rows],
                            page_size, window, scale, self._latents, soft_cap, slopes)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0,
               slopes: Tensor | None = None) -> Attend:
        return NativeDecode(self.lib, self.threads, pages, lens, q_len, page_size, window, scale,
                            self.exact, soft_cap, slopes, self._latents, self.recorder)

    def chunk_tables(self, pages: Tensor, lens: Tensor, q_len: int, page_size: int,
                     chunk: int) -> tuple[Tensor, Tensor]:
        rows, width = len(lens) * q_len, min(chunk // page_size, pages.shape[1])
        own, seen = pages.new_empty((rows, width)), lens.new_empty((rows,))
        self.lib.chunk_tables(pages.data_ptr(), pages.stride(0), pages.shape[1], lens.data_ptr(),
                              len(lens), q_len, chunk, page_size, own.data_ptr(), width,
                              seen.data_ptr())
        return own, seen


class TritonAttention(AttentionBackend):
    """Triton's kernels, on CUDA devices and in its interpreter."""

    card = CARDS["triton"]

    def __init__(self, latent_rank: int = 0, exact_for: int = 0) -> None:
        """latent_rank: see `AttentionNeeds`. exact_for: tokens of a sequence at most, where queries
        are to have the same bits however they are computed; 0 = they are not. Loads the kernels."""
        from actorium.kernels.triton import exact_attention as exact
        from actorium.kernels.triton.decode import decode
        from actorium.kernels.triton.extend import extend
        from actorium.kernels.triton.latent import LatentDecode
        from actorium.kernels.triton.latent_extend import LatentExtend

        self._rank, self._extend, self._decode = latent_rank, extend, decode
        self._latents, self._latent = LatentExtend, LatentDecode
        self.exact = exact_for > 0
        if self.exact:
            chunk = exact.chunk_of(exact_for)
            self._extend = partial(exact.exact_extend, chunk=chunk)
            self._decode = partial(exact.exact_decode, chunk=chunk)

    @classmethod
    def missing(cls, part: str, device: torch.device) -> str:
        return triton_fault(device)

    @classmethod
    def fault(cls, part: str, needs: AttentionNeeds, device: torch.device) -> str:
        if why := super().fault(part, needs, device):
            return why
        if needs.cache_dtype == "fp8_e4m3" and device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            if found < E4M3_CAPABILITY:
                return ("pages in fp8_e4m3 need CUDA capability {}.{}, this device has {}.{} "
                        "(--kv-cache-dtype fp8_e5m2 needs none)".format(*E4M3_CAPABILITY, *found))
        return ""

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
               soft_cap: float = 0.0, slopes: Tensor | None = None) -> Attend:
        if self._rank:
            return self._latents(rows, page_size, scale, self._rank)
        return self._extend(rows, page_size, window, scale, soft_cap, slopes=slopes)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0,
               slopes: Tensor | None = None) -> Attend:
        if self._rank:
            return self._latent(pages, lens, span, q_len, page_size, scale, self._rank)
        return self._decode(pages, lens, span, q_len, page_size, window, scale, soft_cap,
                            slopes=slopes)


@dataclass(slots=True)
class DecodeChunk:
    """A token of a decode, as a chunk: it reads nothing behind itself."""

    start: int
    count: int
    pages: Tensor


class SageAttention(AttentionBackend):
    """Products of queries and keys in 8 bits (`kernels/reference/sage.py`): C's kernels on a CPU,
    Triton's on CUDA.

    A token of a decode, or of a window of drafts, is a chunk like any other to it: the same mean is
    taken off the same keys, and it attends as it would as part of a prompt. It gains nothing over
    16 bits, since keys are coded anew at each step, unless pages hold their codes.
    """

    card = CARDS["sage"]

    def __init__(self, device: str) -> None:
        """device: cpu | cuda"""
        self.means = KeyMeans()
        self.lib = library() if device == "cpu" else None
        self.threads = torch.get_num_threads()

    @classmethod
    def missing(cls, part: str, device: torch.device) -> str:
        if device.type != "cpu":
            return triton_fault(device)
        lib = library()
        if lib is None:
            return "its kernels cannot be built: no C compiler, or torch with another OpenMP"
        return "" if lib.sage_ready() else "this CPU has no VNNI"

    @classmethod
    def fault(cls, part: str, needs: AttentionNeeds, device: torch.device) -> str:
        if why := super().fault(part, needs, device):
            return why
        if device.type == "cpu" and "float16" in (needs.dtype, needs.cache_dtype):
            return "on a CPU it takes nothing in float16"
        return ""

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
               soft_cap: float = 0.0, slopes: Tensor | None = None) -> Attend:
        if self.lib is not None:
            return NativeSage(self.lib, self.threads, rows, page_size, window, scale, self.means)
        from actorium.kernels.triton.sage import sage_extend

        return sage_extend(rows, page_size, window, scale, self.means)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0,
               slopes: Tensor | None = None) -> Attend:
        if self.lib is not None:
            return self.extend([
                DecodeChunk(max(0, length - behind), 1, table)
                for length, table in zip(lens.tolist(), pages.contiguous(), strict=True)
                for behind in range(q_len, 0, -1)], page_size, window, scale)
        from actorium.kernels.triton.sage import sage_decode

        return sage_decode(pages, lens, span, q_len, page_size, window, scale, self.means)
