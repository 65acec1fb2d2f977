"""Loads and tries tokenizer.json of an untrusted model directory.

The library that reads it (Rust) panics on some files, on others only when it encodes, and a short
list of replacements can turn a word into a terabyte. So what a file adds to a text is bounded
before it is loaded, and encoding and decoding are tried once: a file that fails is refused by name.
"""

from __future__ import annotations

import base64
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.model_files import MAX_TOKENIZER, read_file
from actorium.actors.runtime.inflight_journal import PROCESS_FAULTS

MAX_GROWTH = 1024
"""The most a normalizer or a decoder may lengthen a text, as a factor."""
MAX_ADDED = 65_536
MAX_ADDED_CHARS = 1024
MAX_PIECES = 1024
"""The most parts that a post-processor puts together, or steps of a list."""
TRIAL = "Hello  world, 12345!\n\tdef f(x):\r\n é中文 🙂 don't ____ aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
"""The text that is tried: real tokenizers handle it, and it has enough kinds of characters to make
a bad expression fail."""
T = TypeVar("T")


class TokenizerSteps(msgspec.Struct):
    """The parts of tokenizer.json that are checked here; the model is not among them."""

    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads tokenizer.json of a model directory, without truncation or padding. Raises `BadModel`.
    """
    file = path / "tokenizer.json"
    try:
        data = read_file(file, MAX_TOKENIZER)
    except FileNotFoundError:
        raise BadModel(f"model: {file} is missing; serve by token ids with --skip-tokenizer",
                       "model") from None
    read_steps(file, data)
    tokenizer: Tokenizer = _tried(file, lambda: Tokenizer.from_buffer(data))
    # One text is encoded at a time: a thread for each core would be idle.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _tried(file, lambda: _try(tokenizer))
    return tokenizer


def read_steps(file: Path, data: bytes) -> TokenizerSteps:
    """Reads what `data`, the content of `file`, says beside its vocabulary. Raises `BadModel` where
    that cannot be served."""
    try:
        steps = msgspec.json.decode(data, type=TokenizerSteps)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(file, error) from None
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        try:
            _check(getattr(steps, name))
        except (ValueError, RecursionError) as error:
            raise _bad(file, f"{name}: {error}") from None
    if len(steps.added_tokens) > MAX_ADDED:
        raise _bad(file, f"added_tokens: more than {MAX_ADDED}")
    for token in steps.added_tokens:
        content = token.get("content")
        if not isinstance(content, str) or len(content) > MAX_ADDED_CHARS:
            raise _bad(file, f"added_tokens: content: must be a text of at most {MAX_ADDED_CHARS} "
                       f"characters, got {shown(content)}")
    return steps


def _try(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch_fast([TRIAL, TRIAL * 20], add_special_tokens=True)[0].ids
    array("i", ids)
    tokenizer.decode_batch([ids], skip_special_tokens=True)


def _tried(file: Path, call: Callable[[], T]) -> T:
    try:
        return call()
    except PROCESS_FAULTS:
        raise
    except BaseException as error:  # the library raises bare Exception, and Rust's panics
        raise _bad(file, error) from None


def _bad(file: Path, why: object) -> BadModel:
    text = "".join(c if c.isprintable() else "?" for c in str(why)[:400])
    return BadModel(f"model: cannot read {file}: {text}", "model")


def _check(step: Any) -> None:
    """Raises `ValueError` if a step, or one within it, could expand a text too much."""
    growth = 1
    for own in _steps(step):
        for name in ("content", "prepend", "replacement"):
            if isinstance(own.get(name), str):
                growth *= max(1, len(own[name]))
        if growth > MAX_GROWTH:
            raise ValueError(f"makes texts more than {MAX_GROWTH} times as long")
        if isinstance(own.get("precompiled_charsmap"), str):
            _check_charsmap(own["precompiled_charsmap"])
        for name in ("single", "pair"):
            if isinstance(own.get(name), list) and len(own[name]) > MAX_PIECES:
                raise ValueError(f"{name}: more than {MAX_PIECES} parts")
        for special in (own.get("special_tokens") or {}).values() \
                if isinstance(own.get("special_tokens"), dict) else ():
            ids = special.get("ids") if isinstance(special, dict) else None
            if isinstance(ids, list) and len(ids) > MAX_PIECES:
                raise ValueError(f"special_tokens: more than {MAX_PIECES} ids")


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yields a step and all steps within it."""
    if not isinstance(step, dict):
        return
    yield step
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        within = step.get(name)
        if isinstance(within, list):
            if len(within) > MAX_PIECES:
                raise ValueError(f"{name}: more than {MAX_PIECES}")
            for one in within:
                yield from _steps(one)


def _check_charsmap(text: str) -> None:
    """Checks SentencePiece's table: the bytes of a trie, whose first four give its length, then the
    texts that its leaves point to. The library trusts that length."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("precompiled_charsmap: no base64") from None
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or size > len(data) - 4:
        raise ValueError("precompiled_charsmap: damaged")
