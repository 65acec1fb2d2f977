"""Flags of other engines that mean something here under another name, form or value.

`translate` turns the words of such flags into settings, lines to print and checks of the whole
configuration; `foreign_flags.py` holds what needs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actorium.actors.config import sources as settings
from actorium.actors.config.flag_names import switch_forms
from actorium.actors.config.parsed_values import DRAFTS, MAX_DRAFTS
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models import model_dir as models
from actorium.actors.params import MAX_LOGPROBS
from actorium.tools.cli import foreign_flags
from actorium.tools.cli.foreign_flags import Group
from actorium.tools.cli.foreign_words import (
    LIST,
    SWITCH,
    VALUE,
    Family,
    Foreign,
    ForeignWord,
    Translation,
    graphs,
    keys_of,
    number_of,
    tiers,
)


def foreign_flags_table() -> dict[str, Foreign]:
    """Every spelling -> what it is."""
    table: dict[str, Foreign] = {}
    known: list[tuple[str, Group | Family]] = [
        *(("accepted", group) for group in foreign_flags.ACCEPTED),
        *(("refused", group) for group in foreign_flags.REFUSED), *FAMILIES.items()]
    for family, own in known:
        for arity, names in ((VALUE, own.valued), (LIST, own.lists), (SWITCH, own.switches)):
            _add(table, names, Foreign(arity, family, own if isinstance(own, Group) else None))
    return table


def _add(table: dict[str, Foreign], names: str, flag: Foreign) -> None:
    for name in names.split():
        forms = switch_forms(name) if flag.arity == SWITCH else [(name, False)]
        for form, off in forms:
            if table.setdefault(form, flag._replace(off=off)).group is not flag.group:
                raise ValueError(f"--{form} stands in two groups")


def translate(words: list[ForeignWord], written: Mapping[str, str]) -> Translation:
    """The settings, notes and checks of these words. Raises `BadConfig` on what is refused."""
    result = Translation(written)
    for word in words:
        if word.flag.family == "refused":
            _refuse(word)
    by_family = {"accepted": _accept, **{name: own.treat for name, own in FAMILIES.items()}}
    for family, treat in by_family.items():
        mine = [word for word in words if word.flag.family == family]
        if mine:
            treat(mine, result)
    return result


def _refuse(word: ForeignWord) -> None:
    group = word.flag.group
    assert group is not None
    if word.flag.arity == SWITCH:
        if not word.off:
            raise BadConfig(f"{word.origin}: not here: {group.reason}", word.name)
        return
    harmless = group.unless.split()
    wrong = [value for value in word.values if value.lower() not in harmless]
    if wrong:
        want = f"must be {' or '.join(harmless[:1])}: " if harmless else "not here: "
        raise BadConfig(f"{word.origin}: {want}{group.reason}, got {wrong[0]!r}", word.name)


def _accept(words: list[ForeignWord], result: Translation) -> None:
    by_reason: dict[str, list[str]] = {}
    for word in words:
        assert word.flag.group is not None
        origins = by_reason.setdefault(word.flag.group.reason, [])
        if word.origin not in origins:
            origins.append(word.origin)
    for reason, origins in by_reason.items():
        verb = "changes" if len(origins) == 1 else "change"
        result.notes.append(f"{', '.join(origins)} {verb} nothing here: {reason}")


# --- speculative decoding ------------------------------------------------------------------------

_SPECULATION = {
    "speculative-algorithm": "method", "speculative-algo": "method", "spec-method": "method",
    "num-speculative-tokens": "num_speculative_tokens", "spec-tokens": "num_speculative_tokens",
    "speculative-num-steps": "num_speculative_tokens", "speculative-eagle-topk": "topk",
    "speculative-num-draft-tokens": "draft_tokens", "speculative-draft-model-path": "model",
    "speculative-draft-model": "model", "speculative-model": "model", "spec-model": "model",
}
"""Flag -> key of vLLM's speculative_config, or one of our own for SGLang's."""
_SAMPLED = ("a draft counts when it equals the model's own sample: the tokens are those without "
            "drafts")
_NO_EFFECT = {
    "rejection_sample_method": _SAMPLED, "draft_sample_method": _SAMPLED,
    **dict.fromkeys((
        "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend",
        "attention_backend", "kv_cache_dtype", "max_model_len", "enforce_eager", "revision",
        "disable_padded_drafter_batch", "disable_by_batch_size", "disable_logprobs",
        "use_local_argmax_reduction", "parallel_drafting"),
        "drafts are made by the model's own MTP layer, as the model is run")}


def _speculation(words: list[ForeignWord], result: Translation) -> None:
    """Translates to `speculative`: off, or mtp:K."""
    given: dict[str, tuple[Any, str]] = {}
    for word in words:
        if word.name in _SPECULATION:
            given[_SPECULATION[word.name]] = (word.values[-1], word.origin)
        else:
            given |= {key: (value, origin) for key, value, origin in keys_of([word])}
    _check_keys(given, result)
    origin = words[-1].origin
    method = str(given["method"][0] or "none").lower() if "method" in given else "mtp"
    if method == "none":
        result.set("speculative", "off", origin)
        return
    if not (method in ("mtp", "nextn", "eagle") or method.endswith("_mtp")):
        raise BadConfig(f"{given['method'][1]}: drafts are made by a checkpoint's own MTP layer "
                        f"(mtp), got {method!r}", "speculative")
    if given.get("model", (None,))[0]:
        result.checks.append(_same_model(*given["model"]))
    result.set("speculative", f"mtp:{_drafts(given)}", origin)


def _check_keys(given: dict[str, tuple[Any, str]], result: Translation) -> None:
    used = {"method", "num_speculative_tokens", "topk", "draft_tokens", "model"}
    for key, (value, origin) in given.items():
        if key in _NO_EFFECT:
            if value == "synthetic":
                raise BadConfig(f"{origin}: use --force-acceptance for made-up acceptance, "
                                f"got {value!r}", "speculative")
            result.notes.append(f"{origin} changes nothing here: {_NO_EFFECT[key]}")
        elif key not in used:
            hint = settings.suggestion(key, used | set(_NO_EFFECT))
            raise BadConfig(f"{origin}: no such key{hint}", "speculative")
    if str(given.get("topk", ("1",))[0]) != "1":
        result.notes.append(f"{given['topk'][1]} is taken as 1: drafts are a chain, not a tree")


def _drafts(given: dict[str, tuple[Any, str]]) -> int:
    """SGLang's draft tokens count the token that they follow."""
    key, more = "num_speculative_tokens", 0
    if key not in given and "draft_tokens" in given:
        key, more = "draft_tokens", 1
    if key not in given:
        return DRAFTS["mtp"]
    value, origin = given[key]
    try:
        number = settings.coerce(int, value)
    except ValueError as error:
        raise BadConfig(f"{origin}: {error}", "speculative") from None
    if not 1 <= number - more <= MAX_DRAFTS:
        raise BadConfig(f"{origin}: must be between {1 + more} and {MAX_DRAFTS + more}, "
                        f"got {number}", "speculative")
    return int(number - more)


