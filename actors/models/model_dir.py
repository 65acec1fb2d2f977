"""Finding a model directory and reading its JSON files.

Light on purpose (standard library and msgspec): the CLI, the tokenizer actor and the worker all
start here. Every failure is a `BadModel` with one line that says what was looked for and where.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.config.models_settings import serves_models
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel, shown
from actorium.actors.models.gguf_config import GGUF
from actorium.actors.models.gguf_folder import SUFFIX, gguf_folder
from actorium.actors.models.model_classes import (
    MAX_INT32,
    POSITION_FIELDS,
    UNUSED_POSITIONS,
    WITH_UNUSED,
    architecture,
    default_positions,
)
from actorium.actors.models.model_files import (
    INDEX,
    MAX_INDEX,
    MAX_JSON,
    check_file,
    read_file,
    unindexed_files,
)
from actorium.actors.models.model_names import (
    ModelName,
    cached_model,
    gguf_models,
    hub_cache,
    parse_name,
    repository_dir,
    repository_of,
)
from actorium.actors.params import SamplingParams

LOG = logging.getLogger("actorium.model")
DEMO_MODEL = Path(__file__).parents[2] / "tools" / "demo" / "demo_model"
"""The packaged demo checkpoint: `actorium/tools/demo/demo_model`."""

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MAX_EOS = 47
"""End-of-sequence ids of a model; a request may add its own."""
MAX_NEW_TOKENS = "max_new_tokens"
"""Field of generation_config.json: tokens of the longest completion."""
STRETCHED = ("linear", "dynamic")
"""Kinds of rope scaling for sequences longer than those that the model was trained on."""


def resolve(model: str) -> Path:
    """The directory (absolute) of `model`: a path, a name in the HF cache, or "" = the demo model;
    of a GGUF file the one that is made of it.

    Raises `BadModel` if there is no such directory or it holds no config.json.
    """
    if not model:
        return _checked(DEMO_MODEL, "the demo model")
    path = Path(model).expanduser()
    name = parse_name(model)
    if not path.exists() and name is None:
        what = "file" if path.suffix == SUFFIX else "directory"
        raise BadModel(f"model: no such {what}: {path.absolute()} (`actorium models` lists the "
                       "models on this machine)", "model")
    if not path.exists():
        assert name is not None
        path = _cached(name)
    if path.is_dir():
        return _checked(path, f"model {model!r}")
    if path.is_file() and path.suffix == SUFFIX:
        return gguf_folder(path.absolute())
    raise BadModel(f"model: {model!r} is a file; a directory in HF format or a .gguf file is "
                   "needed", "model")


def _cached(name: ModelName) -> Path:
    found = cached_model(name, hub_cache())
    if found is not None:
        return found
    repo = repository_dir(name.repo, hub_cache())
    if repo.is_dir():
        raise BadModel(f"model: {str(name)!r} has no usable snapshot in {repo / 'snapshots'}",
                       "model")
    raise BadModel(f"model: {str(name)!r} is neither a directory nor in the HF cache (looked for "
                   f"{Path(str(name)).absolute()} and {repo})", "model")


def is_jinja(text: str) -> bool:
    """Whether a `chat_template` setting is a template rather than the name of a file."""
    return "{{" in text or "{%" in text


def _checked(path: Path, what: str) -> Path:
    path = path.absolute()
    try:
        check_file(path / "config.json", MAX_JSON)
    except FileNotFoundError:
        ggufs = gguf_models([file.name for file in path.glob(f"*{SUFFIX}")])
        hint = f"; name one of its GGUF files: {path / ggufs[0]}" if ggufs else \
            "; `actorium models FOLDER` lists the models below a folder"
        raise BadModel(f"model: {what} has no config.json in {path}{hint}", "model") from None
    return path


def read_json(path: Path, optional: bool = False, max_bytes: int = MAX_JSON) -> dict[str, Any]:
    """A file's JSON object, at most `max_bytes`; {} if missing and optional. Raises `BadModel`."""
    try:
        data = read_file(path, max_bytes)
    except FileNotFoundError:
        if optional:
            return {}
        raise BadModel(f"model: {path} is missing", "model") from None
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadModel(f"model: {path} is not a JSON object: {error}", "model") from None


