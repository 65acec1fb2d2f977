"""What is kept of a plan that was sent, so that its result can be applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actorium.actors.scheduler.cache.page_allocator import Ints, Longs


class PlanRecord(NamedTuple):
    """A plan's rows. Their slots may hold other sequences when the result comes."""

    step: int
    slots: Ints
    """i4[rows]: the sampled rows: extends that complete their prompt, then decodes."""
    sids: Longs
    """i8[rows]"""
    sids_column: bytes
    firsts: int
    """How many of the rows are extends."""
    extends: dict[int, int]
    """slot -> sid of every extend, whether it completes its prompt or not."""
    computed: int
    """Tokens that the step computes."""
    window: int = 1
    """Most tokens that each of its decodes emits: the drafts that it verifies, and one."""
    drafts: int = 0
    """Drafts that it makes for each sampled row."""
    attended: float = 0.0
    """Positions that the extends' tokens attend to, summed over these."""
    predicted_us: int = 0
    """Microseconds that a step with extends is expected to take; 0 = nobody has an opinion."""
    media: Sequence[tuple[int, int, int]] = ()
    """Extends of sequences with images: slot, number of the admission, tokens computed by then."""

    @property
    def decodes(self) -> int:
        """How many of the rows are decodes."""
        return len(self.slots) - self.firsts

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its extends."""
        return self.computed - self.decodes * self.window


class VerifiedDrafts(NamedTuple):
    """How far the decodes of a step got: entry c of each list counts rows that emitted c tokens."""

    going: list[int]
    """Rows that go on: the first draft not accepted, if any, was wrong."""
    ended: list[int]
    """Rows that ended: drafts past the end were not tested."""

    def accepted(self, position: int) -> int:
        """Rows whose draft at `position`, counted from 0, was accepted."""
        return sum(self.going[position + 2:]) + sum(self.ended[position + 2:])
