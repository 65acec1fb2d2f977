"""Computes what a sequence may sample next, from its position in its grammar and its token rules.

A grammar's masks come from the vocabulary, many sequences at once (`structured_output`); token
rules (a set of allowed tokens, sequences of tokens that must not be completed) narrow them, or
stand alone. A thought that has all its tokens leaves nothing but its end. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actorium.actors.config.reasoning_formats import REASONING_FORMATS
from actorium.actors.messages import ThoughtRule, TokenRules
from actorium.actors.params import ResolvedParams
from actorium.actors.structured.thought_state import (
    AFTER,
    BudgetState,
    ThoughtBudget,
    ThoughtState,
)

U32 = NDArray[np.uint32]
NONE_LEFT = "bad_words: they and allowed_token_ids leave no token to sample"
FORBIDDEN = "bad_words: a token that they or allowed_token_ids forbid"


class TokenMatcher(Protocol):
    """The position of a sequence in its grammar (`grammar.GrammarMatcher`)."""

    consumed: int

    @property
    def error(self) -> str: ...

    def accept(self, tokens: Sequence[int]) -> bool: ...

    def forced(self) -> list[int]: ...


class TokenBytes(Protocol):
    """The texts of tokens (`grammar.GrammarVocabulary`)."""

    size: int

    def bytes_of(self, token: int) -> bytes: ...

    def first_of(self, text: bytes) -> U32: ...


class ThoughtGuide:
    """The budget of a request's thoughts, in tokens; its choices share it."""

    def __init__(self, rule: ThoughtRule, words: TokenBytes) -> None:
        self._budget = ThoughtBudget(REASONING_FORMATS[rule.format], rule.budget, rule.opened)
        self._words, self._all = words, _all(words.size)
        self.start = self._budget.start
        self.may_act = self._budget.may_act

    def after(self, state: BudgetState, token: int) -> BudgetState:
        """Returns the state behind another token."""
        return self._budget.after(state, self._words.bytes_of(token))

    def forced(self, state: BudgetState) -> U32 | None:
        """Returns the only token that may follow, as bits; None = there are several."""
        text = self._budget.due(state)
        return self._words.first_of(text) if text else None

    def narrow(self, state: BudgetState, bits: U32 | None) -> U32 | None:
        """Returns what else may follow of what is allowed (None = everything)."""
        barred = self._budget.barred(state)
        if not barred:
            return bits
        allowed = self._all if bits is None else bits
        left = allowed & ~self._words.first_of(barred)
        return left if left.any() else allowed


class BadWordTree:
    """A trie of forbidden token sequences."""

    __slots__ = ("forbidden_next", "next")

    def __init__(self) -> None:
        self.next: dict[int, BadWordTree] = {}
        self.forbidden_next: list[int] = []
        """Tokens that must not follow the sequence that ends at this node."""


