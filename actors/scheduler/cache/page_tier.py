"""Where pages go that the pool has no room for; this one keeps none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from actorium.actors.messages import PageAnswer, PageOrder
from actorium.actors.scheduler.cache.page_allocator import Ints
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, PrefixMatch


class PageTier:
    """Hooks of the scheduler (`host_tier` keeps pages in the host's memory and on a disk)."""

    due = False
    """Whether the next plan has copies to make."""

    def arrived(self, sid: int, key: Callable[[], PrefixKey]) -> None:
        """Sequence `sid` waits from now on."""

    def forget(self, sid: int) -> None:
        """It has ended without being admitted."""

    def fetch(self, sid: int, key: PrefixKey, match: PrefixMatch | None) -> bool:
        """Whether sequence `sid` should wait for pages after `match`, which are on their way."""
        return False

    def planned(self, step: int) -> tuple[bytes, bytes]:
        """`StepPlan.store` and `StepPlan.load` of the plan that is being made."""
        return b"", b""

    def loaded(self, step: int, lost: bytes) -> None:
        """Rank 0 has made the copies of a plan; lost: `StepResult.lost`."""

    def orders(self) -> Sequence[PageOrder]:
        """What is to be sent to the worker beside the plans."""
        return ()

    def answered(self, answer: PageAnswer) -> None:
        """A rank has done an order, or made a plan's copies."""

    def flush(self) -> None:
        """Forgets every page."""

    def holders(self) -> Iterable[tuple[int, list[Ints]]]:
        """(sid, pages by group) of the pages that are being filled; raises `AccountingError` where
        the tier's own books do not balance."""
        return ()

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {}
