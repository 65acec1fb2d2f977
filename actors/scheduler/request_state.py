"""The scheduler's records: of a request, of its sequences (one for each choice), and of a plan that
was sent, so that its result can be applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from actorium.actors.ledger.records import NO_MARKS, SequenceMarks
from actorium.actors.messages import (
    BACKGROUND,
    Open,
    RowExperts,
    RowLogprobs,
    SequenceEvent,
    Submit,
)
from actorium.actors.params import ResolvedParams
from actorium.actors.runtime.inflight_journal import name_of
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.actors.scheduler.cache.kv_cache_manager import PrefixLock
from actorium.actors.scheduler.cache.page_allocator import NO_PAGES, Ints, Longs
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, PrefixMatch
from actorium.actors.scheduler.cache.tree_nodes import TreeNode
from actorium.actors.tracing.trace_messages import TracedChoice, TracedRequest

REPORTED_PROMPT_TOKENS = 1024
"""Tokens at the end of a prompt that are sent to the detokenizer with each choice; all of them
where prompt logprobs are wanted."""


Key = tuple[bytes, str]
"""(client, rid)"""


def request_name(client: bytes, rid: str) -> bytes:
    """Returns a request's name in the journal."""
    return name_of(client, rid.encode())


def salt_of(submit: Submit) -> str:
    """Returns what prefixes are shared within: a tenant, or within that a salt; apart for each
    adapter (a tenant's name has no byte below a space)."""
    adapter = "" if submit.adapter is None else f"\1{submit.adapter.digest.hex()}"
    salt = f"\0{submit.cache_salt}" if submit.cache_salt else ""
    return f"{adapter}{submit.tenant}{salt}"


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of choice `index`, 63 bits: the request's own for 0, else splitmix64 of
    both."""
    return splitmix64(seed, index) >> 1 if index else seed


class Rejection(NamedTuple):
    """Why a request is refused, or ends."""

    code: str
    """An `errors.CODES` name."""
    why: str

    def event(self, sid: int) -> SequenceEvent:
        """Returns the end of a sequence for this reason."""
        return SequenceEvent(sid=sid, finish_reason="error", error_code=self.code, error=self.why)


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice of a request: what is queued, admitted, extended, decoded and preempted.

    While it holds a slot, its emitted tokens lie in the slot table; `emitted` keeps them while it
    holds none (after a preemption).
    """

    sid: int
    request: RequestState
    index: int
    seed: int
    slot: int = 0
    """0 = none."""
    emitted: Ints = field(default_factory=lambda: NO_PAGES)
    total: int = 0
    """Tokens of this admission: prompt and whatever had been emitted before it."""
    computed: int = 0
    """How many of them the plans so far extend over."""
    shareable: int = 0
    """How many of them may enter the prefix cache, as far as images go."""
    cached_len: int = 0
    """Tokens found in the prefix cache at the first admission."""
    counted: bool = False
    """Its prompt is counted: it was admitted, in this life of the scheduler or an earlier one."""
    preempted: bool = False
    preemptions: int = 0
    """How often it was taken off the batch."""
    passed: int = 0
    """How often one that came later was admitted first."""
    key: PrefixKey | None = None
    """Of all its tokens; made when the prefix cache is first asked, dropped when they change."""
    match: PrefixMatch | None = None
    match_version: int = -1
    """Of the memory when `match` was made."""
    branch: int = 0
    """Tokens after which its prompt leaves what the prefix cache knows; 0 = nowhere."""
    pending: bool = False
    """A checkpoint that it can start from is being saved by the plan in the making."""
    started: TreeNode | None = None
    """Whose checkpoint it started from."""
    lock: PrefixLock | None = None
    """On its cached prefix, while it holds a slot."""
    first_token_reported: bool = False
    drafted: int = 0
    """Drafts verified for it (while it holds a slot: in the slot table)."""
    accepted: int = 0
    """Those of them that were accepted."""
    prompt_logprobs_reported: int = 1
    """Prompt positions whose logprobs went out (position 0 has none)."""
    logprobs: list[RowLogprobs] = field(default_factory=list)
    """Of all its emitted tokens, in order, where a recovery may want them."""
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    experts_reported: int = 0
    """Tokens, from the first one of the prompt, whose experts went out."""
    experts: list[RowExperts] = field(default_factory=list)
    """Of all of them, in order, where a recovery may want them."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """See `WeightsRuns`."""
    weights: str = ""
    """What stands for the weights in the name of its prefixes: those of its admission, while it
    holds a slot."""
    finish: SequenceEvent | None = None
    """How it has ended."""
    marks: SequenceMarks = NO_MARKS
    """What an earlier life of the scheduler has counted of it."""
    traced: TracedChoice | None = None
    """What its spans are made of, once it has ended, where its request is traced."""

    @property
    def tenant(self) -> str:
        return self.request.submit.tenant

    @property
    def salt(self) -> str:
        return salt_of(self.request.submit)

    @property
    def adapter(self) -> bytes:
        """Digest of its adapter; empty = it has none."""
        adapter = self.request.submit.adapter
        return b"" if adapter is None else adapter.digest

    @property
    def priority(self) -> int:
        return self.request.submit.priority

    @property
    def background(self) -> bool:
        """It gives way to all sequences that are not."""
        return self.request.submit.priority == BACKGROUND

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def pooled(self) -> bool:
        """Nothing is sampled: it ends with its prompt."""
        return self.request.submit.pooling is not None

    @property
    def wants_rows(self) -> bool:
        """What the model gives for each token of the prompt is wanted, so that none may come from
        the prefix cache."""
        submit = self.request.submit
        if submit.params.routed_experts and not len(self.emitted):
            return True  # behind the first token, those of everything before are known
        return submit.params.prompt_logprobs >= 0 or (
            submit.pooling is not None and submit.pooling.every_row)

    @property
    def end(self) -> int:
        """Tokens, prompt included, at which it ends with `length`."""
        return self.prompt_len + self.request.params.max_tokens


@dataclass(slots=True, eq=False)
class RequestState:
    """What a Submit asked for, and which of its sequences still live."""

    submit: Submit
    prompt: Ints
    params: ResolvedParams
    """Of the submit, with max_tokens capped to what can be held."""
    name: bytes = b""
    """In the journal."""
    live: dict[int, SequenceState] = field(default_factory=dict)
    """By sid."""
    choices: list[SequenceState] = field(default_factory=list)
    """All of them, in order."""
    waiting: int = 0
    """Sequences of it in the waiting queue."""

    @property
    def key(self) -> tuple[bytes, str]:
        return self.submit.client, self.submit.rid

    @property
    def begun(self) -> bool:
        """Whether it was ever admitted to the batch, in this life of the scheduler or before."""
        return any(choice.slot or choice.preempted or choice.counted for choice in self.choices)

    @property
    def lost_vector(self) -> bool:
        """Whether it has ended with a vector, of which the ledger knows nothing."""
        return self.submit.pooling is not None and any(
            choice.finish is not None and choice.finish.finish_reason == "stop"
            and choice.finish.pooled is None for choice in self.choices)

    def cap(self, limit: int) -> None:
        """Lets prompt and completion together have at most `limit` tokens."""
        if self.submit.pooling is not None:
            return
        room = limit - len(self.prompt)
        if self.params.max_tokens > room:
            self.params = msgspec.structs.replace(self.params, max_tokens=room)


def received(submit: Submit, now: float) -> Submit:
    """Returns a new request with the time, if it is traced: the first that queues it notes it."""
    return submit if submit.trace is None or submit.queued else msgspec.structs.replace(
        submit, queued=now)


def new_request_state(submit: Submit, first_sid: int) -> RequestState:
    """Returns the request of a Submit, with its `n` sequences numbered from `first_sid`."""
    prompt = np.frombuffer(submit.prompt, np.int32, count=len(submit.prompt) // 4)
    request = RequestState(submit, prompt, submit.params, request_name(submit.client, submit.rid))
    for index in range(submit.n):
        sid = first_sid + index
        request.live[sid] = SequenceState(sid, request, index, choice_seed(submit.seed, index))
    request.choices = list(request.live.values())
    return request


def open_message(sequence: SequenceState, epoch: int) -> Open:
    """Returns what the detokenizer must know of a sequence before its tokens. epoch: the
    scheduler's."""
    submit = sequence.request.submit
    prompt = submit.prompt
    if submit.params.prompt_logprobs < 0:
        prompt = prompt[-4 * REPORTED_PROMPT_TOKENS:]
    return Open(sid=sequence.sid, rid=submit.rid, index=sequence.index, client=submit.client,
                prompt=prompt, text=submit.text, logprobs=submit.params.logprobs,
                epoch=epoch, resume_seconds=submit.resume_seconds, created=submit.created,
                prompt_before=(len(submit.prompt) - len(prompt)) // 4, trace=submit.trace)


def traced_request(request: RequestState, now: float) -> TracedRequest | None:
    """Returns what the spans of a request are made of that has just ended; None if it is not
    traced."""
    submit, params = request.submit, request.params
    if submit.trace is None:
        return None
    return TracedRequest(
        submit.trace, submit.rid, submit.arrival, submit.queued, len(request.prompt),
        params.max_tokens, params.temperature, params.top_p, params.top_k,
        params.presence_penalty, params.frequency_penalty,
        [_with_end(choice, choice.traced or TracedChoice(choice.index, ended=now))
         for choice in request.choices])


def _with_end(sequence: SequenceState, choice: TracedChoice) -> TracedChoice:
    end = sequence.finish or SequenceEvent(sequence.sid)
    return msgspec.structs.replace(
        choice, finish_reason=end.finish_reason or "", error=end.error_code or "",
        tokens=len(sequence.emitted), cached_tokens=sequence.cached_len,
        draft_tokens=end.draft_tokens or 0, accepted_tokens=end.accepted_tokens or 0,
        preemptions=sequence.preemptions)


class PlanRecord(NamedTuple):
    """A plan's rows. Their slots may hold other sequences when the result comes."""

    step: int
    slots: Longs
    """i8[rows]: the sampled rows: extends that complete their prompt, then decodes."""
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
    """Microseconds that a step with extends is expected to take; 0 = not predicted."""
    pooled: Mapping[int, int] = {}
    """slot -> sid of the extends that end a prompt which is pooled."""
    media: Sequence[tuple[int, int, int]] = ()
    """Extends of sequences with images: slot, number of the admission, tokens computed by then."""
    verifies: str = ""
    """What has made the drafts that its decodes verify; "" = there are none, or the worker has one
    way to make them."""
    method: str = ""
    """What makes those that it makes."""
    forced: Mapping[int, Sequence[int]] = {}
    """sid -> the drafts of `StepPlan.forced`."""

    @property
    def decodes(self) -> int:
        """How many of the rows are decodes."""
        return len(self.slots) - self.firsts

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its extends."""
        return self.computed - self.decodes * self.window

    def as_run(self, draft_counts: bytes) -> PlanRecord:
        """Returns the record of the step as the worker ran it. draft_counts: of its result."""
        if not draft_counts:
            return self
        window = 1 + max(draft_counts)
        return self._replace(window=window,
                             computed=self.computed - self.decodes * (self.window - window))


class VerifiedDrafts(NamedTuple):
    """How far the decodes of a step got: entry c of each list counts rows that emitted c tokens, at
    most one more than the most drafts that any of them had."""

    going: list[int]
    """Rows that go on: the first draft not accepted, if any, was wrong, or there was none."""
    ended: list[int]
    """Rows that ended: drafts past the end were not tested."""
    drafts: int | None = None
    """Drafts of all rows together, where not all have the most; None: all have."""
    windows: int | None = None
    """Rows that had any; None: all had."""

    def accepted(self, position: int) -> int:
        """Rows whose draft at `position`, counted from 0, was accepted."""
        return sum(self.going[position + 2:]) + sum(self.ended[position + 2:])
