"""tokenizer.json of a model directory, loaded and tried, whoever has made it.

The library that reads it (Rust) panics at some files, at others only when it is asked for tokens,
and a short list of replacements can make a terabyte of a word. So what a file adds to a text is
bounded before it is loaded, and each half is tried once: a file that fails is refused by name.
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

MAX_GROWTH = 1024
"""Times that a normalizer or a decoder may make a text longer."""
MAX_ADDED = 65_536
MAX_ADDED_CHARS = 1024
MAX_PIECES = 1024
"""Parts of what a post-processor puts together, and of a list of steps."""
TRIAL = "Hello  world, 12345!\n\tdef f(x):\r\n é中文 🙂 don't ____ aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
"""What real tokenizers are made for, and enough of a letter to see a bad expression fail."""
T = TypeVar("T")


class TokenizerSteps(msgspec.Struct):
    """The parts of tokenizer.json that are looked at here; of the model nothing is."""

    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def load_tokenizer(path: Path) -> Tokenizer:
    """tokenizer.json of a model directory, without truncation or padding. Raises `BadModel`."""
    file = path / "tokenizer.json"
    try:
        data = read_file(file, MAX_TOKENIZER)
    except FileNotFoundError:
        raise BadModel(f"model: {file} is missing; serve by token ids with --skip-tokenizer",
                       "model") from None
    read_steps(file, data)
    tokenizer: Tokenizer = _tried(file, lambda: Tokenizer.from_buffer(data))
    # One text is encoded at a time: a thread for each core would have nothing to do.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _tried(file, lambda: _try(tokenizer))
    return tokenizer


def read_steps(file: Path, data: bytes) -> TokenizerSteps:
    """What `data`, the content of `file`, says beside its vocabulary. Raises `BadModel` where that
    cannot be served."""
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
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and Rust's panics
        raise _bad(file, error) from None


def _bad(file: Path, why: object) -> BadModel:
    text = "".join(c if c.isprintable() else "?" for c in str(why)[:400])
    return BadModel(f"model: cannot read {file}: {text}", "model")


def _check(step: Any) -> None:
    """Raises `ValueError` on what a step, and those within, would make of a text."""
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
    """A step and all within it."""
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
    """SentencePiece's table: the bytes of a trie, of which the first four tell the length, then
    texts that its leaves point to. The library takes the length's word for it."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("precompiled_charsmap: no base64") from None
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or size > len(data) - 4:
        raise ValueError("precompiled_charsmap: damaged")
