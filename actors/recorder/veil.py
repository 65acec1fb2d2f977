"""Tokens made unreadable, so that the scheduler still plans as it did.

All that a plan knows of tokens is which prompts begin alike, page by page (the prefix cache). So
that is all that is kept: of each page but its last token nothing, and of that a keyed hash of
everything up to it, that token included. Equal beginnings stay equal, different ones differ (but
for one in 2^31), and no token is replaced alike in two places, as it would be by a substitution of
ids, which gives a text away by how often each occurs. The chain of hashes begins with random bytes
that are drawn for each recording and never written.

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

from actorium.actors.messages import Admit, StepPlan, StepResult, Submit, TokenRules

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
NOTHING = np.zeros(0, np.int32)
DIGEST = 16
"""Bytes that a page hands on to the next; 4 of them are told."""
VEILED = "veiled"
"""Instead of a grammar."""
SPARE = 4
"""Chains for each slot: results of two plans may be due while others have entered its slots."""


class Veil:
    """The secret, and where each running sequence stands."""

    def __init__(self, page_size: int, slots: int) -> None:
        """`slots`: the most that the worker may have."""
        self._page = page_size
        self._seed = os.urandom(DIGEST)
        chains = SPARE * (slots + 2)
        self._of_slot = np.arange(slots + 2, dtype=np.int64)
        """Chain of the sequence in each slot."""
        self._free = deque(range(slots + 2, chains))
        """The other chains; results may still be due to those that were freed last."""
        self._digest = [self._seed] * chains
        """Of the whole pages of each chain."""
        self._tail = np.zeros((chains, page_size), np.int32)
        self._flat = self._tail.reshape(-1)
        self._fill = np.zeros(chains, np.int64)
        self._pages_left = np.zeros(slots + 2, np.int64)
        """Tokens of each slot that no plan has extended over yet."""
        self._plans: deque[tuple[int, Longs]] = deque()
        """(step, chain of each sampled row) of the plans without a result."""
        self._decoded: bytes | None = None
        """The last plan's `decode`, unless slots have changed hands since, and its rows."""
        self._rows = np.zeros(0, np.int64)

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
        digest, size = self._seed, 4 * self._page
        digests = []
        for at in range(0, len(column) - size + 1, size):
            digest = blake2b(digest + column[at:at + size], digest_size=DIGEST).digest()
            digests.append(digest)
        if out is not None and digests:
            out[self._page - 1::self._page] = numbers(digests)
        return digest

    def submit(self, message: Submit) -> Submit:
        """The request without its words: no prompt, no stop strings, no biases, no grammar, no
        words of token rules; of the salt of its prefixes a hash."""
        rules, salt = message.rules, message.cache_salt.encode()
        return msgspec.structs.replace(
            message, prompt=self.tokens(message.prompt),
            text=msgspec.structs.replace(message.text, stop=(), stop_regex=()),
            params=msgspec.structs.replace(message.params, logit_bias={}, logprob_ids=()),
            grammar=VEILED if message.grammar else "",
            rules=None if rules is None else TokenRules(rules.vocab_size),
            cache_salt=blake2b(self._seed + salt, digest_size=DIGEST).hexdigest() if salt else "")

    # --- what is emitted ---

    def forget(self) -> None:
        """No result of a plan made so far will come."""
        self._plans.clear()

    def plan(self, plan: StepPlan) -> None:
        """Note whose rows the plan samples."""
        for admit in plan.admit:
            self._admit(admit)
        if plan.decode != self._decoded:
            self._decoded = plan.decode
            self._rows = self._of_slot[np.frombuffer(plan.decode, np.int32)]
        rows = self._rows
        if plan.extend:
            slots, counts = np.frombuffer(plan.extend, np.int32).reshape(-1, 2).T
            self._pages_left[slots] -= counts
            rows = np.concatenate((self._of_slot[slots[self._pages_left[slots] == 0]], rows))
        self._plans.append((plan.step, rows))

    def _admit(self, admit: Admit) -> None:
        self._free.append(int(self._of_slot[admit.slot]))
        chain = self._free.popleft()
        tokens = np.frombuffer(admit.tokens, np.int32)
        rest = len(tokens) % self._page
        self._digest[chain] = self._fold(admit.tokens)
        self._tail[chain, :rest] = tokens[len(tokens) - rest:]
        self._fill[chain] = rest
        self._of_slot[admit.slot] = chain
        self._pages_left[admit.slot] = len(tokens) - admit.cached_len
        self._decoded = None

    def result(self, result: StepResult) -> StepResult:
        """The result without what its tokens were. Those of a plan that is not known any more
        (the core will not know it either) are nothing."""
        plans = self._plans
        while plans and plans[0][0] < result.step:
            plans.popleft()
        out = np.zeros(len(result.tokens) // 4, np.int32)
        if plans and plans[0][0] == result.step:
            self._emit(plans.popleft()[1], result, out)
        return StepResult(result.epoch, result.step, result.counts, out.tobytes(), result.finish,
                          busy_us=result.busy_us, idle_us=result.idle_us,
                          drafts=bytes(len(result.drafts)), late_us=result.late_us)

    def _emit(self, rows: Longs, result: StepResult, out: Ints) -> None:
        tokens = np.frombuffer(result.tokens, np.int32)
        if result.counts == b"\1" * len(rows) and len(tokens) == len(rows):
            due, values = self._push(rows, tokens)
            out[due] = values
            return
        counts = np.frombuffer(result.counts, np.uint8).astype(np.int64)
        if len(counts) != len(rows) or counts.sum() != len(tokens):
            return
        starts = np.cumsum(counts) - counts
        for position in range(int(counts.max(initial=0))):
            having = counts > position
            at = starts[having] + position
            due, values = self._push(rows[having], tokens[at])
            out[at[due]] = values

    def _push(self, chains: Longs, tokens: Ints) -> tuple[Longs, Ints]:
        """One token more for each of the chains: which of them end a page by it, and the veiled
        tokens of these."""
        fill = self._fill[chains]
        self._flat[chains * self._page + fill] = tokens
        fill += 1
        self._fill[chains] = fill
        due = np.flatnonzero(fill == self._page)
        if not len(due):
            return due, NOTHING
        ended = chains[due]
        self._fill[ended] = 0
        pages, size = self._tail[ended].tobytes(), 4 * self._page
        digests = []
        for number, chain in enumerate(ended.tolist()):
            page = pages[number * size:(number + 1) * size]
            digest = blake2b(self._digest[chain] + page, digest_size=DIGEST).digest()
            self._digest[chain] = digest
            digests.append(digest)
        return due, numbers(digests)


def numbers(digests: list[bytes]) -> Ints:
    """A token made of each digest, 0 to 2^31 - 1. i4[n]"""
    words = np.frombuffer(b"".join(digests), np.int32).reshape(-1, DIGEST // 4)
    return words[:, 0] & np.int32(0x7FFFFFFF)