def _same_model(wanted: str, origin: str) -> Callable[[Config], None]:
    """Only the served model can draft, or bring its tokenizer."""
    def check(config: Config) -> None:
        if wanted != config.model.model:
            raise BadConfig(f"{origin}: must be the model itself ({config.model.model!r}), "
                            f"got {wanted!r}", "model")
    return check


# --- attention, generation, checkpoints ----------------------------------------------------------

def _attention(words: list[ForeignWord], result: Translation) -> None:
    """vLLM's object, of which the backend's name means something here."""
    for key, value, origin in keys_of(words):
        if key == "backend":
            result.set("attention_backend", str(value), origin)
        else:
            result.notes.append(f"{origin} changes nothing here: a backend's kernels choose it")


_STRUCTURED = {
    "backend": foreign_flags.MASKS, "disable_fallback": foreign_flags.MASKS,
    "disable_any_whitespace": foreign_flags.WHITESPACE,
    "disable_additional_properties": "the JSON schema decides about further properties",
    "enable_in_reasoning": "reasoning is free, the answer behind it is held to its form",
    "reasoning_parser_plugin": "code comes from installed packages alone (docs/plugins.md)",
}
"""Keys of vLLM's object -> why it is not followed; of the first two nothing is missed."""


def _structured(words: list[ForeignWord], result: Translation) -> None:
    """vLLM's object, of which the parser of reasoning means something here."""
    for key, value, origin in keys_of(words):
        if key == "reasoning_parser":
            result.set("reasoning_parser", str(value), origin)
        elif key not in _STRUCTURED:
            raise BadConfig(f"{origin}: no such key{settings.suggestion(key, _STRUCTURED)}",
                            words[-1].name)
        elif _STRUCTURED[key] == foreign_flags.MASKS:
            result.notes.append(f"{origin} changes nothing here: {foreign_flags.MASKS}")
        elif str(value).lower() not in ("false", "none", ""):
            raise BadConfig(f"{origin}: not here: {_STRUCTURED[key]}", words[-1].name)


