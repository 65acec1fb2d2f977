"""The sampling kernels of a device. numpy's, for arrays on a CPU, are in `sampling_cpu`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from actorium.kernels.record import DecodeRows, DecodeState, RowLayout, SamplingTables, WindowSizes
from actorium.kernels.reference import sampling
from actorium.kernels.reference.logprobs import Logprobs, logprobs


class TorchSampling:
    """On tensors of any device. Nothing waits for the device, and no shape depends on data: each
    method can be captured in a CUDA graph."""

    name = "torch"
    commits = False
    """Whether there is a kernel that writes to the tables what was sampled: see
    `triton.commit.commit`."""

    fills = False
    """Whether there is one that reads the rows of decodes from the tables: see
    `triton.fill.fill`."""

    def fill(self, slots: Tensor, progress: DecodeState, drafts: Tensor, record: Tensor,
             tables: Tensor, lengths: WindowSizes, out: DecodeRows) -> None:
        """Only where `fills`."""
        raise TypeError(f"{self.name}: the tables' arithmetic is the steps' own")

    def adjust(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               layout: RowLayout, penalises: bool, biases: bool, holds: bool) -> Tensor:
        """See `sampling.adjust`; logits of another dtype than f32 are copied first. Returns what
        was changed."""
        logits = logits.float()
        sampling.adjust(logits, slots, positions, tables, layout, penalises, biases, holds)
        return logits

    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """See `sampling.mask`."""
        sampling.mask(logits, rows, words)

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               samples: bool, truncates: bool, out: Tensor | None = None) -> Tensor:
        """See `sampling.choose`; logits of any float dtype. out: where the tokens are to lie."""
        tokens = sampling.choose(logits.float(), slots, positions, tables, samples, truncates)
        return tokens if out is None else out.copy_(tokens)

    def commit_likeliest(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
        progress: DecodeState, layout: RowLayout, counts: bool, force: tuple[float, ...] = (),
        tokens: Tensor | None = None, told: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Only where `commits`."""
        raise TypeError(f"{self.name}: the tables' arithmetic is the sampler's")

    def commit(self, slots: Tensor, positions: Tensor, tokens: Tensor, tables: SamplingTables,
               progress: DecodeState, layout: RowLayout, counts: bool,
               force: tuple[float, ...] = (), told: Tensor | None = None) -> Tensor:
        """Only where `commits`."""
        raise TypeError(f"{self.name}: the tables' arithmetic is the sampler's")

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int,
                 named: Tensor | None = None) -> Logprobs:
        """See `logprobs.logprobs`."""
        return logprobs(logits, tokens, k, named)


@cache
def select_sampling(device: torch.device, kernels: str = "auto") -> TorchSampling:
    """Those that `select_ops` has as well. kernels: auto (Triton's on CUDA devices) | torch |
    triton.

    Raises `ValueError` where those asked for cannot run.
    """
    from actorium.kernels.ops import takes_triton
    if takes_triton(device, kernels):
        from actorium.kernels.triton.sampling import TritonSampling
        return TritonSampling()
    return TorchSampling()
