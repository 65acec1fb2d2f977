"""Numbers of those whose answers may become drafts of one another's.

The worker keeps answers that have ended by such a number, and drafts of those of the same number
alone. Who shares a number shares cached prefixes as well: the same tenant, salt, adapter and
weights. A number never comes back: not after a flush, nor in a later life of the scheduler; answers
of one that is no longer given away are written over in time.
"""

from __future__ import annotations

MOST_NAMES = 16384
"""Each request may bring a salt of its own: those that were not seen for longest lose theirs."""


class AnswerOwners:
    """A number for each name of prefixes (see `salt_of`)."""

    def __init__(self, epoch: int) -> None:
        """epoch: of this life of the scheduler."""
        self._last, self._numbers = epoch << 32, dict[str, int]()

    def number(self, name: str) -> int:
        """The owner's number, above 0; a new one for a name that has none."""
        number = self._numbers.pop(name, 0)
        if not number:
            self._last = number = self._last + 1
            if len(self._numbers) >= MOST_NAMES:
                del self._numbers[next(iter(self._numbers))]
        self._numbers[name] = number
        return number

    def flush(self) -> None:
        """Answers so far are nobody's any more."""
        self._numbers.clear()
