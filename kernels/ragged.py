"""How the sequences of an extend step lie in chunks, made once a step and used by every recurrent
layer.

Each sequence's tokens are cut where its state is to be kept, and each piece into chunks of `size`
tokens, the last one padded. Chunks are numbered wave by wave: the first of every sequence, the
longest sequence first, then the second ones, and so on. So what depends on no state is one batched
product over all chunks, and the state runs through the waves, each a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 64


class ExtendRun(NamedTuple):
    """A sequence's tokens in an extend step."""

    row: int
    """Of the state pool: where its state comes from and goes to."""
    length: int
    saves: tuple[tuple[int, int], ...] = ()
    """(tokens, row): the state after so many of the tokens is also put there."""


class Wave(NamedTuple):
    """One chunk of every sequence that has so many."""

    start: int
    end: int
    """Chunk numbers; chunk `start + i` is of the i-th sequence."""
    saves: list[tuple[int, int]]
    """(i, row): the state of the i-th sequence after the wave is put there."""


class Spans(NamedTuple):
    """The tokens of a step, sequence by sequence."""

    sequences: Tensor
    """i32[S + 1, 3]: first token (row of T), tokens, first of its rows of `Ragged.tails`; the last
    one says where they all end."""
    blocks: Tensor
    """i32[blocks, 2]: sequence, and which of its tokens is the block's first."""


class Segments(NamedTuple):
    """The tokens of a step in chunks that follow one another within a sequence, cut where its state
    is to be kept. Each is i32, the sequences the longest first."""

    sequences: Tensor
    """[S, 3]: first piece, the piece after the last one, state row."""
    pieces: Tensor
    """[S + saves, 4]: first token (row of T), tokens (maybe 0), first chunk, and the row in which
    the state after them is put."""
    chunks: Tensor
    """[chunks, 2]: first token, tokens."""


