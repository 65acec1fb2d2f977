"""The backend whose products of queries and keys are in 8 bits (`kernels/reference/sage.py`).

A token of a decode, or of a window of drafts, is a chunk like any other to it: the same mean comes
off the same keys, and it attends as it would as part of a prompt. It gains nothing over 16 bits,
since keys are coded anew at each step, unless pages hold their codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import AttentionBackend
from actorium.gpu.attention.capabilities import CARDS, AttentionNeeds
from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.sage_native import NativeSage
from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.reference.sage import KeyMeans


@dataclass(slots=True)
class DecodeChunk:
    """A token of a decode, as a chunk: it reads nothing behind itself."""

    start: int
    count: int
    pages: Tensor


class SageAttention(AttentionBackend):
    """C's kernels on a CPU, Triton's on CUDA."""

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
               soft_cap: float = 0.0) -> Attend:
        if self.lib is not None:
            return NativeSage(self.lib, self.threads, rows, page_size, window, scale, self.means)
        from actorium.kernels.triton.sage import sage_extend

        return sage_extend(rows, page_size, window, scale, self.means)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0) -> Attend:
        if self.lib is not None:
            return self.extend([
                DecodeChunk(max(0, length - behind), 1, table)
                for length, table in zip(lens.tolist(), pages.contiguous(), strict=True)
                for behind in range(q_len, 0, -1)], page_size, window, scale)
        from actorium.kernels.triton.sage import sage_decode

        return sage_decode(pages, lens, span, q_len, page_size, window, scale, self.means)
