"""Keeps the answers of sequences that have left their slots, to make drafts of them for others.

Whose answers may be made drafts of for whom says the scheduler, by a number for each sequence
(`Admit.answers`). A worker that dies loses them, and nothing else: drafts never change tokens.
"""

from __future__ import annotations

import numpy as np

from actorium.gpu.step.tables import I32, SlotTables
from actorium.kernels.cpu.earlier_answers_cpu import add_answer, earlier_drafts
from actorium.kernels.reference.earlier_answers import EarlierAnswers
from actorium.kernels.reference.text_drafts import F64, TextGuesses, TextRules


class AnswerStore:
    """Answers, and how far the texts of the sequences in slots are known."""

    def __init__(self, tables: SlotTables, rules: TextRules, nbytes: int) -> None:
        self._tables, self._rules, self._answers = tables, rules, EarlierAnswers(nbytes)
        self._serials = np.full(tables.slots, -1)
        self._lens = np.zeros(tables.slots, np.int32)
        """Tokens of the sequence of that serial, as of the last step that sampled it."""

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return self._answers.nbytes

    def sampled(self, slots: I32) -> None:
        """A step has sampled these slots' sequences, and taken in how long they are."""
        self._serials[slots] = self._tables.drafts.serials(slots)
        self._lens[slots] = self._tables.seq_len[slots]

    def improve(self, slots: I32, guesses: TextGuesses, chances: F64) -> None:
        """Puts guesses of longer matches in the place of those that sequences found in themselves;
        chances: f64[n, most], of these slots' guesses, changed as they are."""
        t = self._tables
        earlier_drafts(self._answers, t.answers, t.history, t.seq_len, slots, guesses, chances,
                       self._rules)

    def release(self, slots: I32) -> None:
        """Keeps the answers of sequences that leave their slots. Host: i32[n]."""
        known = self._serials[slots] == self._tables.drafts.serials(slots)
        for slot in slots[known & (self._tables.answers[slots] > 0)].tolist():
            self._keep(slot)

    def _keep(self, slot: int) -> None:
        """With the end of the prompt, on which the first tokens of an answer follow."""
        t, end = self._tables, int(self._lens[slot])
        first = max(t.sequences[slot].prompt_len - self._rules.longest,
                    end - len(self._answers.text) // 2, 0)
        add_answer(self._answers, t.history[slot, first:end], int(t.answers[slot]))
        self._serials[slot] = -1
