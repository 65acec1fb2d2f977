"""Proposes drafts that need no weights: what followed on a sequence's last tokens in its own text,
and where that is asked for in earlier answers.

The text is `SlotTables.history`: the whole prompt from its admission on, also where its pages were
in the prefix cache or it was preempted, and what was sampled since.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from actorium.actors.config.parsed_values import TEXT_METHODS, parse_speculative
from actorium.actors.config.tree import SpeculationConfig
from actorium.gpu.step.answer_store import AnswerStore
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.speculation import Proposer
from actorium.gpu.step.staging import Array, DeviceArrays
from actorium.gpu.step.tables import I32, SlotTables
from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.text_drafts_cpu import text_drafts
from actorium.kernels.reference.text_drafts import TextGuesses, TextRules, best_window

ROW_COST, MOST_COST = 0.08, 0.8
"""Of a step without drafts: what one more row for each sequence costs, times the sequences, until
it is measured; and what it costs where arithmetic is all that counts."""
SUFFIX_SHORTEST = 2
"""Tokens of a match: those of one alone are right too rarely."""


class DeviceTextProposer:
    """Makes drafts of each sequence's own text on a device, whose host does not know in time what
    was sampled: so nothing waits for how many there are. Each sequence has as many as are planned;
    behind those that the text gives stands token 0, which counts only where it is sampled."""

    pool: KVPagePool | None = None
    captured = False

    def __init__(self, tables: SlotTables, rules: TextRules) -> None:
        from actorium.kernels.triton.text_drafts import text_drafts as kernel
        self._tables, self._rules, self._kernel = tables, rules, kernel

    def needs_hidden(self, step: InputBatch, drafts: int) -> bool:
        """It does not; see `Proposer`."""
        return False

    def propose(self, step: InputBatch, drafts: int, sampled: Array, counts: Array,
                hidden: Tensor | None) -> None:
        """Takes the step's tokens in, and makes `drafts` of each sequence."""
        if sampled is None:
            return
        t, slots = self._tables, step.slots
        t.note_sampled(step.row_slots_d, step.positions, sampled)
        if drafts:
            bound = min(int(t.host_len[slots].max()), t.max_len)
            self._kernel(t.history, t.seq_len, step.slots_d, bound, self._rules, t.drafts.tokens,
                         drafts)

    def release(self, slots: I32) -> None:
        """Nothing is kept by slots."""


class TextProposer:
    """Makes drafts of each sequence's own text, on a CPU, where the host knows it in time."""

    pool: KVPagePool | None = None
    captured = False

    def __init__(self, tables: SlotTables, rules: TextRules, fixed: bool,
                 earlier: AnswerStore | None = None) -> None:
        """fixed: as many drafts as are planned, wherever the text gives so many; earlier: answers
        of which drafts are made as well."""
        assert tables.history is not None
        self.earlier = earlier
        self._tables, self._rules, self._history = tables, rules, tables.history
        self._fixed, self._guesses = fixed, TextGuesses(tables.slots, rules.most)
        self._serials = np.full(tables.slots, -1)
        """Of the sequences that the guesses are of."""

    def needs_hidden(self, step: InputBatch, drafts: int) -> bool:
        """It does not; see `Proposer`."""
        return False

    def propose(self, step: InputBatch, drafts: int, sampled: Array, counts: Array,
                hidden: Tensor | None) -> None:
        """Takes the step's tokens in, and makes at most `drafts` of each sequence; how many those
        are is in `DraftTables.made`."""
        if sampled is None:
            return
        t, slots = self._tables, step.slots
        t.note_sampled(step.row_slots_d, step.positions, sampled)
        if self.earlier is not None:
            self.earlier.sampled(slots)
        if not drafts:
            return
        serials = t.drafts.serials(slots)
        self._guesses.forget(slots[serials != self._serials[slots]])
        self._serials[slots] = serials
        chances = text_drafts(self._history, t.seq_len, slots, self._guesses, self._rules)
        if self.earlier is not None:
            self.earlier.improve(slots, self._guesses, chances)
        if not self._fixed:
            cost = step.draft_cost or min(ROW_COST * len(slots), MOST_COST)
            drafts = best_window(chances[:, :drafts], cost)
        t.drafts.made[slots] = np.minimum(self._guesses.count[slots], drafts)
        t.drafts.tokens[slots, :drafts] = self._guesses.tokens[slots, :drafts]

    def release(self, slots: I32) -> None:
        """Guesses are told apart by their sequences."""
        if self.earlier is not None:
            self.earlier.release(slots)


def text_proposers(config: SpeculationConfig, tables: SlotTables) -> dict[str, Proposer]:
    """The proposers by text that are asked for, by method; none where there is nothing to make
    drafts with: a device without Triton."""
    asked, arrays = parse_speculative(config.speculative), tables.arrays
    if tables.history is None or (isinstance(arrays, DeviceArrays) and triton_fault(arrays.device)):
        return {}
    return {method: _proposer(config, method, rules_of(config, method, most), tables, asked.fixed)
            for method, most in asked.methods.items() if method in TEXT_METHODS}


def _proposer(config: SpeculationConfig, method: str, rules: TextRules, tables: SlotTables,
              fixed: bool) -> Proposer:
    if isinstance(tables.arrays, DeviceArrays):
        return DeviceTextProposer(tables, rules)
    kept = config.suffix_global_bytes if method == "suffix" else 0
    return TextProposer(tables, rules, fixed, AnswerStore(tables, rules, kept) if kept else None)


def rules_of(config: SpeculationConfig, method: str, most: int) -> TextRules:
    """How a method guesses."""
    if method == "ngram":
        return TextRules(config.prompt_lookup_min, config.prompt_lookup_max, most)
    return TextRules(SUFFIX_SHORTEST, config.suffix_decoding_max_tree_depth, most, True,
                     config.suffix_decoding_max_spec_factor,
                     config.suffix_decoding_min_token_prob)
