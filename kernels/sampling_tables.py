"""The worker's resident tables as sampling and decoding see them: by slot, on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Columns of the parameter record, which gpu/step/tables.py fills: i32, from TEMPERATURE on float32
# bits.
(LIMIT, MIN_LEN, SEED_LOW, SEED_HIGH, TOP_K, COUNT_ROW, ROPE_DELTA, TEMPERATURE, TOP_P, MIN_P,
 REPETITION, PRESENCE, FREQUENCY) = range(13)
WIDTH = 13


class SamplingTables(NamedTuple):
    """Tables of all slots. Slot 0 is that of padding: zeros, which ask for nothing."""

    record: Tensor
    """i32[slots, WIDTH]; from TEMPERATURE on float32 bits. Temperature 0: the likeliest token;
    count row 0: no penalties; top_k 0: all."""
    eos: Tensor
    """i32[slots, E], -1 = none."""
    drafts: Tensor
    """i64[slots, most]: the tokens that a window's rows after its first follow on."""
    counts: Tensor | None = None
    """i32[rows, V] with `sampling.PROMPT_BIT`, by count row."""
    bias_ids: Tensor | None = None
    """i32[slots, B], distinct where the value is not 0."""
    bias_values: Tensor | None = None
    """i32[slots, B]: float32 bits, 0 = none."""


class RowLayout(NamedTuple):
    """How the sampled rows of a step lie: `single` rows of their own, then windows of `q_len`."""

    single: int = 0
    q_len: int = 1


class DecodeState(NamedTuple):
    """What each step changes of the tables of all slots."""

    last_token: Tensor
    """i64[slots]"""
    seq_len: Tensor
    """i32[slots]"""
    ended: Tensor
    """bool[slots]"""
    accepted: Tensor
    """i64[slots]: of the drafts of its last window."""


class WindowSizes(NamedTuple):
    """What the rows of decodes depend on, and the host knows."""

    q_len: int
    """Rows of each: its last token, and the drafts that follow on it."""
    page_size: int
    """A power of two."""
    width: int
    """Entries of each page table that are wanted."""
    max_len: int
    """Of any sequence."""


class WindowRows(NamedTuple):
    """The rows of B decodes, q_len each: T = B * q_len, sequence by sequence."""

    tokens: Tensor
    """i64[T]: the last token, then drafts."""
    positions: Tensor
    """i64[T], below the model's length: where rope turns them to, by the slot's `ROPE_DELTA`."""
    kv: Tensor
    """i64[groups, T]: where keys and values go; 0, in the sink page, for a sequence that has ended,
    and for drafts behind a sequence's limit."""
    pages: Tensor
    """i32[groups, B, width]: page tables."""
    lens: Tensor
    """i32[B]: tokens with the new ones among them; q_len for a sequence that has ended."""
    sampled: Tensor
    """i32[T]: index in its sequence of the token that each row samples."""
    row_slots: Tensor
    """i32[T]"""
