"""Incremental detokenisation: text grows token by token and never by half a character.

Three kinds of tokenizer, told apart by the decoder that tokenizer.json names:

- byte-level BPE (GPT-2, Llama 3, Qwen): each token is bytes; the stream is their UTF-8. The pieces
  together equal the library's `decode` of all ids, invalid bytes included.
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): each token is text, or one byte
  `<0xNN>`. The same, except that the valid characters at the head of a run of byte tokens that
  turns out to be invalid are kept (`decode` replaces the whole run; it cannot be known earlier).
- anything else: differences of decoded windows (the prefix-offset method of text-generation-
  inference).

The prompt is context: a completion that goes on inside a word of the prompt gets no stripped space,
and a character begun by the prompt's last bytes is completed by the first token. Ids without a
token (padding rows of the embedding) have no text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from actorium.actors.config.tree import ModelConfig
from actorium.actors.models import model_dir as models
from actorium.actors.models.model_files import MAX_TOKENIZER, read_file
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer, read_steps

_utf8 = codecs.utf_8_decode
_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
CONTEXT = 8
"""Prompt tokens looked at for context; a character has at most 4 bytes."""


class IncrementalDetokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token: int) -> str:
        """Returns the text that became certain with this token."""

    def flush(self) -> str:
        """Returns the rest, at the end: U+FFFD for what never became a character."""


class TokenDecoder(Protocol):
    """Makes the streams of one tokenizer."""

    def stream(self, prompt: Sequence[int], skip_special: bool) -> IncrementalDetokenizer: ...


def utf8_tail(data: bytes) -> bytes:
    """Returns the incomplete character at the end of `data`, if any."""
    return data[_utf8(data, "replace", False)[1]:]


def make(tokenizer: Tokenizer, file: Path) -> TokenDecoder:
    """Returns the detokenizer for `tokenizer`, by the decoder named in its tokenizer.json `file`.
    """
    decoder = read_steps(file, read_file(file, MAX_TOKENIZER)).decoder or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder(tokenizer)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        pattern = (steps[0].get("pattern") or {}).get("String")
        strip: dict[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "stop": 0}
        if pattern and strip.get("stop") == 0 and strip.get("content") == " ":
            return ByteFallbackDecoder(tokenizer, pattern, steps[0].get("content", ""),
                                       strip.get("start", 0))
    return WindowedDecoder(tokenizer)


def load(config: ModelConfig) -> TokenDecoder:
    """Loads the configured model's tokenizer. Raises `BadModel`."""
    if config.skip_tokenizer:
        return NoTextDecoder()
    path = models.resolve(config.model)
    return make(load_tokenizer(path), path / "tokenizer.json")


def byte_of_char() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte -> the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    rest = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + n): b for n, b in enumerate(rest)}


class _TokenTexts(dict[int, Any]):
    """Token id -> its piece, made when first asked for."""

    def __init__(self, make_piece: Any) -> None:
        super().__init__()
        self._make = make_piece

    def __missing__(self, token: int) -> Any:
        piece = self[token] = self._make(token)
        return piece


def _tables(tokenizer: Tokenizer, make_piece: Any, empty: Any) -> tuple[_TokenTexts, _TokenTexts]:
    """Returns the pieces of all tokens, and the same with special tokens as `empty`."""
    special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    pieces = _TokenTexts(make_piece)
    return pieces, _TokenTexts(lambda token: empty if token in special else pieces[token])


