"""Log-probabilities that requests ask for: which tokens' they are, and how results carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import RowLogprobs
from actorium.actors.params import ResolvedParams
from actorium.gpu.step.input_batch import PromptLogprobRows
from actorium.gpu.step.staging import Download
from actorium.gpu.step.tables import I32, SlotTables


def logprobs_count(params: ResolvedParams, vocab: int) -> int:
    """How many other tokens' log-probabilities are reported with a sampled token."""
    return min(len(params.logprob_ids) or params.logprobs, vocab)


def named_tokens(tables: SlotTables, slots: I32) -> I32 | None:
    """i32[rows, most]: the tokens whose logprobs the rows' requests name, -1 = the likeliest; most:
    what any of them shows. None where nobody names any."""
    params = [tables.sequences[slot].params for slot in slots.tolist()]
    if not any(own.logprob_ids for own in params):
        return None
    named = np.full((len(slots), max(logprobs_count(own, tables.vocab) for own in params)), -1,
                    np.int32)
    for row, own in zip(named, params, strict=True):
        row[:len(own.logprob_ids)] = own.logprob_ids
    return named


def row_logprobs(ranked: list[tuple[int, int, int]], values: Download | None,
                 counts: NDArray[np.uint8]) -> list[RowLogprobs]:
    """Of a step's sampled sequences. ranked: (sequence, its rows, alternatives) of those that want
    them; values: chosen, ranks, ids and others of all their rows; counts: u1[sequences], emitted.
    """
    if values is None:
        return []
    arrays, out, at = values.wait(), [], 0
    chosen, ranks, ids, top = (a.tobytes() for a in arrays)
    most = arrays[2].shape[1]
    for row, rows, k in ranked:
        count = int(counts[row])
        end = at + count
        if count > 1 and k < most:
            out.append(_pack(row, 0, arrays, at, end, k))
        elif count:
            first, last = 4 * most * at, 4 * (most * (end - 1) + k)
            out.append(RowLogprobs(row, 0, chosen[4 * at:4 * end], ranks[4 * at:4 * end],
                                   ids[first:last], top[first:last]))
        at += rows
    return out


def prompt_logprobs(prompts: Sequence[PromptLogprobRows],
                    values: Download | None) -> list[RowLogprobs]:
    """Of positions of prompts, in the order of `prompts`."""
    if values is None:
        return []
    arrays, out, at = values.wait(), [], 0
    for p in prompts:
        out.append(_pack(p.slot, p.start, arrays, at, at + len(p.tokens), p.k))
        at += len(p.tokens)
    return out


def _pack(row: int, start: int, arrays: list[NDArray[Any]], first: int, last: int,
          k: int) -> RowLogprobs:
    chosen, ranks, top_ids, top = (a[first:last] for a in arrays)
    return RowLogprobs(row, start, chosen.tobytes(), ranks.tobytes(), top_ids[:, :k].tobytes(),
                       top[:, :k].tobytes())
