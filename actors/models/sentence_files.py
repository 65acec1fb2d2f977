"""What sentence-transformers writes beside a checkpoint: which modules there are, how long texts
may be, what stands before them, which tokens are answers. (What rows go through: `pooling_shape`.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.model_classes import MAX_INT32
from actorium.actors.models.model_dir import read_json
from actorium.actors.models.model_files import MAX_JSON, read_file

LOGIT_SCORE = "LogitScore"
"""The module that makes a score of a decoder's logits."""


def read_modules(where: Path) -> list[dict[str, Any]]:
    """The modules of a modules.json, in order. Raises `BadModel`."""
    try:
        found = msgspec.json.decode(read_file(where, MAX_JSON), type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadModel(f"model: {where} is no list of JSON objects: {error}", "model") from None
    if not found:
        raise BadModel(f"model: {where} names no module", "model")
    return found


def module_kind(module: dict[str, Any]) -> str:
    """The class of a module, without the package that it lies in."""
    return str(module.get("type")).rpartition(".")[2]


def module_folder(where: Path, module: dict[str, Any]) -> Path:
    """Where a module of the file `where` has its settings. Raises `BadModel`."""
    folder = module.get("path", "")
    if not isinstance(folder, str) or "/" in folder or folder.startswith("."):
        raise BadModel(f"{where}: path: must be a folder of the model, got {shown(folder)}",
                       "model")
    return where.parent / folder


def answer_tokens(path: Path) -> tuple[int, ...]:
    """The tokens of yes and of no of a decoder that rates texts by its answer (`LogitScore`), as
    Qwen3-Reranker; () of other checkpoints. Raises `BadModel`."""
    where = path / "modules.json"
    modules = read_modules(where) if where.is_file() else []
    if LOGIT_SCORE not in map(module_kind, modules):
        return ()
    if [module_kind(module) for module in modules] != ["Transformer", LOGIT_SCORE]:
        raise BadModel(f"{where}: {LOGIT_SCORE} is supported behind Transformer alone", "model")
    settings = module_folder(where, modules[1]) / "config.json"
    raw = read_json(settings)
    given = raw.get("true_token_id"), raw.get("false_token_id")
    tokens = tuple(token for token in given if type(token) is int and 0 <= token <= MAX_INT32)
    if len(set(tokens)) != 2:
        raise BadModel(f"{settings}: true_token_id, false_token_id: must be two tokens, got "
                       f"{shown(given)}", "model")
    return tokens


def longest_text(path: Path, settings: dict[str, Any]) -> int | None:
    """The longest text: older versions of the library write it down themselves, newer ones leave it
    to the tokenizer's settings, where a huge number stands for none."""
    tokenizer = read_json(path / "tokenizer_config.json", optional=True)
    for found in (settings.get("max_seq_length"), tokenizer.get("model_max_length")):
        if isinstance(found, int) and 0 < found <= MAX_INT32:
            return found
    return None


def text_prompts(path: Path) -> tuple[tuple[str, str], ...]:
    """Name and text of each prompt that is put before texts for a purpose."""
    found = read_json(path / "config_sentence_transformers.json", optional=True).get("prompts")
    pairs = found.items() if isinstance(found, dict) else ()
    return tuple((name, text) for name, text in pairs if isinstance(text, str))
