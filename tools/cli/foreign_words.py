"""Flags of other engines as they stand in a command line, what they are translated to, and two
families of them.

Graphs and compilation, of vLLM and SGLang: vLLM has one list of sizes, in tokens, for steps of
decodes and for those with prompts; here each kind has its own, and both are set.

Pages that leave the device for the host's memory or a disk: all of these come to `--host-cache`, in
bytes. Where another engine derives the size from its pool, or takes what memory there is, nothing
is set, and a line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from actorium.actors.config import sources as settings
from actorium.actors.config.sources import Setting
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.cli.foreign_flags import Group

SWITCH, VALUE, LIST = "switch", "value", "list"


class Foreign(NamedTuple):
    """A flag that is no setting here."""

    arity: str
    """SWITCH, VALUE or LIST."""
    family: str
    """What treats it: "accepted", "refused", or a key of `translate.FAMILIES`."""
    group: Group | None = None
    off: bool = False
    """This form of a switch means the opposite of the one in the table."""


class ForeignWord(NamedTuple):
    """Such a flag as it stands in argv."""

    name: str
    """Less the dashes, and less what follows a dot."""
    key: str
    """What follows the dot in `--speculative-config.method`; "" without one."""
    origin: str
    values: list[str]
    off: bool
    flag: Foreign


class Family(NamedTuple):
    """Flags that mean something here; their names less the dashes, with spaces between."""

    treat: Callable[[list[ForeignWord], Translation], None]
    switches: str = ""
    valued: str = ""
    lists: str = ""


class Translation:
    def __init__(self, written: Mapping[str, str]) -> None:
        """written: field -> flag, of the settings' own flags."""
        self._written = written
        self.layer: dict[str, Setting] = {}
        self.notes: list[str] = []
        self.checks: list[Callable[[Config], None]] = []

    def has(self, field: str) -> bool:
        """Whether its own flag is there, or it was set before."""
        return field in self._written or field in self.layer

    def set(self, field: str, value: Any, origin: str) -> None:
        """Raises `BadConfig` where the field's own flag is there as well."""
        if field in self._written:
            raise BadConfig(f"{origin}: cannot be combined with {self._written[field]}", field)
        self.layer[field] = settings.setting(settings.fields()[field], value, origin)


