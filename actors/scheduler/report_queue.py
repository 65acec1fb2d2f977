"""Requests that are to be reported to the detokenizer once more, a bounded part at each wake: to a
new one everything is reported, and steps go on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from actorium.actors.messages import RowLogprobs
from actorium.actors.scheduler.request_state import RequestState
from actorium.actors.scheduler.slot_table import SlotTable

AT_ONCE = 64
"""Requests that are reported at one wake."""
BYTES_AT_ONCE = 1 << 20
"""Bytes after which no more of them are."""
SEQUENCE_BYTES = 256
"""Bytes of a report beside its columns, nearly."""


class ReportQueue:
    """Each request is here once, however often it was asked for."""

    def __init__(self) -> None:
        self._due: dict[RequestState, bool] = {}
        """The first to be reported comes first; see `add`."""

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, request: RequestState, again: bool) -> None:
        """again: to a client that has lost its stream, too."""
        self._due[request] = self._due.get(request, False) or again

    def pop(self, table: SlotTable) -> Iterator[tuple[RequestState, bool]]:
        """Takes out those that are reported now."""
        left, most = BYTES_AT_ONCE, AT_ONCE
        while self._due and most > 0 and left > 0:
            request = next(iter(self._due))
            left, most = left - report_bytes(request, table), most - 1
            yield request, self._due.pop(request)


def report_bytes(request: RequestState, table: SlotTable) -> int:
    """Bytes of all that is reported of a request, nearly."""
    return sum(SEQUENCE_BYTES + 4 * len(table.emitted_of(choice))
               + _rows_bytes(choice.logprobs) + _rows_bytes(choice.prompt_logprobs)
               for choice in request.choices)


def _rows_bytes(rows: list[RowLogprobs]) -> int:
    return sum(len(row.chosen) + len(row.ranks) + len(row.top_ids) + len(row.top_logprobs)
               for row in rows)
