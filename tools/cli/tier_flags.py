"""Flags of other engines about pages that leave the device for the host's memory or a disk.

All of them come to `--host-cache`, in bytes. Where another engine derives the size from its pool,
or takes what memory there is, nothing is set, and a line says so.
"""

from __future__ import annotations

from actorium.actors.config import sources as settings
from actorium.actors.errors import BadConfig
from actorium.tools.cli.foreign_words import SWITCH, ForeignWord, Translation

UNITS = {"kv-offloading-size": 1 << 30, "hicache-size": 1_000_000_000, "cache-ram": 1 << 20}
"""Flag -> bytes: GiB of vLLM, GB of SGLang, MiB of llama-server."""
NATIVE = ("native", "null", "none")
_SAY = "--host-cache SIZE says how much of the host's memory pages get"


def tiers(words: list[ForeignWord], result: Translation) -> None:
    """To `host_cache`. Raises `BadConfig` on values that are none, and on stores of others."""
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
