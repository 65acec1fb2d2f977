"""Replaces the tokens of a recording so that the scheduler still plans as it did.

Plans depend on tokens only by which prompts begin alike, page by page (the prefix cache). So every
token is 0 but the last of each page, which is a keyed hash of everything up to and including it.
Equal beginnings stay equal, different ones differ (but for one in 2^31), and a token has another
replacement wherever it occurs: a substitution of ids would reveal a text by their frequencies. The
chain of hashes begins with random bytes that are drawn for each recording and never written.

Output gets into the cache, too. The plans show which sequence a result's rows belong to, by the
rule of `StepResult`.
"""

from __future__ import annotations

import os
from collections import deque
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import (
    Admit,
    Pooled,
    StepPlan,
    StepResult,
    Submit,
    TokenRules,
)

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
NOTHING = np.zeros(0, np.int32)
DIGEST = 16
"""Bytes of hash that the next page's hash continues; 4 of them become the token."""
GRAMMAR = "veiled"
"""Replaces every grammar."""
NEVER = 1 << 40
"""More tokens than any prompt has."""
SPARE = 4
"""Chains for each slot: results of two plans may be due while others have entered its slots."""


class Redactor:
    """The secret, and the hash of each running sequence so far."""

    def __init__(self, page_size: int, slots: int) -> None:
        """page_size: tokens; slots: the most that the worker may have."""
        self._page = page_size
        self._seed = os.urandom(DIGEST)
        chains = SPARE * (slots + 2)
        self._of_slot = np.arange(slots + 2, dtype=np.int64)
        """Chain of hashes of the sequence in each slot."""
        self._free = deque(range(slots + 2, chains))
        """The other chains, those freed last at the end: results may still be due to them."""
        self._digest = [self._seed] * chains
        """Hash of the whole pages of each chain."""
        self._tail = np.zeros((chains, page_size), np.int32)
        self._flat = self._tail.reshape(-1)
        self._fill = np.zeros(chains, np.int64)
        self._pages_left = np.zeros(slots + 2, np.int64)
        """Prompt tokens of each slot that no plan has computed yet."""
        self._plans: deque[tuple[int, Longs]] = deque()
        """(step, chain of each sampled row) of the plans that wait for a result."""
        self._decoded: bytes | None = None
        """The last plan's `decode`, unless slots were given away since, and its rows."""
        self._rows = np.zeros(0, np.int64)

    # --- prompts ---

    def redact_tokens(self, column: bytes) -> bytes:
        """Redact a sequence from its first token on. i4[n] -> i4[n]."""
        if len(column) % 4:
            return bytes(len(column))
        out = np.zeros(len(column) // 4, np.int32)
        self._fold(column, out)
        return out.tobytes()

    def _fold(self, column: bytes, out: Ints | None = None) -> bytes:
        """Hash of the column's whole pages; `out` gets the redacted last token of each."""
        digest, size = self._seed, 4 * self._page
        digests = []
        for at in range(0, len(column) - size + 1, size):
            digest = blake2b(digest + column[at:at + size], digest_size=DIGEST).digest()
            digests.append(digest)
        if out is not None and digests:
            out[self._page - 1::self._page] = tokens_of(digests)
        return digest

    def redact_submit(self, message: Submit) -> Submit:
        """The request without all that shows its text: no prompt, stop strings, biases, grammar or
        token rules; the salt of its prefixes becomes a hash."""
        rules, salt = message.rules, message.cache_salt.encode()
        return msgspec.structs.replace(
            message, prompt=self.redact_tokens(message.prompt),
            text=msgspec.structs.replace(message.text, stop=(), stop_regex=()),
            params=msgspec.structs.replace(message.params, logit_bias={}, logprob_ids=()),
            grammar=GRAMMAR if message.grammar else "",
            rules=None if rules is None else TokenRules(rules.vocab_size),
            cache_salt=blake2b(self._seed + salt, digest_size=DIGEST).hexdigest() if salt else "")

    # --- output ---

    def on_reset(self) -> None:
        """No plan made so far will get a result."""
        self._plans.clear()

    def on_plan(self, plan: StepPlan) -> None:
        """Note which sequences the plan samples."""
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
        # Of a prompt that is pooled no row is sampled, so that its end is never seen.
        unseen = 0 if admit.pooling is None else NEVER
        self._pages_left[admit.slot] = len(tokens) - admit.cached_len + unseen
        self._decoded = None

    def redact_result(self, result: StepResult) -> StepResult:
        """The result without vectors, and with its tokens redacted; all are 0 where the plan is not
        known any more (nor will the core know it)."""
        plans = self._plans
        while plans and plans[0][0] < result.step:
            plans.popleft()
        out = np.zeros(len(result.tokens) // 4, np.int32)
        if plans and plans[0][0] == result.step:
            self._redact_rows(plans.popleft()[1], result, out)
        return StepResult(result.epoch, result.step, result.counts, out.tobytes(), result.finish,
                          busy_us=result.busy_us, idle_us=result.idle_us,
                          drafts=bytes(len(result.drafts)), late_us=result.late_us,
                          encoded=result.encoded, encode_us=result.encode_us,
                          failed=[(slot, code, "") for slot, code, _ in result.failed],
                          pooled=[(slot, Pooled([0], b"")) for slot, _ in result.pooled])

    def _redact_rows(self, rows: Longs, result: StepResult, out: Ints) -> None:
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
        """Append a token to each of the chains: returns which of them end a page by it, and the
        redacted tokens of these."""
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
        return due, tokens_of(digests)


def tokens_of(digests: list[bytes]) -> Ints:
    """A token from each hash, 0 to 2^31 - 1. i4[n]"""
    words = np.frombuffer(b"".join(digests), np.int32).reshape(-1, DIGEST // 4)
    return words[:, 0] & np.int32(0x7FFFFFFF)
