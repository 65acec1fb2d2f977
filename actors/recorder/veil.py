"""Tokens made unreadable, so that the scheduler still plans as it did.

All that a plan knows of tokens is which prompts begin alike, page by page (the prefix cache). So
that is all that is kept: of each page but its last token nothing, and of that a keyed hash of
everything up to it, that token included. Equal beginnings stay equal, different ones differ (but
for one in 2^31), and no token is replaced alike in two places, as it would be by a substitution of
ids, which gives a text away by how often each occurs. The key is drawn for each recording and
never written.

What is emitted ends up in the cache, too. Which sequence a result's rows belong to is read off the
plans, by the rule of `StepResult`.
"""

from __future__ import annotations

import os
from collections import deque
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import Admit, StepPlan, StepResult, Submit

Ints = NDArray[np.int32]
DIGEST = 16
SPARE = 4
"""Chains for each slot: results of two plans may be on their way while others enter their slots."""


class Veil:
    """The key, and where each running sequence stands."""

    def __init__(self, page_size: int, slots: int) -> None:
        """`slots`: the most that the worker may have."""
        self._page = page_size
        self._key = os.urandom(32)
        self._chains = SPARE * (slots + 1)
        self._next = 0
        self._of_slot = np.zeros(slots + 2, np.int64)
        """Chain of the sequence in each slot."""
        self._digest = [bytes(DIGEST)] * self._chains
        """Of the whole pages of each chain."""
        self._tail = np.zeros((self._chains, page_size), np.int32)
        self._fill = np.zeros(self._chains, np.int64)
        self._left = np.zeros(slots + 2, np.int64)
        """Tokens of each slot that no plan has extended over yet."""
        self._rows: deque[tuple[int, NDArray[np.int64]]] = deque()
        """(step, chain of each sampled row) of the plans without a result."""

    # --- prompts ---

    def tokens(self, column: bytes) -> bytes:
        """A whole sequence from its first token. i4[n] -> i4[n]."""
        if len(column) % 4:
            return bytes(len(column))
        out = np.zeros(len(column) // 4, np.int32)
        self._fold(column, out)
        return out.tobytes()

    def _fold(self, column: bytes, out: Ints | None = None) -> bytes:
        """Digest of the column's whole pages; `out` gets their veiled last tokens."""
        digest, step, last = bytes(DIGEST), 4 * self._page, self._page - 1
        for at in range(0, len(column) - step + 1, step):
            digest = self._hash(digest, column[at:at + step])
            if out is not None:
                out[at // 4 + last] = number(digest)
        return digest

    def _hash(self, before: bytes, page: bytes) -> bytes:
        return blake2b(before + page, digest_size=DIGEST, key=self._key).digest()

    def submit(self, message: Submit) -> Submit:
        """The request without its words: no prompt, no stop strings, no biases."""
        return msgspec.structs.replace(
            message, prompt=self.tokens(message.prompt),
            text=msgspec.structs.replace(message.text, stop=()),
            params=msgspec.structs.replace(message.params, logit_bias={}))

    # --- what is emitted ---

    def forget(self) -> None:
        """No result of a plan made so far will come."""
        self._rows.clear()

    def plan(self, plan: StepPlan) -> None:
        """Note whose rows the plan samples."""
        for admit in plan.admit:
            self._admit(admit)
        rows = [self._of_slot[np.frombuffer(plan.decode, np.int32)]]
        if plan.extend:
            slots, counts = np.frombuffer(plan.extend, np.int32).reshape(-1, 2).T
            self._left[slots] -= counts
            rows.insert(0, self._of_slot[slots[self._left[slots] == 0]])
        self._rows.append((plan.step, np.concatenate(rows)))

    def _admit(self, admit: Admit) -> None:
        chain = self._next
        self._next = (chain + 1) % self._chains
        tokens = np.frombuffer(admit.tokens, np.int32)
        rest = len(tokens) % self._page
        self._digest[chain] = self._fold(admit.tokens)
        self._tail[chain, :rest] = tokens[len(tokens) - rest:]
        self._fill[chain] = rest
        self._of_slot[admit.slot] = chain
        self._left[admit.slot] = len(tokens) - admit.cached_len

    def result(self, result: StepResult) -> StepResult:
        """The result without what its tokens were. Those of a plan that is not known any more
        (the core will not know it either) are nothing."""
        while self._rows and self._rows[0][0] < result.step:
            self._rows.popleft()
        rows = None
        if self._rows and self._rows[0][0] == result.step:
            rows = self._rows.popleft()[1]
        out = np.zeros(len(result.tokens) // 4, np.int32)
        counts = np.frombuffer(result.counts, np.uint8).astype(np.int64)
        if rows is not None and len(rows) == len(counts) and counts.sum() == len(out):
            self._emit(rows, counts, np.frombuffer(result.tokens, np.int32), out)
        return msgspec.structs.replace(result, tokens=out.tobytes(), logprobs=[],
                                       prompt_logprobs=[], drafts=b"")

    def _emit(self, rows: NDArray[np.int64], counts: NDArray[np.int64], tokens: Ints,
              out: Ints) -> None:
        starts = np.cumsum(counts) - counts
        for position in range(int(counts.max(initial=0))):
            having = counts > position
            at = starts[having] + position
            self._push(rows[having], tokens[at], at, out)

    def _push(self, chains: NDArray[np.int64], tokens: Ints, at: NDArray[np.int64],
              out: Ints) -> None:
        """One token more for each of the chains."""
        fill = self._fill[chains]
        self._tail[chains, fill] = tokens
        fill += 1
        self._fill[chains] = fill
        for index in np.flatnonzero(fill == self._page).tolist():
            chain = chains[index]
            digest = self._hash(self._digest[chain], self._tail[chain].tobytes())
            self._digest[chain], self._fill[chain] = digest, 0
            out[at[index]] = number(digest)


def number(digest: bytes) -> int:
    """A token made of a digest, 0 to 2^31 - 1."""
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
