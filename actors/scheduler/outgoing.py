"""What the scheduler sends, in the order in which it may go out: plans to the worker, records to
the ledger, then the reports to the detokenizer that those records are about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from actorium.actors.core import Send
from actorium.actors.messages import (
    Open,
    ResumeRequest,
    RowLogprobs,
    SequenceEvent,
    Submit,
    ToDetokenizer,
    TokenBatch,
    ToWorker,
    Unknown,
)
from actorium.actors.runtime.roles import TRACER_ROLE, WORKER
from actorium.actors.scheduler.recovery.recovery_log import RecoveryLog
from actorium.actors.scheduler.request_state import (
    RequestState,
    open_message,
    traced_request,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import SlotTable

DETOKENIZER = "detokenizer"
AT_ONCE = 64
"""Requests that are reported at one wake."""
BYTES_AT_ONCE = 1 << 20
"""Bytes after which no more of them are."""
SEQUENCE_BYTES = 256
"""Bytes of a report beside its columns, nearly."""


class OutgoingMessages:
    """Filled while messages are handled, emptied by each wake."""

    def __init__(self, history: RecoveryLog, epoch: int) -> None:
        self.blocked = ""
        """Why the ledger takes no more records; empty = it does. Of reports only rejections go out
        then."""
        self.events: list[SequenceEvent] = []
        """Ends that no result has caused; they go out as a batch of their own."""
        self._history, self._epoch = history, epoch
        self._worker_messages: list[Send] = []
        """Sent first: the worker must not wait."""
        self._reports: list[Send] = []
        self._rejections: list[Send] = []
        """Sent although the ledger is full."""
        self._again: dict[RequestState, bool] = {}
        """Requests that are to be reported once more, the first one first; whether to a client
        that has lost its stream, too."""

    def to_worker(self, message: ToWorker) -> None:
        """Adds a message to the worker."""
        self._worker_messages.append(Send(WORKER, message))

    def to_detokenizer(self, messages: Iterable[ToDetokenizer]) -> None:
        """Adds reports that need no record of their own."""
        self._reports.extend(Send(DETOKENIZER, message) for message in messages)

    def report_batch(self, batch: TokenBatch) -> None:
        """Adds a batch, and the record of it that goes to the ledger first."""
        self._history.reported(batch)
        self._reports.append(Send(DETOKENIZER, batch))

    def reject(self, messages: Iterable[ToDetokenizer]) -> None:
        """Adds reports of a request that was never queued."""
        to = self._rejections if self.blocked else self._reports
        to.extend(Send(DETOKENIZER, message) for message in messages)

    def trace(self, requests: Iterable[RequestState], now: float) -> None:
        """Adds what the tracer makes spans of: behind the records of their ends, so that no later
        life does so again."""
        self._reports.extend(Send(TRACER_ROLE, traced) for request in requests
                             if (traced := traced_request(request, now)) is not None)

    # --- reporting again -------------------------------------------------------------------------

    def resend(self, request: RequestState, again: bool = True) -> None:
        """Has a request reported once more; again: to a client that has lost its stream, too."""
        self._again[request] = self._again.get(request, False) or again

    def resend_all(self, state: SchedulerState, now: float, sids: Sequence[int] = ()) -> None:
        """Has every request reported, for a detokenizer that is new; or those of some sequences, of
        which it has missed something."""
        self._history.finished(state.finished_requests, now)
        self._history.queue_retained(sids)
        missed = [state.sequences[sid].request for sid in sids if sid in state.sequences]
        for request in missed if sids else state.requests.values():
            self.resend(request, again=False)

    def report_again(self, state: SchedulerState) -> None:
        """Reports a bounded part of what is to be reported once more."""
        left, most = (0, 0) if self.blocked else (BYTES_AT_ONCE, AT_ONCE)
        while self._again and most > 0 and left > 0:
            request = next(iter(self._again))
            again = self._again.pop(request)
            left, most = left - report_bytes(request, state.table), most - 1
            with state.guard.of(request):
                self.to_detokenizer([*self._replay(request, state.table, again)])

    def answer_resume(self, state: SchedulerState, resume: ResumeRequest, now: float) -> None:
        """Reports the request that a client asks for, or that there is none."""
        request, name_taken = self._history.find_resumed(state, resume, now)
        if request is None:
            self.to_detokenizer([Unknown(resume.rid, resume.client, name_taken)])
        else:
            self.resend(request)

    def resend_if_known(self, state: SchedulerState, submit: Submit, now: float) -> bool:
        """Reports the request that `submit` repeats; False if it is a new one."""
        request = self._history.find_repeated(state, submit, now)
        if request is not None:
            self.resend(request)
        return request is not None

    def _replay(self, request: RequestState, table: SlotTable, again: bool = False
                ) -> Iterator[Open]:
        """Yields a request's choices with all that they have emitted; again: the client knows part.
        """
        for choice in request.choices:
            drafted, accepted = table.drafts_of(choice)
            yield msgspec.structs.replace(
                open_message(choice, self._epoch), emitted=table.emitted_of(choice).tobytes(),
                emitted_logprobs=choice.logprobs.copy(),
                prompt_logprobs=choice.prompt_logprobs.copy(), experts=choice.experts.copy(),
                end=choice.finish, again=again,
                cached_tokens=choice.cached_len if choice.first_token_reported else None,
                draft_tokens=drafted, accepted_tokens=accepted, weights=choice.runs.copy())

    # --- sending ---------------------------------------------------------------------------------

    def pop(self, table: SlotTable) -> list[Send]:
        """Takes out what may be sent now."""
        out, self._worker_messages = self._worker_messages, []
        if self._rejections:
            out += self._rejections
            self._rejections = []
        if not self.blocked:
            if self._history.resending and not self._again:
                for request in self._history.next_retained():
                    self.to_detokenizer(self._replay(request, table))
            out += self._history.pop_records()
            out += self._reports
            self._reports = []
        return out

    @property
    def has_more(self) -> bool:
        """There is more to send at once."""
        return (bool(self._again) or self._history.resending) and not self.blocked

    @property
    def empty(self) -> bool:
        """Nothing is left to be sent to the detokenizer."""
        return not (self.events or self._reports or self._again or self._history.resending)


def report_bytes(request: RequestState, table: SlotTable) -> int:
    """Returns how many bytes the reports of a request have, nearly."""
    return sum(SEQUENCE_BYTES + 4 * len(table.emitted_of(choice))
               + _rows_bytes(choice.logprobs) + _rows_bytes(choice.prompt_logprobs)
               + sum(len(own.experts.data) for own in choice.experts)
               for choice in request.choices)


def _rows_bytes(rows: list[RowLogprobs]) -> int:
    return sum(len(row.chosen) + len(row.ranks) + len(row.top_ids) + len(row.top_logprobs)
               for row in rows)
