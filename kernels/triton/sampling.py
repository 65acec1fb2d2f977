"""Sampling in Triton, in a few launches a step."""

from __future__ import annotations

from torch import Tensor

from actorium.kernels.record import DecodeRows, DecodeState, RowLayout, SamplingTables, WindowSizes
from actorium.kernels.reference.logprobs import Logprobs
from actorium.kernels.sampling_ops import TorchSampling
from actorium.kernels.triton import commit, draw, fill, logprobs, masks, penalties


class TritonSampling(TorchSampling):
    """On CUDA devices, and in Triton's interpreter."""

    name = "triton"
    commits = True
    fills = True

    def fill(self, slots: Tensor, progress: DecodeState, drafts: Tensor, record: Tensor,
             tables: Tensor, lengths: WindowSizes, out: DecodeRows) -> None:
        fill.fill(slots, progress, drafts, record, tables, lengths, out)

    def adjust(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               layout: RowLayout, penalises: bool, biases: bool, holds: bool) -> Tensor:
        return penalties.adjust(logits, slots, positions, tables, layout, penalises, biases, holds)

    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        masks.mask(logits, rows, words)

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               samples: bool, truncates: bool, out: Tensor | None = None) -> Tensor:
        return draw.choose(logits, slots, positions, tables, samples, truncates, out=out)

    def commit(self, slots: Tensor, positions: Tensor, tokens: Tensor, tables: SamplingTables,
               progress: DecodeState, layout: RowLayout, counts: bool,
               force: tuple[float, ...] = (), told: Tensor | None = None) -> Tensor:
        return commit.commit(slots, positions, tokens, tables, progress, layout, counts, force,
                             told)

    def commit_likeliest(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
        progress: DecodeState, layout: RowLayout, counts: bool, force: tuple[float, ...] = (),
        tokens: Tensor | None = None, told: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return commit.commit_likeliest(logits, slots, positions, tables, progress, layout, counts,
                                       force, tokens, told)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int,
                 named: Tensor | None = None) -> Logprobs:
        return logprobs.logprobs(logits, tokens, k, named)
