"""Orders that go to all replicas and have one answer."""

from __future__ import annotations

from collections.abc import Set

import msgspec
from msgspec import Struct

from actorium.actors.messages import Flush, Reply


class FlushOrder(Struct):
    """A `Flush` under way."""

    order: Flush
    left: set[int]
    """Replicas that have not answered."""
    sums: dict[str, int]


class FlushOrders:
    """All of them."""

    def __init__(self) -> None:
        self._open: dict[tuple[bytes, str], FlushOrder] = {}

    def begin(self, order: Flush, replicas: list[int]) -> None:
        """The order goes to these replicas."""
        self._open[order.client, order.rid] = FlushOrder(order, set(replicas),
                                                         {"pages": 0, "kept": 0})

    def add(self, replica: int, reply: Reply) -> bool:
        """A replica's answer; False if it answers none of these orders."""
        order = self._open.get((reply.client, reply.rid))
        if order is None or replica not in order.left:
            return False
        order.left.discard(replica)
        for name, count in msgspec.json.decode(reply.json, type=dict[str, int]).items():
            order.sums[name] = order.sums.get(name, 0) + count
        return True

    def gone(self, replica: int) -> None:
        """A replica will not answer any more."""
        for order in self._open.values():
            order.left.discard(replica)

    def pop(self, there: Set[int]) -> list[Reply]:
        """The answers that are complete; there: the replicas that there are."""
        done = [key for key, order in self._open.items() if not order.left & there]
        orders = [self._open.pop(key) for key in done]
        return [Reply(each.order.rid, each.order.client, msgspec.json.encode(each.sums))
                for each in orders]