class ByteLevelDecoder:
    """Byte-level BPE: a token is bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = byte_of_char()
        self._pieces = _tables(tokenizer, self._piece, b"")

    def _piece(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes([self._bytes[c] for c in text])
        except KeyError:  # an added token, written as it is
            return text.encode()

    def stream(self, prompt: Sequence[int], skip_special: bool) -> ByteLevelStream:
        pieces = self._pieces[skip_special]
        return ByteLevelStream(pieces, utf8_tail(b"".join([pieces[t] for t in prompt[-CONTEXT:]])))


class ByteLevelStream:
    """See `ByteLevelDecoder`. `rest` is the incomplete character so far."""

    __slots__ = ("_pieces", "_rest")

    def __init__(self, pieces: _TokenTexts, rest: bytes) -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token: int) -> str:
        data = self._rest + self._pieces[token]
        text, used = _utf8(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class ByteFallbackDecoder:
    """SentencePiece with byte fallback: a token is text, or one byte (an int)."""

    def __init__(self, tokenizer: Tokenizer, pattern: str, content: str, strip: int) -> None:
        self._tokenizer = tokenizer
        self._pattern = pattern
        self._content = content
        self._strip = strip
        self._pieces = _tables(tokenizer, self._piece, "")

    def _piece(self, token: int) -> str | int:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return ""
        byte = _BYTE.match(text)
        return int(byte[1], 16) if byte else text.replace(self._pattern, self._content)

    def stream(self, prompt: Sequence[int], skip_special: bool) -> ByteFallbackStream:
        pieces = self._pieces[skip_special]
        run = b""
        for token in prompt[-CONTEXT:]:
            piece = pieces[token]
            if isinstance(piece, int):
                run += bytes((piece,))
            elif piece:
                run = b""
        started = any(pieces[t] != "" for t in prompt)
        return ByteFallbackStream(pieces, utf8_tail(run), 0 if started else self._strip)


class ByteFallbackStream:
    """See `ByteFallbackDecoder`. `strip` = spaces still to drop at the very beginning of the
    text."""

    __slots__ = ("_pieces", "_rest", "_strip")

    def __init__(self, pieces: _TokenTexts, rest: bytes, strip: int) -> None:
        self._pieces = pieces
        self._rest = rest
        self._strip = strip

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, int):
            text, self._rest = take_bytes(self._rest + bytes((piece,)))
        elif self._rest and piece:
            text, self._rest = "\ufffd" * len(self._rest) + piece, b""
        else:
            text = piece
        if self._strip and text:
            spaces = min(len(text) - len(text.lstrip(" ")), self._strip)
            self._strip = self._strip - spaces if spaces == len(text) else 0
            text = text[spaces:]
        return text

    def flush(self) -> str:
        text, self._rest = "\ufffd" * len(self._rest), b""
        return text


def take_bytes(data: bytes) -> tuple[str, bytes]:
    """Returns (text, incomplete rest) of a run of byte tokens: one U+FFFD for each impossible byte.
    """
    text = ""
    while data:
        try:
            more, used = _utf8(data, "strict", False)
            return text + more, data[used:]
        except UnicodeDecodeError as error:
            good = data[:error.start].decode()
            text += good + "\ufffd" * (error.end - error.start)
            data = data[error.end:]
    return text, b""


class WindowedDecoder:
    """Any other decoder: the difference between two decoded windows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def stream(self, prompt: Sequence[int], skip_special: bool) -> WindowedStream:
        return WindowedStream(self._tokenizer, list(prompt[-CONTEXT:]), skip_special)


class WindowedStream:
    """See `WindowedDecoder`. `ids[:read]` has been emitted; decoding starts at `prefix` for
    context."""

    __slots__ = ("_tokenizer", "_skip", "_ids", "_read")

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids = context
        self._read = len(context)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        self._ids.append(token)
        old = self._decode(self._ids[:self._read])
        new = self._decode(self._ids)
        unsure = new.endswith("\ufffd") or len(new) <= len(old)
        if unsure and len(self._ids) - self._read < CONTEXT:
            return ""
        self._ids = self._ids[-CONTEXT:]
        self._read = len(self._ids)
        return new[len(old):]

    def flush(self) -> str:
        text = self._decode(self._ids)[len(self._decode(self._ids[:self._read])):]
        self._read = len(self._ids)
        return text


class NoTextStream:
    """skip_tokenizer: ids only."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class NoTextDecoder:
    """skip_tokenizer: every stream is without text."""

    def stream(self, prompt: Sequence[int], skip_special: bool) -> NoTextStream:
        return NoTextStream()