def checkpoint_bytes(folder: Path) -> int | None:
    """Bytes of all tensors, by the safetensors index, else by the size of the files; None where
    neither is there. Counts what is not loaded as well (vision, MTP layers).

    Raises `BadModel` on an index that is not JSON.
    """
    index = folder / INDEX
    if index.is_file():
        meta = read_json(index, max_bytes=MAX_INDEX).get("metadata")
        total = meta.get("total_size") if isinstance(meta, dict) else None
        return total if isinstance(total, int) and 0 <= total < 2**63 else None
    files = [folder / name for name in unindexed_files(os.listdir(folder))]
    if not files or not all(file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files)


_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072},
    "gemma3n_text": {"vocab_size": 262_400, "max_position_embeddings": 32_768},
    "gemma4_text": {"vocab_size": 262_144, "max_position_embeddings": 131_072},
    "llama": {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
              "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "sliding_window": 4096},
    "qwen2": {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
              "num_hidden_layers": 32, "num_attention_heads": 32}}
"""Fields that published checkpoints leave out of their text_config: transformers' defaults."""


def read_config(path: Path) -> dict[str, Any]:
    """config.json of the model directory `path`, with what ModelOpt's first checkpoints say of
    their weights in a file of its own. Raises `BadModel`."""
    raw = read_json(path / "config.json")
    found = read_json(path / "hf_quant_config.json", optional=True)
    inner = found.get("quantization")
    if raw.get("quantization_config") or not isinstance(inner, dict) or (
            not inner.get("quant_algo")):
        return raw
    return {**raw, "quantization_config": {"quant_method": "modelopt", **inner}}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of config.json (`text_config` where models nest it)."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config
    return {**_LEFT_OUT.get(str(nested.get("model_type")), {}), **nested}


def embedding_width(config: dict[str, Any]) -> int:
    """Numbers of a row of the model's embeddings. Raises `BadModel` where config.json says none."""
    own = text_config(config)
    for name in ("hidden_size", "n_embd", "d_model"):
        if isinstance(own.get(name), int):
            return int(own[name])
    raise BadModel("enable_prompt_embeds: config.json has no hidden_size")


def generation_defaults(path: Path) -> dict[str, Any]:
    """Sampling defaults and `eos_token_id` of generation_config.json; {} without the file.

    Only temperature, top_k, top_p, min_p, repetition_penalty (numbers), eos_token_id and
    max_new_tokens (as max_tokens, which is what requests call it) are kept. Other lengths are
    ignored: they count the prompt as well.
    """
    data = read_json(path / "generation_config.json", optional=True)
    kept: dict[str, Any] = {}
    for name in SAMPLING_DEFAULTS:
        value = data.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) > MAX_INT32:
                raise BadModel(f"model: {path / 'generation_config.json'}: {name}: must be a "
                               f"number within {MAX_INT32}, got {shown(value)}", "model")
            kept[name] = value
    longest = data.get(MAX_NEW_TOKENS)
    if isinstance(longest, int) and not isinstance(longest, bool) and 1 <= longest < 2**31:
        kept["max_tokens"] = longest
    if data.get("eos_token_id") is not None:
        kept["eos_token_id"] = data["eos_token_id"]
    return kept


def recommended_sampling(path: Path) -> tuple[str, dict[str, float]] | None:
    """The model that the directory `path` holds and the sampling that its maker recommends, where
    that is known and no generation_config.json names any. Raises `BadModel`."""
    if generation_defaults(path).keys() & set(SAMPLING_DEFAULTS):
        return None
    gguf = read_json(path / "config.json", optional=True).get(GGUF)
    file = gguf.get("file") if isinstance(gguf, dict) else None
    return known_sampling((Path(str(file)).name if file else path.name, repository_of(path)))