@dataclass(slots=True)
class Ragged:
    """The layout of a step. S sequences, T tokens, N chunks of L tokens; W = width of the
    convolution, whose input has W - 1 rows before each sequence's tokens, in the step's order."""

    size: int
    """L"""
    runs: Sequence[ExtendRun]
    """In the step's order."""
    counts: list[int]
    """Tokens of each sequence, in the step's order."""
    rows: Tensor
    """i64[S]: state rows in the step's order."""
    by_length: Tensor
    """i64[S]: state rows, in the order of the waves."""
    waves: list[Wave]
    tokens: Tensor | None
    """i64[N * L]: the token (row of T) at each place, 0 for padding; None = as they come."""
    outputs: Tensor | None
    """i64[N * L]: the row of the convolution's output at each place; None = as they come."""
    real: Tensor | None
    """f32[N * L, 1]: 1, or 0 for padding; None = no padding."""
    places: Tensor | None
    """i64[T]: the place of each token; None = as they come."""
    tails: Tensor
    """i64[M, W - 1]: rows of the convolution's input that are the columns of M = S + saves."""
    tail_rows: Tensor
    """i64[M]: state rows those go to."""
    keeps: list[int]
    """Of the M, how many are each sequence's; they lie side by side, the one at its end last."""
    spans: Spans | None = None
    """`spans_of` this, once it was asked for."""
    segments: Segments | None = None
    """`segments_of` this, once it was asked for."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on the device, without waiting: from pinned memory, since a copy of more than
    64 KiB of other memory holds up the host until the device has come to it."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def spans_of(plan: Ragged, size: int) -> Spans:
    """The sequences of a step in blocks of up to `size` tokens, the same at each call; on the
    device of the plan, made once."""
    if plan.spans is None:
        counts, keeps = np.array([plan.counts, plan.keeps], np.int32)
        sequences = np.zeros((len(counts) + 1, 3), np.int32)
        sequences[1:, 0], sequences[1:, 2] = np.cumsum(counts), np.cumsum(keeps)
        sequences[:-1, 1] = counts
        each = -(-counts // size)
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), each)
        inside = np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(each) - each, each)
        blocks = np.stack((owner, inside * size), 1).astype(np.int32)
        both = torch.from_numpy(np.concatenate((sequences.reshape(-1), blocks.reshape(-1))))
        own = to_device(both, plan.rows.device)
        plan.spans = Spans(own[:sequences.size].view(-1, 3), own[sequences.size:].view(-1, 2))
    return plan.spans


def segments_of(plan: Ragged, size: int) -> Segments:
    """The tokens of a step in chunks of up to `size`, the same at each call; on the device of the
    plan, made once."""
    if plan.segments is None:
        order = sorted(range(len(plan.runs)), key=lambda i: -plan.runs[i].length)
        starts = _starts(plan.counts)
        sequences: list[tuple[int, ...]] = []
        pieces: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        for run, start in ((plan.runs[i], starts[i]) for i in order):
            at = 0
            sequences.append((len(pieces), len(pieces) + len(run.saves) + 1, run.row))
            for tokens, row in [*sorted(run.saves), (run.length, run.row)]:
                pieces.append((start + at, tokens - at, len(chunks), row))
                chunks += [(start + i, min(size, tokens - i)) for i in range(at, tokens, size)]
                at = tokens
        parts = [torch.tensor(part, dtype=torch.int32) for part in (sequences, pieces, chunks)]
        own = to_device(torch.cat([part.view(-1) for part in parts]), plan.rows.device)
        views = own.split([part.numel() for part in parts])
        plan.segments = Segments(*(view.view_as(part)
                                   for view, part in zip(views, parts, strict=True)))
    return plan.segments


def plan_ragged(
    runs: Sequence[ExtendRun], width: int, device: torch.device, chunk: int = CHUNK
) -> Ragged:
    """Returns the layout of these sequences. width: the convolution's."""
    pieces = [_pieces(run) for run in runs]
    longest = max(max(own) for own in pieces)
    size = min(chunk, 1 << (longest - 1).bit_length())
    cut = [_chunks(own, size) for own in pieces]
    order = sorted(range(len(runs)), key=lambda i: -len(cut[i]))
    starts = _starts([run.length for run in runs])
    waves, firsts, sizes, owners = _waves(runs, cut, order)
    total = sum(run.length for run in runs)
    first = torch.tensor([starts[i] for i in owners]) + torch.tensor(firsts)
    owner, held = torch.tensor(owners), torch.tensor(sizes)
    inside = torch.arange(size).expand(len(owners), size)
    real = inside < held[:, None]
    tokens = torch.where(real, first[:, None] + inside, 0)
    outputs = torch.where(real, tokens + owner[:, None] * (width - 1), 0)
    full = bool(real.all())
    plain = full and bool((tokens.flatten() == torch.arange(total)).all())
    places = torch.empty(total, dtype=torch.int64)
    places[tokens[real]] = torch.nonzero(real.flatten())[:, 0]
    tails, tail_rows = _tails(runs, starts, width)

    def there(x: Tensor) -> Tensor:
        return to_device(x, device)

    return Ragged(
        size, runs, [run.length for run in runs], there(torch.tensor([run.row for run in runs])),
        there(torch.tensor([runs[i].row for i in order])), waves,
        None if plain else there(tokens.flatten()),
        None if plain and len(runs) == 1 else there(outputs.flatten()),
        None if full else there(real.float().view(-1, 1)),
        None if plain else there(places), there(tails), there(tail_rows),
        [1 + len(run.saves) for run in runs])


def _pieces(run: ExtendRun) -> list[int]:
    """Lengths between the places where the state is kept."""
    cuts = sorted({tokens for tokens, _ in run.saves} | {run.length})
    return [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


def _chunks(pieces: list[int], size: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each chunk of a sequence."""
    out, at = [], 0
    for length in pieces:
        out += [(at + i, min(size, length - i)) for i in range(0, length, size)]
        at += length
    return out


def _starts(counts: list[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _waves(
    runs: Sequence[ExtendRun], cut: list[list[tuple[int, int]]], order: list[int]
) -> tuple[list[Wave], list[int], list[int], list[int]]:
    """The waves; first token within its sequence, tokens, and sequence of every chunk."""
    waves: list[Wave] = []
    firsts: list[int] = []
    sizes: list[int] = []
    owners: list[int] = []
    for number in range(len(cut[order[0]])):
        start, saves = len(owners), []
        for i, of in enumerate(order):
            if number >= len(cut[of]):
                break
            first, count = cut[of][number]
            firsts.append(first)
            sizes.append(count)
            owners.append(of)
            saves += [(i, row) for tokens, row in runs[of].saves if tokens == first + count]
        waves.append(Wave(start, len(owners), saves))
    return waves, firsts, sizes, owners


def _tails(runs: Sequence[ExtendRun], starts: list[int], width: int) -> tuple[Tensor, Tensor]:
    ends, rows = [], []
    for i, run in enumerate(runs):
        for tokens, row in [*run.saves, (run.length, run.row)]:
            ends.append(starts[i] + i * (width - 1) + tokens)
            rows.append(row)
    return torch.tensor(ends)[:, None] + torch.arange(width - 1), torch.tensor(rows)