def json_object(word: ForeignWord) -> dict[str, Any]:
    """Its last value. Raises `BadConfig`."""
    try:
        return msgspec.json.decode(word.values[-1], type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadConfig(f"{word.origin}: is not a JSON object: {error}", word.name) from None


def keys_of(words: Iterable[ForeignWord]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, its origin) of flags that take JSON objects, or one key behind a dot. Raises
    `BadConfig`."""
    for word in words:
        given = {word.key: word.values[-1]} if word.key else json_object(word)
        for key, value in given.items():
            yield key, value, word.origin if word.key else f"{word.origin} {key}"


def same_model(wanted: str, origin: str) -> Callable[[Config], None]:
    """Checks that a model that is named again is the served one."""
    def check(config: Config) -> None:
        if wanted != config.model.model:
            raise BadConfig(f"{origin}: must be the model itself ({config.model.model!r}), "
                            f"got {wanted!r}", "model")
    return check


def number_of(word: ForeignWord) -> int:
    """Its last value, at least 1. Raises `BadConfig`."""
    try:
        number = int(settings.coerce(int, word.values[-1]))
    except ValueError as error:
        raise BadConfig(f"{word.origin}: {error}", word.name) from None
    if number < 1:
        raise BadConfig(f"{word.origin}: must be at least 1, got {number}", word.name)
    return number


SIZES, MOST = "cudagraph_capture_sizes", "max_cudagraph_capture_size"
MODES: dict[str, dict[str, str | bool]] = {
    "none": {"enforce_eager": True},
    "piecewise": {"graph_batch_sizes": "off", "graph_token_counts": "auto"},
    "full": {"graph_batch_sizes": "auto", "graph_token_counts": "auto"},
    "full_decode_only": {"graph_batch_sizes": "auto", "graph_token_counts": "off"},
    "full_and_piecewise": {"graph_batch_sizes": "auto", "graph_token_counts": "auto"}}
"""vLLM's cudagraph_mode; the first three by number, too."""
COMPILED = ("none", "stock_torch_compile", "dynamo_trace_once", "vllm_compile")
"""vLLM's mode (once: level), by number."""
IDLE_KEYS = (
    "backend cache_dir compile_cache_save_format compile_mm_encoder compile_ranges_endpoints "
    "compile_ranges_split_points compile_sizes cudagraph_copy_inputs cudagraph_mm_encoder "
    "cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops dynamic_shapes_config "
    "fast_moe_cold_start full_cuda_graph inductor_compile_config inductor_passes "
    "ir_enable_torch_wrap local_cache_dir pass_config splitting_ops use_inductor "
    "use_inductor_graph_partition")
"""Keys of vLLM's compilation_config that change nothing here."""
NO_EFFECT = frozenset(IDLE_KEYS.split())


def graphs(words: list[ForeignWord], result: Translation) -> None:
    """Translates to settings of [device]. The more specific wins: sizes over modes over
    switches."""
    for word in words:
        if word.flag.arity == SWITCH:
            _switch(word, result)
    for name in ("decode", "prefill"):
        for word in words:
            if word.name == f"cuda-graph-backend-{name}":
                _backend(word, name == "decode", result)
    given: dict[str, tuple[Any, str]] = {}
    for word in words:
        if word.name == "compilation-config":
            given |= _config_keys(word)
        elif word.flag.arity == LIST:
            given[SIZES] = (",".join(word.values), word.origin)
        elif word.name == "max-cudagraph-capture-size":
            given[MOST] = (word.values[-1], word.origin)
    _compilation(given, result)


def _switch(word: ForeignWord, result: Translation) -> None:
    if word.name.endswith("torch-compile"):
        if word.off:
            return
        if result.has("optimization_level"):
            result.notes.append(f"{word.origin} changes nothing here: the level is given")
            return
        result.set("optimization_level", 3, word.origin)
        result.notes.append(f"{word.origin} is taken as -O3: passes over the layers' graphs, and "
                            "graphs of steps; nothing is compiled by Inductor")
    elif word.off or not result.has("graph_token_counts"):
        result.set("graph_token_counts", "off" if word.off else "all", word.origin)


def _backend(word: ForeignWord, decode: bool, result: Translation) -> None:
    field = "graph_batch_sizes" if decode else "graph_token_counts"
    if word.values[-1].lower() in ("disabled", "none"):
        result.set(field, "off", word.origin)
    elif not result.has(field):
        result.set(field, "auto" if decode else "all", word.origin)


def _config_keys(word: ForeignWord) -> dict[str, tuple[Any, str]]:
    """Key -> (value, its origin): of an object, of one key behind a dot, or of a number alone,
    which was the level."""
    text = word.values[-1]
    if word.key:
        key = word.key.partition(".")[0]  # -cc.pass_config.fuse_norm_quant
        try:
            return {key: (msgspec.json.decode(text), word.origin)}
        except msgspec.DecodeError:
            return {key: (text, word.origin)}
    found = {"level": int(text)} if text.isdecimal() else json_object(word)
    return {key: (value, f"{word.origin} {key}") for key, value in found.items()}


def _compilation(given: dict[str, tuple[Any, str]], result: Translation) -> None:
    known = {"mode", "level", "cudagraph_mode", "use_cudagraph", "debug_dump_path", SIZES, MOST}
    idle = [origin for key, (_, origin) in given.items() if key in NO_EFFECT]
    for key, (_, origin) in given.items():
        if key not in known | NO_EFFECT:
            hint = settings.suggestion(key, known | NO_EFFECT)
            raise BadConfig(f"{origin}: no such key{hint}", "compilation_config")
    if idle:
        result.notes.append(f"{', '.join(idle)} {'changes' if len(idle) == 1 else 'change'} "
                            "nothing here: nothing is compiled by torch (--passes, "
                            "--graph-batch-sizes, --graph-token-counts)")
    for key in ("level", "mode"):
        if key in given and _mode(*given[key]) == "none":
            result.set("passes", "none", given[key][1])
    if "debug_dump_path" in given:
        result.set("dump_passes", *given["debug_dump_path"])
    if "use_cudagraph" in given and given["use_cudagraph"][0] in (False, "false", "False"):
        _set_free(MODES["none"], given["use_cudagraph"][1], result)
    if "cudagraph_mode" in given:
        value, origin = given["cudagraph_mode"]
        mode = _named(value, tuple(MODES)[:3], tuple(MODES), origin)
        _set_free(MODES[mode], origin, result)
    if SIZES in given:
        _sizes(*given[SIZES], result)
    if MOST in given:
        value, origin = given[MOST]
        for field in ("graph_max_batch_size", "graph_max_tokens"):
            result.set(field, value, origin)


def _mode(value: Any, origin: str) -> str:
    return _named(value, COMPILED, COMPILED, origin)


def _named(value: Any, numbered: tuple[str, ...], names: tuple[str, ...], origin: str) -> str:
    """One of the names, which may be written as its number."""
    text = "none" if value is None else str(value).strip().lower()
    if text.isdecimal() and int(text) < len(numbered):
        return numbered[int(text)]
    if text not in names:
        raise BadConfig(f"{origin}: must be one of {', '.join(names).upper()}, got {value!r}",
                        "compilation_config")
    return text


def _set_free(fields: dict[str, str | bool], origin: str, result: Translation) -> None:
    """Returns defaults that no flag has set; vLLM takes --enforce-eager and sizes beside a mode."""
    for field, value in fields.items():
        if not result.has(field) or value == "off":
            result.set(field, value, origin)


def _sizes(value: Any, origin: str, result: Translation) -> None:
    """One list for both kinds of steps, but for a kind that a mode switched off."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    numbers = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not numbers:
        _set_free(MODES["none"], origin, result)
        return
    for field in ("graph_batch_sizes", "graph_token_counts"):
        found = result.layer.get(field)
        if found is None or found.value != "off":
            result.set(field, ",".join(numbers), origin)


UNITS = {"kv-offloading-size": 1 << 30, "hicache-size": 1_000_000_000, "cache-ram": 1 << 20}
"""Flag -> bytes: GiB of vLLM, GB of SGLang, MiB of llama-server."""
NATIVE = ("native", "null", "none")
_SAY = "--host-cache SIZE says how much of the host's memory pages get"


def tiers(words: list[ForeignWord], result: Translation) -> None:
    """Translates to `host_cache`. Raises `BadConfig` on bad values and on other engines' stores."""
    last = {word.flag.arity if word.flag.arity == SWITCH else word.name: word for word in words}
    for name in ("kv-offloading-size", "cache-ram"):
        if name in last:
            _size(last[name], result)
    backend = last.get("kv-offloading-backend")
    if backend is not None and backend.values[-1].lower() not in NATIVE:
        raise BadConfig(f"{backend.origin}: must be native: pages lie in --host-cache and "
                        f"--disk-cache alone, got {backend.values[-1]!r}", "host_cache")
    _hierarchical(last, result)
    if (store := last.get("hicache-storage-backend")) is not None:
        result.notes.append(f"{store.origin} changes nothing here: --disk-cache DIR:SIZE keeps "
                            "pages on a disk")


def _hierarchical(last: dict[str, ForeignWord], result: Translation) -> None:
    """SGLang's: a switch, and how much, of which a size in GB for each rank comes first."""
    switch, size, ratio = map(last.get, (SWITCH, "hicache-size", "hicache-ratio"))
    if switch is None or switch.off:
        for word in (size, ratio):
            if word is not None:
                result.notes.append(
                    f"{word.origin} changes nothing without --enable-hierarchical-cache")
    elif size is not None and _size(size, result):
        result.notes.append(f"{size.origin} is taken as the sum over all ranks")
    else:
        origins = [word.origin for word in (switch, ratio) if word is not None]
        verb = "changes" if len(origins) == 1 else "change"
        result.notes.append(f"{', '.join(origins)} {verb} nothing here: {_SAY}")


def _size(word: ForeignWord, result: Translation) -> bool:
    """Sets it, unless it is 0; whether it has."""
    try:
        number = float(settings.coerce(float, word.values[-1]))
    except ValueError as error:
        raise BadConfig(f"{word.origin}: {error}", "host_cache") from None
    if number == -1 and word.name == "cache-ram":
        result.notes.append(f"{word.origin} -1 changes nothing here: {_SAY}")
    elif not 0 <= number < 1 << 30:
        raise BadConfig(f"{word.origin}: must not be negative, got {word.values[-1]}" if number < 0
                        else f"{word.origin}: is no size, got {word.values[-1]}", "host_cache")
    elif number > 0:
        result.set("host_cache", int(number * UNITS[word.name]), word.origin)
        return True
    return False