def sampling_defaults(path: Path, source: str, override: Mapping[str, float]) -> dict[str, Any]:
    """`generation_defaults` of the model directory `path`, or else `recommended_sampling`, changed
    by the settings `generation_config` (source) and `override_generation_config`. Raises
    `BadModel`."""
    own, known = generation_defaults(path), recommended_sampling(path)
    if known is not None:
        own |= known[1]
    eos = {name: value for name, value in own.items() if name == "eos_token_id"}
    if source == "vllm":
        found = eos
    elif source == "auto":
        found = own
    else:
        found = eos | generation_defaults(Path(source).expanduser())
    whole = {"max_tokens" if name == MAX_NEW_TOKENS else name:
             int(value) if float(value).is_integer() else value
             for name, value in override.items()}
    return found | whole


def max_new_tokens(source: str, override: Mapping[str, float]) -> int | None:
    """The most tokens that a completion may have, whatever its request names: as vLLM takes
    max_new_tokens of `override_generation_config`, or else of the folder that `generation_config`
    (source) names. The model's own is but a default. None = no such limit. Raises `BadModel`."""
    if MAX_NEW_TOKENS in override:
        return int(override[MAX_NEW_TOKENS])
    if source in ("auto", "vllm"):
        return None
    return generation_defaults(Path(source).expanduser()).get("max_tokens")


def eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's, else config.json's; numbers, of this model's
    vocabulary or not. Raises `BadModel`."""
    value = generation.get("eos_token_id")
    if value is None:
        value = text_config(config).get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_INT32
               for i in ids):
        raise BadModel(f"model: eos_token_id must be token ids, got {shown(value)}", "model")
    found = tuple(dict.fromkeys(ids))
    if len(found) > MAX_EOS:
        raise BadModel(f"model: eos_token_id: at most {MAX_EOS} ids, got {len(found)}", "model")
    return found


def vocab_size(config: dict[str, Any]) -> int:
    """Rows of the embedding. Raises `BadModel`."""
    return _positive(text_config(config), ("vocab_size",))


def trained_length(config: dict[str, Any]) -> int | None:
    """Length of the longest sequence before a rope scaling stretches it; None where the config does
    not tell. Raises `BadModel` where it is no usable number."""
    text = text_config(config)
    if all(text.get(name) is None for name in POSITION_FIELDS):
        return None
    unused = UNUSED_POSITIONS if architecture(config).startswith(WITH_UNUSED) else 0
    return max(1, _positive(text, POSITION_FIELDS) - unused)


def max_model_len(config: dict[str, Any], wanted: int | None = None) -> int:
    """Longest sequence: `wanted` where given, else the model's own limit.

    The limit is max_position_embeddings, or else what is usual for the class. Where a rope is
    scaled linearly, dynamically (NTK), or by YaRN with the original length named, it is
    original * factor where that is more, as for vLLM; Gemma 3's max_position_embeddings counts the
    scaling already. Raises `BadModel` on numbers that cannot be used, `BadConfig` if `wanted`
    exceeds the limit.
    """
    text = text_config(config)
    limit = trained_length(config) or default_positions(config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if isinstance(scaling, dict) and not architecture(config).startswith("Gemma3"):
        kind = scaling.get("rope_type") or scaling.get("type")
        original = scaling.get("original_max_position_embeddings",
                               limit if kind in STRETCHED else None)
        factor = scaling.get("factor")
        if (kind in (*STRETCHED, "yarn")
                and isinstance(original, int) and isinstance(factor, int | float)
                and 0 < original <= MAX_INT32 and 0 < factor <= MAX_INT32):
            limit = max(limit, min(int(original * factor), MAX_INT32))
    return within(limit, wanted)


def within(limit: int, wanted: int | None) -> int:
    """The longest sequence that is asked for; None = the model's own limit. Raises `BadConfig`
    where it is more than that."""
    if wanted is None:
        return limit
    if wanted > limit:
        raise BadConfig(f"max_model_len: {wanted} exceeds the model's own limit of {limit} tokens",
                        "model.max_model_len")
    return wanted


def _positive(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_INT32:
            return value
    raise BadModel(f"model: config.json has no usable {keys[0]}", "model")


# --- sampling for models whose makers recommend it and whose files name none ---
# At temperature 1 a small model's first answers are nonsense.

KNOWN_SAMPLING: dict[str, dict[str, float]] = {
    r"SmolLM2-[\d.]+[MB]-Instruct": {"temperature": 0.2, "top_p": 0.9},
    r"TinyLlama-[\d.]+[MB]-Chat": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    r"Zephyr-\d+B-(?:alpha|beta)": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}
"""Part of a model's name -> the defaults of its maker's model card."""
_KNOWN = [(re.compile(rf"(?:^|[/_.-])({name})(?:$|[/_.:-])", re.IGNORECASE), values)
          for name, values in KNOWN_SAMPLING.items()]


def known_sampling(names: Iterable[str]) -> tuple[str, dict[str, float]] | None:
    """The model that one of these names (of a repository, a folder, a file) is of, as it is
    written there, and its defaults; None where none is known."""
    for name in names:
        for pattern, values in _KNOWN:
            if found := pattern.search(name):
                return found[1], values
    return None


# --- what of a model's files is left out, with a line of the log ---

def known_eos_ids(path: Path, config: dict[str, Any], generation: dict[str, Any],
                  size: int) -> tuple[int, ...]:
    """Those of `eos_ids` within a vocabulary of so many tokens. Where generation_config.json has
    none of these, as when it is another model's, config.json's count. Raises `BadModel`."""
    for source in (generation, {}):
        found = eos_ids(config, source)
        inside = tuple(i for i in found if 0 <= i < size)
        if outside := [str(i) for i in found if i not in inside]:
            LOG.warning("%s: eos_token_id: %s: outside the vocabulary of %d, and left out", path,
                        ", ".join(outside), size)
        if inside or source is not generation or "eos_token_id" not in source:
            break
    return inside


def longest_sequence(path: Path, config: dict[str, Any], wanted: int | None) -> int:
    """`max_model_len`. Raises as that does."""
    found = max_model_len(config, wanted)
    if trained_length(config) is None:
        LOG.warning("%s: config.json does not say how long a sequence may be "
                    "(max_position_embeddings): %d tokens are served", path, found)
    return found


def usable_defaults(path: Path, generation: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults of `generation_defaults` that a request could ask for as well."""
    kept = {}
    for name, value in generation.items():
        if name == "eos_token_id":
            continue
        try:
            msgspec.convert({name: value}, SamplingParams).check()
            kept[name] = value
        except (msgspec.ValidationError, ValueError) as error:
            LOG.warning("%s: no default that can be used, and left out: %s",
                        path / "generation_config.json", error)
    return kept


