"""Settings that are texts with a form of their own: sizes, keys, passes, drafts."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from actorium.actors.errors import BadConfig

# --- numbers and sizes as people write them: 32k, 8GiB ---

_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LEAST_DISK = 1 << 20


def whole_number(text: str) -> int | None:
    """`32k` = 32,768, `8GiB`, `1.5g`; None where it is none. Raises `ValueError` on other texts."""
    short = text[:-2] if text.lower().endswith(("kib", "mib", "gib", "tib")) else text
    scale = _SUFFIXES.get(short[-1:].lower())
    number = int(text) if scale is None else float(short[:-1]) * scale
    return int(number) if math.isfinite(number) and number == int(number) else None


class DiskBound(NamedTuple):
    """A directory and the most that may lie in it."""

    directory: Path
    bytes: int


def parse_disk_cache(text: str) -> DiskBound | None:
    """`DIR:64GiB`; None of an empty text. Raises `ValueError` with what it must be."""
    if not text:
        return None
    directory, colon, size = text.rpartition(":")
    try:
        bound = whole_number(size.strip())
    except ValueError:
        bound = None
    if not (colon and directory) or bound is None:
        raise ValueError("must be a directory and a size, as DIR:64GiB")
    if bound < LEAST_DISK:
        raise ValueError("must have room for at least 1 MiB (DIR:64GiB)")
    return DiskBound(Path(directory).expanduser().absolute(), bound)


def disk_cache_fault(text: str) -> str:
    """What is wrong with it; empty: nothing."""
    try:
        parse_disk_cache(text)
    except ValueError as error:
        return str(error)
    return ""


# --- keys as their SHA-256 digests: what is written down of one, and what is compared ---

HASHED = "sha256:"
"""Before the digest of a key that is given so, in hexadecimal."""
_WHOLE = re.compile(HASHED + "[0-9a-fA-F]{64}")


def digest_of(key: str) -> bytes:
    """The digest of a key; of one that is given as its digest that itself."""
    if _WHOLE.fullmatch(key):
        return bytes.fromhex(key.removeprefix(HASHED))
    return hashlib.sha256(key.encode()).digest()


def hashed(key: str) -> str:
    """The key, given as its digest."""
    return HASHED + digest_of(key).hex()


# --- which rewritings of the layers' graphs are used ---

PASSES = ("reduce_norm", "product_add", "norm_add", "add_norm", "qk_rope_kv", "gated_product",
          "gate_add", "norm_quant", "act_quant", "norm_product")
"""Their names, in the order in which they run."""


def parse_passes(text: str) -> tuple[str, ...]:
    """The names of those that are on, in order. `auto`, `all` or `none`, then names to add, or to
    take away with a `-` before them; names alone are those and no others. Raises `BadConfig`."""
    words = _pass_words(text)
    if not words:
        raise BadConfig(f"passes: {_passes_want()}, got {text!r}", "device.passes")
    on = set(PASSES) if words[0] in ("auto", "all") or words[0].startswith("-") else set()
    for i, word in enumerate(words):
        if word in ("auto", "all", "none") and i == 0:
            continue
        name = word.removeprefix("-")
        if name not in PASSES:
            raise BadConfig(f"passes: no pass is called {name!r}: {_passes_want()}",
                            "device.passes")
        if word.startswith("-"):
            on.discard(name)
        else:
            on.add(name)
    return tuple(name for name in PASSES if name in on)


def chooses_passes(text: str) -> bool:
    """Whether passes that measurably lose are left out: `auto`, or a `-` before the first name."""
    return _pass_words(text)[:1] == ["auto"] or text.strip().startswith("-")


def _pass_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _passes_want() -> str:
    return ("must be auto, all, none, or names, each taken away by a - before it, of "
            f"{', '.join(PASSES)}")


# --- whether drafts are made, how many at most, and who decides ---

MAX_DRAFTS = 16
DRAFTS = {"mtp": 2, "eagle3": 3, "draft": 4, "ngram": 4, "suffix": 8, "grammar": 6}
"""What makes drafts, and how many at most where no number is given. Two by the MTP layer are what
the makers of models with one serve them with."""
GRAMMAR = "grammar"
"""The one whose drafts the scheduler makes: what a request's grammar leaves no choice about."""
TEXT_METHODS = frozenset({"ngram", "suffix"})
"""Those that read the sequence's own tokens."""
DRAFTS_WANT = ("must be auto, off, or METHOD[:K], several with + between (the first may be auto), "
               f"or one alone with ,fixed behind it: of {', '.join(DRAFTS)}, with K from 1 to "
               f"{MAX_DRAFTS}")


class Speculation(NamedTuple):
    """A parsed `speculative`."""

    methods: Mapping[str, int]
    """What makes drafts, a key of `DRAFTS`, and the most of a sequence in a step; empty = off."""
    fixed: bool = False
    """Always so many; otherwise as many as pay, 0 included."""
    auto: bool = False
    """mtp only where the checkpoint has the weights for it; otherwise it must have them."""

    @property
    def by_text(self) -> bool:
        """Whether any method reads each sequence's tokens."""
        return not TEXT_METHODS.isdisjoint(self.methods)

    @property
    def drafts(self) -> int:
        """The most of a sequence in a step, whatever makes them; 0 = off."""
        return max(self.methods.values(), default=0)


def parse_speculative(text: str) -> Speculation:
    """Parse the setting. Raises `BadConfig`."""
    if text in ("off", "none"):
        return Speculation({})
    asked, comma, rest = text.partition(",")
    first, *others = asked.split("+")
    auto = first == "auto" and not comma
    methods = {"mtp": DRAFTS["mtp"]} if auto else {}
    for part in others if auto else (first, *others):
        name, colon, number = part.partition(":")
        drafts = int(number) if re.fullmatch(r"\d{1,2}", number) else DRAFTS.get(name, 0)
        if (name not in DRAFTS or name in methods or not 1 <= drafts <= MAX_DRAFTS
                or (colon and not number.isdecimal()) or comma and rest != "fixed"):
            raise BadConfig(f"speculative: {DRAFTS_WANT}, got {text!r}", "speculation.speculative")
        methods[name] = drafts
    if comma and len(methods) > 1:
        raise BadConfig(f"speculative: with ,fixed one method makes all drafts, got {text!r}",
                        "speculation.speculative")
    return Speculation(methods, bool(comma), auto)


def parse_acceptance(text: str) -> tuple[float, ...]:
    """`force_acceptance`: probabilities by position, () of an empty text. Raises `BadConfig`."""
    try:
        shares = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share <= 1 for share in shares):
        raise BadConfig(f"force_acceptance: must be numbers from 0 to 1 with commas between, "
                        f"got {text!r}", "speculation.force_acceptance")
    return shares