def _generation(words: list[ForeignWord], result: Translation) -> None:
    """SGLang's names of --generation-config and --override-generation-config."""
    for word in words:
        value = word.values[-1]
        if word.name == "preferred-sampling-params":
            result.set("override_generation_config", value, word.origin)
            result.checks.append(_no_limit(word.origin))
        elif value in ("model", "openai"):
            result.set("generation_config", "auto" if value == "model" else "vllm", word.origin)
        else:
            raise BadConfig(f"{word.origin}: must be model or openai, got {value!r}", word.name)


def _no_limit(origin: str) -> Callable[[Config], None]:
    """SGLang's is a default, ours a limit."""
    def check(config: Config) -> None:
        if models.MAX_NEW_TOKENS in config.model.override_generation_config:
            raise BadConfig(f"{origin}: max_new_tokens is no default here but a limit for every "
                            "request: --override-generation-config sets it", "max_new_tokens")
    return check


def _switch(field: str, value: Any, off: bool = False
            ) -> Callable[[list[ForeignWord], Translation], None]:
    """Sets the field where the last of the words says yes, or no if `off`."""
    def treat(words: list[ForeignWord], result: Translation) -> None:
        if words[-1].off == off:
            result.set(field, value, words[-1].origin)

    return treat


def _logprobs(words: list[ForeignWord], result: Translation) -> None:
    number = number_of(words[-1])
    if number > MAX_LOGPROBS:
        raise BadConfig(f"{words[-1].origin}: a request gets at most {MAX_LOGPROBS}, got {number}",
                        "max_logprobs")


def _checkpoint(words: list[ForeignWord], result: Translation) -> None:
    result.checks += [_same_model(word.values[-1], word.origin) for word in words]


TASKS: dict[str, dict[str, str]] = {
    "auto": {}, "generate": {"runner": "generate"}, "pooling": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
    **dict.fromkeys(("embed", "embedding"), {"runner": "pooling", "convert": "embed"}),
    **dict.fromkeys(("classify", "score"), {"runner": "pooling", "convert": "classify"})}
"""Values of vLLM's --task -> settings."""


