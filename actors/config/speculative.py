"""The setting `speculative`: whether drafts are made, how many at most, and who decides."""

from __future__ import annotations

import re
from typing import NamedTuple

from actorium.actors.errors import BadConfig

MAX_DRAFTS = 16
AUTO_DRAFTS = 2
"""Drafts of `auto`: as many as the makers of models with one MTP layer serve them with."""
WANT = f"must be auto, off, mtp:K or mtp:K,fixed with K from 1 to {MAX_DRAFTS}"


class Speculation(NamedTuple):
    """A parsed `speculative`."""

    drafts: int
    """Most draft tokens of a sequence in a step; 0 = off."""
    fixed: bool = False
    """Always so many; otherwise as many as pay, 0 included."""
    auto: bool = False
    """Only where the checkpoint has MTP weights; otherwise it must have them."""


def parse_speculative(text: str) -> Speculation:
    """Parse the setting. Raises `BadConfig`."""
    if text == "auto":
        return Speculation(AUTO_DRAFTS, auto=True)
    if text in ("off", "none"):
        return Speculation(0)
    found = re.fullmatch(r"mtp:(\d{1,2})(,fixed)?", text)
    if found is None or not 1 <= int(found[1]) <= MAX_DRAFTS:
        raise BadConfig(f"speculative: {WANT}, got {text!r}", "speculation.speculative")
    return Speculation(int(found[1]), bool(found[2]))


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Parse `force_acceptance`: probabilities by position, () for an empty text. Raises
    `BadConfig`."""
    try:
        shares = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share <= 1 for share in shares):
        raise BadConfig(f"force_acceptance: must be numbers from 0 to 1 with commas between, "
                        f"got {text!r}", "speculation.force_acceptance")
    return shares
