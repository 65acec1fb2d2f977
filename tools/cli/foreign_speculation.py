"""Speculative decoding as vLLM, SGLang and llama-server spell it, in our settings."""

from __future__ import annotations

from typing import Any

from actorium.actors.config import sources as settings
from actorium.actors.config.parsed_values import DRAFTS, MAX_DRAFTS
from actorium.actors.errors import BadConfig
from actorium.tools.cli.foreign_words import (
    Family,
    ForeignWord,
    Translation,
    keys_of,
    same_model,
)

_KEYS = {
    "speculative-algorithm": "method", "speculative-algo": "method", "spec-method": "method",
    "spec-type": "method", "num-speculative-tokens": "num_speculative_tokens",
    "spec-tokens": "num_speculative_tokens", "speculative-num-steps": "num_speculative_tokens",
    "draft-max": "num_speculative_tokens", "draft": "num_speculative_tokens",
    "draft-n": "num_speculative_tokens", "spec-draft-n-max": "num_speculative_tokens",
    "speculative-eagle-topk": "topk", "speculative-num-draft-tokens": "draft_tokens",
    "speculative-draft-model-path": "model", "speculative-draft-model": "model",
    "spec-model": "model", "model-draft": "model", "spec-draft-model": "model",
    "draft-min": "draft_min", "draft-n-min": "draft_min", "spec-draft-n-min": "draft_min",
    "draft-p-min": "draft_p_min", "spec-draft-p-min": "draft_p_min",
    "speculative-ngram-min-match-window-size": "prompt_lookup_min",
    "speculative-ngram-max-match-window-size": "prompt_lookup_max",
    **{f"speculative-ngram-{name}": f"ngram_{name.replace('-', '_')}" for name in (
        "min-bfs-breadth", "max-bfs-breadth", "match-type", "branch-length", "capacity",
        "max-trie-depth")},
}
"""Flag -> key of vLLM's speculative_config, or one of our own for other engines'."""
_METHODS = {
    **dict.fromkeys(("mtp", "nextn", "eagle"), "mtp"), "eagle3": "eagle3",
    **dict.fromkeys(("draft_model", "standalone", "draft", "draft-simple"), "draft"),
    **dict.fromkeys(("ngram", "ngram_gpu", "ngram-simple", "ngram-cache", "ngram-map-k",
                     "ngram-map-k4v", "ngram-mod"), "ngram"),
    "suffix": "suffix", "grammar": "grammar", "draft-eagle3": "eagle3", "draft-mtp": "mtp",
}
"""Theirs, in small letters -> ours; also whatever ends in _mtp."""
_FIELDS = ("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth",
           "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
"""Keys that are settings here."""
_SAMPLED = ("a draft counts when it equals the model's own sample: the tokens are those without "
            "drafts")
_PAYS = "as many drafts are made as pay at the moment"
_AS_SERVED = "what makes drafts is run as the model is"
_CHAIN = "drafts are a chain, not a tree, made of each sequence's own text"
_NO_EFFECT = {
    **dict.fromkeys(("rejection_sample_method", "draft_sample_method"), _SAMPLED),
    **dict.fromkeys(("draft_min", "draft_p_min", "disable_by_batch_size"), _PAYS),
    **dict.fromkeys((
        "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend",
        "attention_backend", "kv_cache_dtype", "max_model_len", "enforce_eager", "revision",
        "disable_padded_drafter_batch", "disable_logprobs", "use_local_argmax_reduction",
        "parallel_drafting"), _AS_SERVED),
    **dict.fromkeys((key for key in _KEYS.values() if key.startswith("ngram_")), _CHAIN),
    "suffix_decoding_max_cached_requests": "of answers that have ended so many bytes "
                                           "are kept as --suffix-global-bytes says, 0 by default",
}
Given = dict[str, tuple[Any, str]]
"""Key -> its value, and the flag that gave it."""


def _translate(words: list[ForeignWord], result: Translation) -> None:
    given: Given = {}
    for word in words:
        if word.name in _KEYS:
            given[_KEYS[word.name]] = (word.values[-1], word.origin)
        else:
            given |= {key: (value, origin) for key, value, origin in keys_of([word])}
    _check_keys(given, result)
    origin = words[-1].origin
    if given.get("method") and str(given["method"][0] or "none").lower() == "none":
        result.set("speculative", "off", origin)
        return
    method = _method(given)
    if "model" in given and given["model"][0]:
        if method in ("draft", "eagle3"):
            result.set("speculative_model", str(given["model"][0]), given["model"][1])
        else:
            result.checks.append(same_model(*given["model"]))
    for field in _FIELDS:
        if field in given:
            result.set(field, str(given[field][0]), given[field][1])
    result.set("speculative", f"{method}:{_drafts(given, method)}", origin)


def _method(given: Given) -> str:
    """What makes drafts; where it is not named, what goes with the other keys."""
    if "method" not in given:
        if "prompt_lookup_max" in given or "prompt_lookup_min" in given:
            return "ngram"
        return "draft" if "model" in given else "mtp"
    name = str(given["method"][0]).lower()
    method = "mtp" if name.endswith("_mtp") else _METHODS.get(name)
    if method is None:
        raise BadConfig(f"{given['method'][1]}: must be one of {', '.join(DRAFTS)} (or another "
                        f"engine's name of these), got {name!r}", "speculative")
    return method


def _check_keys(given: Given, result: Translation) -> None:
    used = {"method", "num_speculative_tokens", "topk", "draft_tokens", "model", *_FIELDS}
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


def _drafts(given: Given, method: str) -> int:
    """SGLang's draft tokens count the token that they follow."""
    key, more = "num_speculative_tokens", 0
    if key not in given and "draft_tokens" in given:
        key, more = "draft_tokens", 1
    if key not in given:
        return DRAFTS[method]
    value, origin = given[key]
    try:
        number = settings.coerce(int, value)
    except ValueError as error:
        raise BadConfig(f"{origin}: {error}", "speculative") from None
    if not 1 <= number - more <= MAX_DRAFTS:
        raise BadConfig(f"{origin}: must be between {1 + more} and {MAX_DRAFTS + more}, "
                        f"got {number}", "speculative")
    return int(number - more)


SPECULATION = Family(_translate, valued=" ".join(["speculative-config", *_KEYS]))