class TokenRuleFilter:
    """A request's token rules, ready to be applied; its choices share it.

    Bad words follow vLLM: a sequence of tokens is prevented by forbidding its last one where the
    completion, the prompt left aside, ends with all before it.
    """

    def __init__(self, rules: TokenRules, params: ResolvedParams, has_grammar: bool) -> None:
        """With a grammar the end tokens stay allowed: they say that it is complete."""
        self._open = not (rules.allowed or rules.bad_words)
        self._base = bits_of(np.frombuffer(rules.allowed, np.int32), rules.vocab_size)
        if not rules.allowed:
            self._base[:] = _all(rules.vocab_size)
        elif has_grammar:
            self._base |= bits_of(np.array(params.eos_ids, np.int32), rules.vocab_size)
        self._after = BadWordTree()
        """The tokens before the last one of each word, read backwards."""
        self.memory = 1
        """How many of the last tokens matter."""
        for word in rules.bad_words:
            *before, last = np.frombuffer(word, np.int32).tolist()
            if before:
                node = self._after
                for token in reversed(before):
                    node = node.next.setdefault(token, BadWordTree())
                node.forbidden_next.append(last)
                self.memory = max(self.memory, len(before))
            else:
                self._base[last // 32] &= ~np.uint32(1 << last % 32)
        self._min_tokens = params.min_tokens
        self._held = ~bits_of(np.array(params.eos_ids, np.int32), rules.vocab_size)
        """All tokens but those that are held back until `min_tokens`."""

    def narrow(self, bits: U32 | None, tail: Sequence[int], emitted: int) -> U32 | None:
        """Returns what may follow the last tokens `tail` of `emitted` tokens, given what else is
        allowed (None = everything); None if nothing is."""
        found = self._base if bits is None else bits & self._base
        if barred := self._forbidden_next(tail):
            found = found.copy()
            for token in barred:
                found[token // 32] &= ~np.uint32(1 << token % 32)
        possible = found & self._held if emitted < self._min_tokens else found
        return found if possible.any() else None

    def allows(self, token: int, tail: Sequence[int]) -> bool:
        """Returns whether `token` may follow `tail`."""
        if self._open:  # as in a recording, whose tokens belong to no vocabulary
            return True
        return bool(self._base[token // 32] >> np.uint32(token % 32) & 1) \
            and token not in self._forbidden_next(tail)

    def _forbidden_next(self, tail: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        node = self._after
        for token in reversed(tail):
            if token not in node.next:
                break
            node = node.next[token]
            tokens += node.forbidden_next
        return tokens


class SequenceGuide:
    """The state of one sequence, as far as it decides what may be emitted next."""

    def __init__(self, matcher: TokenMatcher | None, rules: TokenRuleFilter | None,
                 thought: ThoughtGuide | None = None) -> None:
        self.matcher = matcher
        self._rules, self._thought = rules, thought
        self._spent = BudgetState(ThoughtState(AFTER)) if thought is None else thought.start
        self._tail: list[int] = []
        self._failed = ""
        self.consumed = 0
        """Tokens accepted so far."""

    @property
    def error(self) -> str:
        """Why the sequence cannot continue; empty while it can."""
        if self._failed or self.matcher is None or not self.matcher.error:
            return self._failed
        return f"structured: the grammar cannot go on: {self.matcher.error}"

    def decides(self, emitted: int) -> bool:
        """Returns whether it may decide a token of the next step, behind `emitted` tokens at the
        most: until a thought can have all its tokens, its budget changes nothing."""
        return self.matcher is not None or self._rules is not None or (
            self._thought is not None
            and self._thought.may_act(self._spent, emitted - self.consumed))

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advances by these tokens; returns False, and sets `error`, if they are not allowed."""
        self.consumed += len(tokens)
        if self.matcher is not None and not self.matcher.accept(tokens):
            self._failed = "structured: the grammar cannot go on: " + (
                self.matcher.error or "a token that it does not allow")
        for token in tokens:
            if self._rules is not None:
                if not self._rules.allows(token, self._tail) and not self._forces(token):
                    self._failed = self._failed or FORBIDDEN
                self._tail.append(token)
            if self._thought is not None:
                self._spent = self._thought.after(self._spent, token)
        if self._rules is not None:
            del self._tail[:-self._rules.memory]
        return not self.error

    def _forces(self, token: int) -> bool:
        """Returns whether the thought's budget asks for the token, which no other rule forbids."""
        forced = None if self._thought is None else self._thought.forced(self._spent)
        return forced is not None and bool(forced[token // 32] >> np.uint32(token % 32) & 1)

    def rows(self, bits: Sequence[Any] | None, drafts: Sequence[int]) -> list[Any]:
        """Returns u32[words] for the next token and for those after each draft, None where all are
        allowed. bits: the grammar's; where it has fewer rows, what follows is never sampled. Sets
        `error` if no next token is allowed."""
        masks: list[Any] = []
        tokens, spent = [*self._tail, *drafts], self._spent
        for place in range(1 + len(drafts) if bits is None else len(bits)):
            found = None if bits is None else bits[place]
            if place and self._thought is not None:
                spent = self._thought.after(spent, drafts[place - 1])
            forced = None if self._thought is None else self._thought.forced(spent)
            if forced is not None and (found is None or (found & forced).any()):
                masks.append(forced)
                continue
            if self._rules is not None:
                before = tokens[:len(self._tail) + place]
                found = self._rules.narrow(found, before[-self._rules.memory:],
                                           self.consumed + place)
                if found is None:
                    if not place:
                        self._failed = NONE_LEFT
                    # Further on it comes to this only if all drafts before are accepted; whatever
                    # is sampled then is forbidden, and ends the sequence when it is taken.
                    break
            masks.append(found if self._thought is None else self._thought.narrow(spent, found))
        return masks


def bits_of(ids: NDArray[np.int32], size: int) -> U32:
    """Returns u32[ceil(size / 32)] with the bits of these tokens set."""
    flags = np.zeros(-(-size // 32) * 32, np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _all(size: int) -> U32:
    return bits_of(np.arange(size, dtype=np.int32), size)
