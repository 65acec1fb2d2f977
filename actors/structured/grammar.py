"""Structured output: checks and compiles grammars, and computes which tokens may come next.

llguidance (https://github.com/guidance-ai/llguidance) does the work: derivatives of regular
expressions below an Earley parser, over a trie of the vocabulary. Its limits are fuel, not time, so
that what compiles once compiles again. Used by the tokenizer, which refuses bad grammars, and by
the scheduler, which makes the masks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorium.actors.config.reasoning_formats import HARMONY, REASONING_FORMATS
from actorium.actors.config.retention import GRAMMAR_BYTES
from actorium.actors.detokenizer.incremental import byte_of_char
from actorium.actors.errors import InvalidRequest
from actorium.actors.gateway.parsers.call_formats import call_marks
from actorium.actors.params import WRITTEN, Structured
from actorium.actors.structured.schema_patterns import in_words
from actorium.actors.structured.schemas import closed
from actorium.actors.structured.structural_tags import ONE_SIDED, lark_of
from actorium.actors.structured.text_state import MOST, TextLimits, TextState, limits_of
from actorium.actors.structured.thought_state import (
    AFTER,
    BEFORE,
    INSIDE,
    ThoughtMarks,
    ThoughtState,
)

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 50_000,
    "step_max_items": 50_000, "max_lexer_states": 100_000, "max_grammar_size": 500_000,
    "verbose_errors": False}
"""Compiling may still take longer than a request should wait, so the tokenizer tries it in a
killable process first."""
ROWS = (2000, 400, 64)
"""Earley items of a row, by the number of `params.WRITTEN` before a grammar. The worst mask of an
ambiguous grammar takes some 40 ms with the second, 8 ms with the third; a schema's take 3 ms with
the first, which an object of 500 optional properties needs."""
TRIED = 4
"""Tokens that a new grammar is advanced by as a check: some fail only behind the first."""
COMPILED_BYTES, COMPILED_FACTOR = 160 << 10, 150
"""Bytes of a compiled grammar, and bytes for each of its text, as measured for schemas of 1 to 58
kB with a vocabulary of 49,152."""
LARGE = 16_384
"""Tokens of a vocabulary from which on masks are computed on several threads."""
THREADS = 8
"""The most threads."""
PLAIN = "\n".join(mark for name, row in REASONING_FORMATS.items() if name != HARMONY
                  for mark in (*row.begin, *row.end, *row.answer))
"""Marks of thoughts, which are text for grammars also where they are special tokens."""
U32 = NDArray[np.uint32]


def memory_of(grammar: str) -> int:
    """Estimates the bytes of a compiled grammar."""
    return COMPILED_BYTES + COMPILED_FACTOR * len(grammar)


def _with_plain_marks(tokenizer: Path) -> str:
    """Returns the tokenizer.json with added tokens that are text in its vocabulary, such as
    `</think>` and `<tool_call>` of many models, and with marks of calls and of thoughts that are
    special tokens of some: llguidance takes each special token, and each in angle brackets, for one
    that no text of a grammar matches. Gemma 4's marks and harmony's stay: their grammars name them
    as special tokens, and GGUF files have them as text."""
    given = json.loads(tokenizer.read_bytes())
    vocabulary, added = given["model"].get("vocab"), given.get("added_tokens") or []
    in_bytes = "ByteLevel" in json.dumps(given.get("decoder"))
    calls = call_marks()
    marks = [one for one in added if not any(letter.isspace() for letter in one["content"])
             and ONE_SIDED.fullmatch(one["content"]) is None
             and (one["content"] in calls or one["content"] in PLAIN if one["special"]
                  else in_bytes or one["content"].isascii())]
    if not isinstance(vocabulary, dict) or not marks:
        return str(tokenizer)
    letters = {byte: char for char, byte in byte_of_char().items()}
    vocabulary.update({
        "".join([letters[byte] for byte in one["content"].encode()]) if in_bytes
        else one["content"]: one["id"] for one in marks})
    given["added_tokens"] = [one for one in added if one not in marks]
    # A token that is not in the vocabulary would get the next free id.
    vocabulary.update({one["content"]: one["id"] for one in given["added_tokens"]})
    return json.dumps(given)


class GrammarVocabulary:
    """A tokenizer's vocabulary in the form that grammars need."""

    def __init__(self, tokenizer: Path, size: int, eos: Sequence[int]) -> None:
        """tokenizer: a tokenizer.json; size: of the model's vocabulary, tokens without text
        included; eos: the tokens that are allowed when a grammar is complete."""
        from llguidance import LLTokenizer

        self.size, self.words = size, -(-size // 32)
        self._tokens = LLTokenizer(_with_plain_marks(tokenizer), n_vocab=size, eos_token=list(eos))
        self._kept: dict[str, Any] = {}
        """Compiled grammars, or the error of each; least recently used first."""
        self.kept_bytes = 0
        """The sum of `memory_of` them."""
        self._threads: Any = None
        self._digits: U32 | None = None

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Returns a matcher at the start of the grammar. Raises `InvalidRequest` if it does not
        compile."""
        if grammar not in self._kept:
            self.keep(grammar, self.compile(grammar))
        compiled = self._kept[grammar] = self._kept.pop(grammar)
        if isinstance(compiled, InvalidRequest):
            raise InvalidRequest(compiled.message, compiled.param)
        return GrammarMatcher(compiled.deep_copy(), self, limits_of(grammar))

    def knows(self, grammar: str) -> bool:
        """Returns whether `matcher` answers at once."""
        return grammar in self._kept

    def compile(self, grammar: str) -> Any:
        """Returns what `keep` takes: the compiled grammar, or why it does not compile. Runs on any
        thread; others run meanwhile."""
        try:
            return self._compile(grammar)
        except InvalidRequest as error:
            return error

    def keep(self, grammar: str, compiled: Any) -> None:
        """Caches a result of `compile`; least recently used ones go when `GRAMMAR_BYTES` are
        exceeded."""
        if self._kept.pop(grammar, None) is None:
            self.kept_bytes += memory_of(grammar)
        self._kept[grammar] = compiled
        while self.kept_bytes > GRAMMAR_BYTES and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self.kept_bytes -= memory_of(oldest)

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[U32]]:
        """Returns `GrammarMatcher.masks` of each matcher and its drafts, in parallel where that is
        faster."""
        if len(wanted) < 2 or self.size < LARGE:
            return [matcher.masks(drafts) for matcher, drafts in wanted]
        return self._masks_in_parallel(wanted)

    def _masks_in_parallel(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]
                           ) -> list[list[U32]]:
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor(num_threads=min(len(os.sched_getaffinity(0)), THREADS))
        window = 1 + max(len(drafts) for _, drafts in wanted)
        grid = np.zeros((len(wanted), window, self.words), np.uint32)
        # One call takes matchers with drafts only, the other those without only.
        drafted: list[tuple[Any, int, list[int]]] = []
        plain: list[tuple[Any, int]] = []
        for at, (matcher, drafts) in enumerate(wanted):
            if drafts:
                drafted.append((matcher.inner, window * at, list(drafts)))
            else:
                plain.append((matcher.inner, window * at))
        into = grid.ctypes.data, 4 * self.words, window * len(wanted)
        if plain:
            self._threads.unsafe_compute_mask_ptr(plain, *into)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *into)
        # Rows that were not computed are still zero; a computed mask never is.
        return [matcher.narrowed([bits for bits in rows if bits.any()], drafts)
                for (matcher, drafts), rows in zip(wanted, grid, strict=True)]

    @property
    def no_digits(self) -> U32:
        """Returns u32[words] of the tokens that do not begin with a digit."""
        if self._digits is None:
            from llguidance import LLMatcher

            digits = LLMatcher(self._tokens, LLMatcher.grammar_from_regex("[0-9](?s:.*)"))
            bits: U32 = np.frombuffer(digits.compute_bitmask(), np.uint32)
            self._digits = ~bits[:self.words]
        return self._digits

    def first_of(self, text: bytes) -> U32:
        """Returns u32[words] with the first token of a text alone: of a mark that is a token, that.
        """
        bits = np.zeros(self.words, np.uint32)
        shown = text.decode(errors="ignore")  # it may begin within a character
        ways = (self._tokens.tokenize_str(shown, parse_special=True),
                self._tokens.greedy_tokenize(shown)) if shown.encode() == text else ()
        whole = next((ids for ids in ways if len(ids) == 1), self._tokens.tokenize_bytes(text))
        bits[whole[0] // 32] = 1 << whole[0] % 32
        return bits

    def bytes_of(self, token: int) -> bytes:
        """Returns a token's text."""
        return bytes(self._tokens.decode_bytes([token]))

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        text = grammar.lstrip(WRITTEN)
        row = ROWS[min(len(grammar) - len(text), len(ROWS) - 1)]
        compiled = LLMatcher(self._tokens, text, log_level=0, limits=LLParserLimits(
            max_items_in_row=row, **LIMITS))
        first = compiled.deep_copy()
        for _ in range(TRIED):
            if first.is_error() or first.is_stopped():
                break
            # Some grammars turn out only now to allow nothing.
            mask = np.frombuffer(first.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if len(allowed):
                first.consume_token(int(allowed[len(allowed) // 2]))
        if first.is_error():
            why = in_words(first.get_error() or "", text)
            raise InvalidRequest(f"structured: the grammar does not compile: {why[:500]}",
                                 "structured")
        return compiled


class GrammarMatcher:
    """The position of one sequence in its grammar."""

    def __init__(self, compiled: Any, vocabulary: GrammarVocabulary,
                 limits: TextLimits | None = None) -> None:
        """compiled: llguidance's matcher, which becomes `inner`; limits: those of the text."""
        self.inner, self._vocabulary = compiled, vocabulary
        self._text = TextState() if limits is not None and limits.json else None
        self._thought, self._marks = ThoughtState(AFTER), None
        if limits is not None and limits.thought:
            self._thought = ThoughtState(INSIDE if limits.opened else BEFORE)
            self._marks = ThoughtMarks.of(REASONING_FORMATS[limits.thought])
        self.consumed = 0
        """Tokens accepted so far."""

    @property
    def error(self) -> str:
        """Why the sequence cannot continue; empty while it can."""
        return in_words(str(self.inner.get_error())) if self.inner.is_error() else ""

    @property
    def over(self) -> bool:
        """True if only an end token can follow."""
        return bool(self.inner.is_stopped())

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advances by these tokens; returns False, and sets `error`, if the grammar does not allow
        them. Ignores what follows the end."""
        for token in tokens:
            self.consumed += 1
            if self.inner.is_stopped() and not self.inner.is_error():
                continue
            if not self.inner.consume_token(token):
                return False
            if self._text is not None:
                self._thought, self._text = self._after(self._thought, self._text, token)
        return True

    def _after(self, thought: ThoughtState, text: TextState, token: int
               ) -> tuple[ThoughtState, TextState]:
        """Returns the states of the thought and of the JSON text behind another token."""
        more = self._vocabulary.bytes_of(token)
        if self._marks is not None:
            thought, more = thought.after(more, self._marks)
        return thought, text.after(more)

    def masks(self, drafts: Sequence[int]) -> list[U32]:
        """Returns u32[words] for the next token and for those after each draft, as far as the
        drafts are allowed: what follows a forbidden draft is never sampled."""
        found, taken = [self._mask()], 0
        for draft in drafts:
            if self.inner.is_stopped() or self.inner.try_consume_tokens([draft]) != 1:
                break
            taken += 1
            found.append(self._mask())
        if taken:
            self.inner.rollback(taken)  # has no effect after an `error`
        return self.narrowed(found, drafts)

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, as far as there is no choice."""
        return [] if self.inner.is_stopped() else list(self.inner.compute_ff_tokens())

    def narrowed(self, rows: list[U32], drafts: Sequence[int]) -> list[U32]:
        """Returns the masks without further digits where a number has its most, unless that leaves
        nothing."""
        if self._text is None:
            return rows
        thought, text, found = self._thought, self._text, []
        for place, bits in enumerate(rows):
            if place:
                thought, text = self._after(thought, text, drafts[place - 1])
            ends = bits & self._vocabulary.no_digits if text.digits >= MOST else bits
            found.append(ends if ends.any() else bits)
        return found

    def _mask(self) -> U32:
        """Returns the mask of the next token, u32[words]."""
        bits: U32 = np.frombuffer(self.inner.compute_bitmask(), np.uint32)
        return bits[:self._vocabulary.words]


# --- what a request says -> a grammar -------------------------------------------------------------

SPACES = r"[ ]|\n[ ]{0,32}"
"""What may stand between the parts of a JSON text: a space, or an indented new line. Bounded, or a
model may fill its context with blanks."""


def grammar_of(wanted: Structured) -> str:
    """Converts a request's structured output to llguidance's syntax. Raises `InvalidRequest` where
    that fails; `GrammarVocabulary.matcher` finds out whether it compiles."""
    if wanted.json_schema is not None:
        return json_grammar(wanted.json_schema, wanted.additional_properties, wanted.lenient)
    if wanted.json_object:
        return json_grammar('{"type": "object"}')
    if wanted.regex is not None:
        return regex_grammar(wanted.regex)
    if wanted.choice is not None:
        return choice_grammar(wanted.choice)
    if wanted.structural_tag is not None:
        return tag_grammar(wanted.structural_tag)
    return ebnf_grammar(wanted.grammar or "")


def json_grammar(schema: str, additional_properties: bool = False, lenient: bool = False) -> str:
    """Returns the grammar of JSON texts that match a schema; objects that name their properties
    have no others unless `additional_properties` allows them; lenient: keywords that cannot be
    enforced are passed over. Raises `InvalidRequest`."""
    from llguidance import LLMatcher

    try:
        given = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(f"structured: no JSON schema: {error}", "structured") from None
    except RecursionError:
        raise InvalidRequest("structured: no JSON schema: too deep", "structured") from None
    try:
        made = closed(given, not additional_properties, lenient)
        if made is False:
            raise ValueError("it allows nothing")
        return LLMatcher.grammar_from_json_schema(
            json.dumps({} if made is True else made), defaults={"whitespace_pattern": SPACES})
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"structured: json_schema: {error}", "structured") from None
    except RecursionError:
        raise InvalidRequest("structured: json_schema: too deep", "structured") from None


def regex_grammar(expression: str) -> str:
    """Returns the grammar of texts that an expression (Rust's syntax, no look-around) matches
    entirely."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(expression)


def choice_grammar(choices: Sequence[str]) -> str:
    """Returns the grammar of these texts."""
    from llguidance import LLMatcher

    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {quoted}")


def tag_grammar(description: str) -> str:
    """Returns the grammar of texts with tagged parts (`structural_tags`). Raises `InvalidRequest`.
    """
    made = lark_of(description, SPACES)
    first = {"name": made.limits.name, "lark_grammar": made.lark}
    others = [{"name": name, "lark_grammar": _lark(text)} for name, text in made.others.items()]
    written = json.dumps({"grammars": [first, *others]}, separators=(",", ":"))
    return WRITTEN + written if others else written


def ebnf_grammar(text: str) -> str:
    """Converts a grammar in Lark's syntax, or in GBNF (llama.cpp's), which has `root ::=`."""
    from llguidance import LLMatcher

    return WRITTEN + LLMatcher.grammar_from_lark(_lark(text))


def _lark(text: str) -> str:
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises whatever it stumbles over
        raise InvalidRequest(f"structured: grammar: {error}", "structured") from None
