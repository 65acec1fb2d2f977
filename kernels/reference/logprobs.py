"""Log-probabilities of the raw model distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Logprobs(NamedTuple):
    """Log-probabilities of one token per row, and of k others: the likeliest tokens, or named ones.
    """

    chosen: Tensor
    """f32[R]"""
    ranks: Tensor
    """i32[R], 1 = the likeliest; ties share the better rank."""
    top_ids: Tensor
    """i32[R, k]"""
    top: Tensor
    """f32[R, k], descending where they are the likeliest."""


def logprobs(logits: Tensor, tokens: Tensor, k: int, named: Tensor | None = None) -> Logprobs:
    """Returns log_softmax(logits) at tokens and at the k likeliest. logits: [R, V] of any float
    dtype, converted to f32; tokens: i64[R]; named: i64[R, k], tokens that replace the likeliest (-1
    = none does)."""
    logits = logits.float()
    norm = log_sum_exp(logits)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    ids, top = others(logits, norm, k, named)
    return Logprobs((chosen - norm).squeeze(1), ranks, ids, top)


SUMMED = 1024
"""Columns that are summed at once."""


def log_sum_exp(logits: Tensor) -> Tensor:
    """f32[R, 1], with the same bits for a row alone and among others. logits: f32[R, V]. torch's
    own sums of a long row go to several threads where there is one row, and to one where there are
    many."""
    most = logits.amax(-1, keepdim=True)
    shift = most.masked_fill(most.isinf(), 0.0)
    terms = (logits - shift).exp_()
    whole = terms.shape[1] // SUMMED * SUMMED
    parts = terms[:, :whole].unflatten(1, (-1, SUMMED)).sum(-1)
    return torch.cat((parts, terms[:, whole:].sum(-1, keepdim=True)), 1).sum(
        -1, keepdim=True).log_().add_(shift)


def others(logits: Tensor, norm: Tensor, k: int, named: Tensor | None) -> tuple[Tensor, Tensor]:
    """(`top_ids`, `top`) of `logprobs`. norm: f32[R, 1], the logarithm of the sum of exponentials.
    """
    top, ids = logits.topk(k, dim=-1)
    if named is not None:
        ids = torch.where(named < 0, ids, named)
        top = logits.gather(1, ids)
    return ids.int(), top - norm


def join(parts: list[Logprobs]) -> Logprobs:
    """Concatenates the rows of several."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