# --- images and videos ---

WITH_TOWER = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
              "Qwen3VLMoeForConditionalGeneration")
"""Architectures with a vision tower (`gpu/families/qwen_vl_config.py`)."""
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""One of them says how images are prepared; without one they cannot be."""
TEXT_BODY, MEDIA_BODY = 4 << 20, 32 << 20
"""Bytes of the largest body of a request, by default: a photo of a telephone has 3 to 8 MB, and a
third more in base64."""


def takes_media(config: Config) -> bool:
    """Whether the engine of this configuration takes images and videos. What is wrong with a model
    is left to those who read all of it."""
    own = config.model
    if own.language_model_only or own.skip_tokenizer:
        return False
    try:
        path = resolve(own.model)
        name = architecture(read_config(path))
    except BadModel:
        return False
    return name in WITH_TOWER and any((path / file).is_file() for file in PREPROCESSORS)


def body_limit(config: Config) -> int:
    """Bytes that the body of an HTTP request may have."""
    wanted = config.gateway.max_body_bytes
    if wanted is not None:
        return wanted
    several = serves_models(config.models)  # some of which may take images
    large = several or config.model.enable_prompt_embeds or takes_media(config)
    return MEDIA_BODY if large else TEXT_BODY


def bodies_limit(limit: int) -> int:
    """Bytes of all large bodies together, while they come. limit: of one."""
    return 64 * limit if limit <= TEXT_BODY else max(64 * TEXT_BODY, 8 * limit)


def served_name(config: Config) -> str:
    """The model's name in metrics and traces, as clients know it."""
    model = config.model
    if serves_models(config.models):
        return "several models"
    if model.served_model_name or not model.model:
        return next(iter(model.served_model_name), "demo")
    return Path(model.model).name.removesuffix(".gguf") or Path(model.model).resolve().name
