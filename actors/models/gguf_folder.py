"""A GGUF file as a model's directory: its config.json, tokenizer.json and the like, made once.

Everyone who reads a model reads such a directory. That of a GGUF file lies in this user's cache, by
the file's path, size and time, and may be deleted at any time; the tensors stay in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_config import GGUF, gguf_config
from actorium.actors.models.gguf_file import GgufFile, gguf_files, read_gguf
from actorium.actors.models.gguf_tokenizer import mistyped_tokens, tokenizer_config, tokenizer_json
from actorium.actors.models.model_files import MAX_JSON, read_file
from actorium.actors.models.model_names import user_cache
from actorium.actors.runtime.security.private_paths import UnsafePath, check_directory

LOG = logging.getLogger("actorium.model")
SUFFIX = ".gguf"
FORM = "8"
"""Of what is made here: a change of it makes all directories anew."""
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "penalty_repeat": "repetition_penalty"}
"""Defaults in `general.sampling.*`, and their names in generation_config.json."""


def gguf_folder(file: Path) -> Path:
    """The directory of a GGUF file, made where it is not there. Raises `BadModel`."""
    name = _identity(file)
    why: object = ""
    for root in roots():
        with contextlib.suppress(OSError, UnsafePath):
            check_directory(root / name)
            return root / name
    files = _files_of(read_gguf(file))
    for root in roots():
        try:
            check_directory(root, make=True)
            return _placed(root, name, files)
        except (OSError, UnsafePath) as error:
            why = error
    raise BadModel(f"model: {file}: no place for its config.json: {why}; XDG_CACHE_HOME names "
                   "another", "model")


def gguf_source(folder: Path) -> Path | None:
    """The GGUF file of such a directory; None of any other directory. Raises `BadModel`."""
    if folder.parent not in roots():
        return None
    found = msgspec.json.decode(read_file(folder / "config.json", MAX_JSON), type=dict[str, Any])
    return Path(found[GGUF]["file"])


def roots() -> list[Path]:
    """Where such directories lie: in the cache, or else where anything can be written."""
    return [user_cache().absolute() / "actorium" / "gguf",
            Path(tempfile.gettempdir()) / f"actorium-{os.getuid()}" / "gguf"]


def _identity(file: Path) -> str:
    """Name of its directory: another one whenever one of the model's files changes."""
    parts = [FORM, str(file)]
    for own in gguf_files(file):
        try:
            info = os.stat(own)
        except OSError as error:
            raise BadModel(f"model: cannot read {own}: {error.strerror}", "model") from None
        parts.append(f"{info.st_ino} {info.st_size} {info.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _files_of(file: GgufFile) -> dict[str, Any]:
    """The directory's files."""
    defaults = {name: file.real(f"general.sampling.{own}") for own, name in SAMPLING.items()
                if f"general.sampling.{own}" in file}
    found = {"config.json": gguf_config(file)}
    if file.text("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
        found |= {"tokenizer.json": tokenizer_json(file),
                  "tokenizer_config.json": tokenizer_config(file)}
        if mistyped := mistyped_tokens(file):
            LOG.warning("%s: %s: no control tokens by tokenizer.ggml.token_type; they are taken as "
                        "such", file.path, ", ".join(mistyped))
        if file.text("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in file:
            LOG.warning("%s: no tokenizer.ggml.pre: texts are cut as llama.cpp's default has it, "
                        "which may not be the model's own way", file.path)
    if defaults:
        top_k = {"top_k": int(defaults["top_k"])} if "top_k" in defaults else {}
        found["generation_config.json"] = defaults | top_k
    return found


def _placed(root: Path, name: str, made: dict[str, Any]) -> Path:
    """All files at once: others look for the directory at the same time."""
    new = Path(tempfile.mkdtemp(prefix=".", dir=root))
    try:
        for own, content in made.items():
            (new / own).write_bytes(msgspec.json.encode(content))
        with contextlib.suppress(OSError):  # somebody else was faster
            new.rename(root / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    check_directory(root / name)
    return root / name
