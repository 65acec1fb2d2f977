"""A mixture of experts, grouped: the rows of each expert in one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def route(logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts): [T, chosen] each, of the highest softmax probabilities.

    logits: [T, E]; weights have its dtype; normalised: they add up to 1.
    """
    weights, experts = logits.float().softmax(-1).topk(chosen, -1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def route_groups(
    scores: Tensor, bias: Tensor, groups: int, chosen_groups: int, chosen: int
) -> tuple[Tensor, Tensor]:
    """(scores, experts): [T, chosen] each, of the highest of scores + bias among the experts of the
    best groups, a group being as good as its two best (DeepSeek-V3, arXiv 2412.19437).

    scores: f32[T, E], above 0; bias: f32[E]. E is a multiple of groups.
    """
    biased = (scores + bias).unflatten(1, (groups, -1))
    if chosen_groups < groups:
        best = biased.topk(2, -1).values.sum(-1).topk(chosen_groups, -1).indices
        closed = torch.ones(biased.shape[:2], dtype=torch.bool, device=scores.device)
        closed.scatter_(1, best, False)
        biased = biased.masked_fill(closed.unsqueeze(-1), -torch.inf)
    experts = biased.flatten(1).topk(chosen, -1).indices
    return scores.gather(1, experts), experts


def mix_experts(x: Tensor, weights: Tensor, experts: Tensor,
                run: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """sum over each row's experts of weight * expert(row).

    x: [T, H]; weights, experts: [T, chosen]; run: each expert, [n, H] -> [n, H].
    """
    chosen = experts.shape[1]
    if len(x) == 1:
        alone = torch.cat([run[expert](x) for expert in experts[0].tolist()])
        return torch.bmm(weights.unsqueeze(1), alone.unsqueeze(0)).squeeze(1)
    sorted_experts, order = experts.flatten().sort(stable=True)
    counts = torch.bincount(sorted_experts, minlength=len(run)).tolist()
    grouped = x.index_select(0, order // chosen)
    out = torch.empty_like(grouped)
    at = 0
    for expert, count in zip(run, counts, strict=True):
        if count:
            out[at:at + count] = expert(grouped[at:at + count])
            at += count
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    parts = out.index_select(0, back).view(-1, chosen, x.shape[1])
    return torch.bmm(weights.unsqueeze(1), parts).squeeze(1)
