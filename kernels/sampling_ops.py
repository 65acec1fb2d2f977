"""Sampling on a device: the interface of its kernels. On a CPU numpy samples, see
`cpu.sampling_cpu`.

R = sampled rows of a step, S = its sampled sequences, V = vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from actorium.kernels.reference.logprobs import Logprobs
from actorium.kernels.sampling_tables import (
    DecodeState,
    RowLayout,
    SamplingTables,
    WindowRows,
    WindowSizes,
)


class SamplingOps(ABC):
    """A backend's sampling kernels. None waits for the device, and no shape depends on data, so
    each can be captured in a CUDA graph."""

    name: str
    commits = False
    """Whether `commit` and `commit_likeliest` are there."""
    fills = False
    """Whether `fill` is there."""

    @abstractmethod
    def adjust(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               layout: RowLayout, penalises: bool, biases: bool, holds: bool) -> Tensor:
        """Penalties, bias and held-back end tokens on the rows whose slots ask for them; what no
        row wants can be left out. Returns what was changed, f32[R, V].

        logits: [R, V], in place if f32, else copied; slots: i32[R]; positions: i32[R], index of the
        token that each row samples. A row of a window counts the drafts before it as output.
        """

    @abstractmethod
    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Make the tokens impossible whose bit is not set, in place. logits: f32[R, V]; rows:
        i32[n], distinct; words: i32[n, ceil(V / 32)], low bits first."""

    @abstractmethod
    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
               samples: bool, truncates: bool, out: Tensor | None = None) -> Tensor:
        """One token a row, i64[R], in `out` if given: drawn with its slot's seed and parameters at
        its position, or the likeliest where temperature is 0. logits: [R, V], any float dtype;
        slots, positions: i32[R]; samples, truncates: whether any row does."""

    @abstractmethod
    def logprobs(self, logits: Tensor, tokens: Tensor, k: int,
                 named: Tensor | None = None) -> Logprobs:
        """log_softmax(logits) at `tokens` i64[R], and at the k likeliest tokens or, where not -1,
        at those `named` i64[R, k]. logits: [R, V], any float dtype."""

    def fill(self, slots: Tensor, progress: DecodeState, drafts: Tensor, record: Tensor,
             tables: Tensor, lengths: WindowSizes, out: WindowRows) -> None:
        """The rows of a step's decodes, read from the tables, into `out`. slots: i32[B]; drafts:
        i64[slots, most]; record: i32[slots, WIDTH]; tables: i32[groups, slots, P], the page tables.

        Raises `TypeError` unless `fills`.
        """
        raise TypeError(f"{self.name}: steps compute their rows themselves")

    def commit(self, slots: Tensor, positions: Tensor, tokens: Tensor, tables: SamplingTables,
               progress: DecodeState, layout: RowLayout, counts: bool,
               force: tuple[float, ...] = (), packed: Tensor | None = None) -> Tensor:
        """Write the sampled tokens i64[R] to the tables, as far as the drafts before them are
        accepted, and decide which sequences end. Returns i64[2 + q_len, S], in `packed` if given:
        tokens emitted, finish (0 goes on, 1 end token, 2 length), then the tokens by place.

        slots: i32[S]; positions: i32[R]; counts: whether any row has penalties, whose counts
        follow; force: accept drafts with these probabilities, by place, whatever was sampled.
        Raises `TypeError` unless `commits`.
        """
        raise TypeError(f"{self.name}: the sampler writes the tables itself")

    def commit_likeliest(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
        progress: DecodeState, layout: RowLayout, counts: bool, force: tuple[float, ...] = (),
        tokens: Tensor | None = None, packed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`choose` for rows that are all greedy, then `commit`. logits: [R, V]. Returns the tokens
        i64[R], in `tokens` if given, and what `commit` returns."""
        raise TypeError(f"{self.name}: the sampler writes the tables itself")