def _pooling(words: list[ForeignWord], result: Translation) -> None:
    """vLLM's --task, SGLang's and llama-server's switches, and llama-server's --pooling."""
    for word in words:
        if word.flag.arity == SWITCH:
            settled = {} if word.off else {"runner": "pooling"}
        elif word.name == "pooling":
            settled = {"pooler_config": f'{{"pooling_type": "{word.values[-1].upper()}"}}'}
        elif word.values[-1] in TASKS:
            settled = TASKS[word.values[-1]]
        else:
            raise BadConfig(f"{word.origin}: must be one of {', '.join(TASKS)}, got "
                            f"{word.values[-1]!r}", word.name)
        for field, value in settled.items():
            result.set(field, value, word.origin)


KV_EVENTS = {"endpoint": "kv_events_endpoint", "replay_endpoint": "kv_events_replay_endpoint",
             "topic": "kv_events_topic", "buffer_steps": "kv_events_buffer",
             "hwm": "kv_events_hwm"}
"""Keys of vLLM's and SGLang's kv_events_config -> settings."""
KV_EVENTS_ENDPOINT = "tcp://*:5557"


def _kv_events(words: list[ForeignWord], result: Translation) -> None:
    given = {key: (value, origin) for key, value, origin in keys_of(words)}
    asked = given.pop("enable_kv_cache_events", (None, ""))[0]  # SGLang has no such key
    publisher, origin = given.pop("publisher", (None, words[-1].origin))
    publisher = publisher or ("zmq" if asked else "null")
    if publisher not in ("zmq", "null"):
        raise BadConfig(f"{origin}: must be zmq or null, got {publisher!r}", "kv_events_config")
    if "max_queue_size" in given:
        result.notes.append(f"{given.pop('max_queue_size')[1]} changes nothing here: no events "
                            "wait but for their subscribers (hwm)")
    for key, (_, origin) in given.items():
        if key not in KV_EVENTS:
            raise BadConfig(f"{origin}: no such key{settings.suggestion(key, KV_EVENTS)}",
                            "kv_events_config")
    if asked is False or publisher == "null":
        return
    for key, (value, origin) in ({"endpoint": (KV_EVENTS_ENDPOINT, words[-1].origin)}
                                 | given).items():
        if value is not None:
            result.set(KV_EVENTS[key], value, origin)


# --- the table -----------------------------------------------------------------------------------

FAMILIES = {
    "speculation": Family(
        _speculation, valued="speculative-config speculative-algorithm speculative-algo "
        "speculative-num-steps speculative-eagle-topk speculative-num-draft-tokens "
        "speculative-draft-model-path speculative-draft-model speculative-model "
        "num-speculative-tokens spec-method spec-tokens spec-model"),
    "attention": Family(_attention, valued="attention-config"),
    "graphs": Family(
        graphs, "piecewise-cuda-graph enforce-piecewise-cuda-graph breakable-cuda-graph "
        "prefill-cuda-graph torch-compile",
        "max-cudagraph-capture-size compilation-config cuda-graph-backend-decode "
        "cuda-graph-backend-prefill", "cuda-graph-sizes cudagraph-capture-sizes"),
    "tiers": Family(
        tiers, "hierarchical-cache hicache", "kv-offloading-size kv-offloading-backend "
        "hicache-size hicache-ratio hicache-storage-backend cache-ram"),
    "generation": Family(_generation, valued="sampling-defaults preferred-sampling-params"),
    "priority": Family(_switch("schedule_policy", "priority"), "priority-scheduling"),
    # SGLang's refuses backends that are not batch-invariant, as --exact on does.
    "exactness": Family(_switch("exact", "on"), "deterministic-inference"),
    # No lines on the work: no interval between them.
    "logs": Family(_switch("log_interval", 0.0, off=True), "log-stats"),
    "logprobs": Family(_logprobs, valued="max-logprobs"),
    "checkpoint": Family(_checkpoint, valued="tokenizer tokenizer-path"),
    "pooling": Family(_pooling, "is-embedding embedding embeddings", "task pooling"),
    "structured": Family(_structured, valued="structured-outputs-config"),
    "kv_events": Family(_kv_events, valued="kv-events-config"),
}
"""Flags that are translated, in the order in which they are."""
