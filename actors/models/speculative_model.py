"""The model that `speculative_model` names: what it is, and whether it has the tokens of the model
that it drafts for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from actorium.actors.config.parsed_values import DRAFTS, parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel, shown
from actorium.actors.models.model_classes import architecture
from actorium.actors.models.model_dir import read_config, resolve
from actorium.actors.models.model_files import MAX_TOKENIZER, read_file

PARAM = "speculation.speculative_model"


class VocabularyPart(msgspec.Struct):
    """What tokenizer.json says of its vocabulary."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}
    """Token -> id; or the tokens in the order of their ids, with their scores."""


class VocabularyFile(msgspec.Struct):
    """The part of tokenizer.json that is read."""

    model: VocabularyPart


def speculative_model_kind(path: Path) -> Literal["draft", "eagle3"]:
    """The method by which the model in this directory drafts: "eagle3" where it is a head over the
    hidden states of another model, "draft" where it is a model by itself. Raises `BadModel`."""
    raw = read_config(path)
    kinds = f"{architecture(raw)} {raw.get('speculators_model_type')}".lower()
    return "eagle3" if "eagle3" in kinds or "draft_vocab_size" in raw else "draft"


def with_speculative_model(config: Config, tokens: bool = True) -> Config:
    """The configuration with the method of its `speculative_model` where `speculative` is auto,
    beside the model's own layer. tokens: whether to compare tokens.

    Raises `BadModel` and `BadConfig` where there is no such model, where it is not of the method
    that is asked for, and where a draft model has other tokens than the model.
    """
    own = config.speculation
    if not own.speculative_model:
        return config
    try:
        path = resolve(own.speculative_model)
        kind = speculative_model_kind(path)
    except BadModel as error:
        raise BadModel(f"speculative_{error.message}", PARAM) from None
    asked = parse_speculative(own.speculative)
    if asked.auto and kind not in asked.methods:
        own = msgspec.structs.replace(own, speculative=f"{own.speculative}+{kind}:{DRAFTS[kind]}")
        config = msgspec.structs.replace(config, speculation=own)
    elif kind not in asked.methods and asked.methods:
        raise BadConfig(f"speculative_model: {path} drafts by {kind}, and speculative is "
                        f"{own.speculative!r}", PARAM)
    if kind == "draft" and asked.methods and tokens and not config.model.skip_tokenizer:
        check_same_tokens(resolve(config.model.model), path)
    return config


def check_same_tokens(target: Path, draft: Path) -> None:
    """Raise `BadConfig` where two models' tokenizers have other tokens, those aside that were added
    to them: of these a draft is only less often right. Reads tokenizer.json of both directories.

    Raises `BadModel` where one of them cannot be read.
    """
    found = [_read(path / "tokenizer.json") for path in (target, draft)]
    if found[0] == found[1]:
        return
    ours, theirs = (_tokens(path, data) for path, data in zip((target, draft), found, strict=True))
    if ours == theirs:
        return
    number = next(i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i))
    raise BadConfig(f"speculative_model: {draft} has other tokens than {target}: number {number} "
                    f"is {_named(theirs, number)}, not {_named(ours, number)}", PARAM)


def _read(file: Path) -> bytes:
    try:
        return read_file(file, MAX_TOKENIZER)
    except FileNotFoundError:
        raise BadModel(f"speculative_model: {file} is missing: whether both models have the same "
                       "tokens cannot be told; serve by token ids with --skip-tokenizer",
                       PARAM) from None


def _tokens(path: Path, data: bytes) -> dict[int, str]:
    """Tokens by id."""
    try:
        vocab: Any = msgspec.json.decode(data, type=VocabularyFile).model.vocab
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadModel(f"model: cannot read {path / 'tokenizer.json'}: {error}", "model") from None
    if isinstance(vocab, dict):
        return {number: token for token, number in vocab.items()}
    return {number: token for number, (token, _) in enumerate(vocab)}


def _named(tokens: dict[int, str], number: int) -> str:
    return shown(tokens[number]) if number in tokens else "none"
