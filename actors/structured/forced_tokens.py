"""Tokens that a grammar leaves no choice about, as drafts. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def behind_emitted(forced: Sequence[int], drafts: Sequence[int]) -> Sequence[int]:
    """Returns what of the forced tokens follows on those that a step is sure to emit which verifies
    these drafts: it accepts those that are as forced, and samples one more."""
    pairs = zip(drafts, forced, strict=False)
    wrong = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
    return forced[wrong + 1:]
