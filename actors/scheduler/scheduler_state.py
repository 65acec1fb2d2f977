"""The scheduler's state: requests, sequences, slots and pages, and the moves between them: admit,
preempt, finish.

Each fact of a sequence lies in one place. Who writes it:

    sid, request, index, seed           SequenceState   `new_request_state`, once
    emitted, drafted, accepted          SlotTable while it has a slot, else SequenceState: results
                                        (`step_results`); `SlotTable.add` and `remove` move them
    slot                                SequenceState   `SlotTable.add` and `remove`
    len_lo, len_hi, end, order,         SlotTable       `Planner` (a plan's tokens and pages),
    decoding, held, pages                               `step_results` (what became of them)
    total, computed, shareable          SequenceState   `admit`; then `Planner` and `apply_media`
    key, match, match_version, branch,  SequenceState   `_match_prefix` while it waits; dropped by
    pending                                             whatever changes its tokens
    lock, started                       SequenceState   `admit`, `cache_prefix`, `_vacate`
    preempted, preemptions, passed      SequenceState   `preempt`; passed: `WaitingQueue.admit`
    weights                             SequenceState   here
    runs                                SequenceState   `step_results`
    cached_len, counted,                SequenceState   `_first_admission`, `step_results`
    first_token_reported,
    logprobs, prompt_logprobs
    finish                              SequenceState   `step_results`, `RequestLifecycle`
    live, choices, waiting, params      RequestState    here; waiting: `WaitingQueue`; params: `cap`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from actorium.actors.config.tree import MemoryConfig, SchedulerConfig
from actorium.actors.messages import Admit, PageGroup, Ready
from actorium.actors.scheduler.adapters import AdapterTable
from actorium.actors.scheduler.admission import AdmissionRoom
from actorium.actors.scheduler.answer_owners import AnswerOwners
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_allocator import NO_PAGES, AccountingError, Ints, Longs
from actorium.actors.scheduler.cache.radix_cache import (
    PrefixKey,
    PrefixMatch,
    prompt_key,
    shareable,
)
from actorium.actors.scheduler.queue_policies import WaitingQueue
from actorium.actors.scheduler.recovery.request_faults import RequestFaults
from actorium.actors.scheduler.request_state import RequestState, SequenceState, request_name
from actorium.actors.scheduler.slot_table import SlotTable

ALL, BEGUN, NONE = "all", "begun", "none"
"""What may be admitted: everything, what has begun, nothing."""
GROWTH_TOKENS = 16
"""Tokens (one page at least) that admission keeps free for each running sequence, whatever the
reserve's ratio is."""


class SchedulerState:
    """The scheduler's state. Every sequence waits or runs; a running one has a slot and pages."""

    def __init__(self, config: SchedulerConfig, memory: MemoryConfig, guard: RequestFaults,
                 on_finished: Callable[[RequestState], None]) -> None:
        """on_finished: called with each request as it ends."""
        self.requests: dict[tuple[bytes, str], RequestState] = {}
        self.sequences: dict[int, SequenceState] = {}
        self.step = 0
        """Number of the last plan."""
        self.queue = WaitingQueue(config.schedule_policy, config.tenant_weights)
        self.prefilling: list[SequenceState] = []
        """Running sequences whose prompt is not yet wholly planned, in order of admission."""
        self.slots_to_release: list[int] = []
        """Slots that the next plan must release."""
        self.preemptions: Counter[str] = Counter()
        """By cause: memory, priority, forced, worker."""
        self.finished_requests: list[RequestState] = []
        """Requests that have ended since this list was last emptied."""
        self.trial: frozenset[int] | None = None
        """The sequences on trial for a worker's death: only these may be admitted; None = all."""
        self.admits = ALL
        """What may be admitted besides; see `sleep`."""
        self.cache_lookup_tokens = self.cache_hit_tokens = 0
        """Prompt tokens admitted for the first time, and those of them found in the cache."""
        self.newly_marked: set[SequenceState] = set()
        """Sequences that were admitted or preempted since the last counts."""
        self.adapters: AdapterTable | None = None
        """None = the engine serves no LoRA adapters."""
        self.answer_owners: AnswerOwners | None = None
        """None = no drafts are made of answers that have ended."""
        self.weights, self.weights_name = 0, ""
        """Version of the model's weights, and what stands for them in names of prefixes."""
        self.older_weights: set[int] = set()
        """Sequences whose last token is of an older version."""
        self.guard = guard
        self._on_finished = on_finished
        self.keep_history = False
        """Sequences keep the logprobs that were reported of them."""
        self.max_waiting = config.max_num_queued_reqs
        """Requests."""
        self._config, self._memory_config = config, memory
        self.whole_prompts = 0
        """Tokens of the longest prompt, where each is computed in one step and none is cached; 0 =
        prompts may be cut."""
        self.reset_pools(SlotTable(1, 1), [PageGroup(1)], 1)

    def reset_for_worker(self, worker: Ready) -> None:
        """Starts over with the slots and pages of a worker.

        There are no more slots than a step may decode: so every running sequence decodes in every
        step, and while one still extends at least a token of the budget is left for it.
        """
        window = 1 + worker.drafts
        slots = min(self._config.max_num_seqs, worker.slots - 1,
                    max(self._config.max_num_batched_tokens // window, 1))
        windows = tuple(group.window for group in worker.groups)
        self.whole_prompts = self._config.max_num_batched_tokens if worker.whole_prompts else 0
        self.reset_pools(SlotTable(slots + 1, worker.page_size, window, windows), worker.groups,
                         worker.page_size, worker.recurrent, worker.checkpoints)

    def reset_pools(self, table: SlotTable, groups: Sequence[PageGroup], page_size: int,
                    recurrent: bool = False, checkpoints: int = 0) -> None:
        """Starts over with an empty table and empty pools: nothing may be running."""
        self.table = table
        memory = self._memory_config
        if self.whole_prompts:
            memory = msgspec.structs.replace(memory, prefix_cache=False)
        self.kv_cache = KVCacheManager(groups, page_size, memory, recurrent, checkpoints)
        self.tier: HostTier | None = None
        """Where pages go that the pools have no room for."""
        growth = GROWTH_TOKENS * table.max_window
        self.room = AdmissionRoom(table, self.kv_cache, self.prefilling,
                                  self._config.max_num_batched_tokens, max(growth, page_size))
        self.slots_to_release.clear()
        for sequence in self.sequences.values():
            sequence.key, sequence.match_version = None, -1
            sequence.weights = self.weights_name

    def change_weights(self, version: int, name: str) -> None:
        """The worker has other weights from the next step on. Sequences that hold slots go on over
        the pages of the older ones."""
        self.weights, self.weights_name = version, name
        for sequence in self.sequences.values():
            self.note_weights(sequence)
            if not sequence.slot:
                sequence.key, sequence.match_version = None, -1
                sequence.weights = name

    def note_weights(self, sequence: SequenceState) -> None:
        """Takes note of a sequence that lives, and may have tokens of older weights."""
        last = sequence.runs[-1][1] if sequence.runs else 0
        if last != self.weights and len(self.table.emitted_of(sequence)):
            self.older_weights.add(sequence.sid)

    # --- coming and going ------------------------------------------------------------------------

    def add_request(self, request: RequestState) -> None:
        """Adds a request: all its sequences wait."""
        self.requests[request.key] = request
        for sequence in request.live.values():
            self.sequences[sequence.sid] = sequence
            sequence.weights = self.weights_name
            self.note_weights(sequence)
            self.queue.push(sequence)
            if self.adapters is not None:
                self.adapters.arrived(sequence)
            if self.tier is not None:
                self.tier.arrived(sequence.sid, partial(self._key, sequence))

    def change_client(self, request: RequestState, client: bytes) -> None:
        """Gives an unfinished request to another client."""
        del self.requests[request.key]
        request.submit = msgspec.structs.replace(request.submit, client=client)
        request.name = request_name(*request.key)
        self.requests[request.key] = request

    def finish(self, sequence: SequenceState) -> None:
        """Removes a sequence, running or waiting; what it held is free (or only cached) at once.

        At once, although plans in flight may still name its slot: the release rides the next plan,
        and the worker applies plans in order, so their next owner writes the pages later.
        """
        if sequence.slot:
            self._vacate(sequence)
            self.queue.finished(sequence, running=True)
        else:
            self.queue.remove(sequence)
            if self.tier is not None:
                self.tier.forget(sequence.sid)
        if self.adapters is not None:
            self.adapters.ended(sequence)
        request = sequence.request
        self.older_weights.discard(sequence.sid)
        del self.sequences[sequence.sid], request.live[sequence.sid]
        if not request.live:
            self.finished_requests.append(self.requests.pop(request.key))
            self._on_finished(request)

    def preempt(self, sequence: SequenceState, cause: str) -> None:
        """Takes slot and pages from a running sequence. It waits again, first of its class, and
        what the prefix cache has lost by then is recomputed."""
        self._vacate(sequence)
        sequence.preempted = True
        sequence.preemptions += 1
        self.newly_marked.add(sequence)
        self.queue.push(sequence, ran=True)
        self.preemptions[cause] += 1

    def undo_admission(self, sequence: SequenceState) -> None:
        """Takes back an admission that no plan names: the sequence waits again."""
        try:
            self.preempt(sequence, "forced")
        except BaseException as error:
            self.guard.convict(sequence.request, error)
            raise
        self.slots_to_release.pop()

    def _vacate(self, sequence: SequenceState) -> None:
        slot, computed = sequence.slot, sequence.computed
        if computed < sequence.total:
            self.prefilling.remove(sequence)
        pages = self.table.remove(sequence)
        if self.adapters is not None:
            self.adapters.vacated(sequence)
        if computed >= sequence.total:
            # The last token's K and V are only written by the decode that follows it.
            computed = max(computed, sequence.prompt_len + len(sequence.emitted) - 1)
            if len(sequence.emitted):
                sequence.key = None
        self.cache_prefix(sequence, pages, computed)
        self.kv_cache.move_lock(sequence.lock, None)
        sequence.lock, sequence.started, sequence.match_version = None, None, -1
        self.kv_cache.release(pages, sequence.sid)
        self.slots_to_release.append(slot)
        if sequence.weights != self.weights_name:
            sequence.key, sequence.weights = None, self.weights_name

    # --- the prefix cache ------------------------------------------------------------------------

    def _key(self, sequence: SequenceState) -> PrefixKey:
        if sequence.key is None:
            data = prompt_key(tokens_of(sequence), sequence.request.submit,
                              self.kv_cache.page_size)
            sequence.key = PrefixKey(sequence.weights + sequence.salt, data)
        return sequence.key

    def cache_prefix(self, sequence: SequenceState, pages: list[Ints], computed: int) -> None:
        """Inserts the full pages of a sequence's first `computed` tokens into the tree, and locks
        the end of them for the sequence."""
        kv_cache = self.kv_cache
        if kv_cache.tree is None:
            return
        full = min(computed, sequence.shareable) // kv_cache.page_size
        if full:
            sequence.lock = kv_cache.cache_pages(
                self._key(sequence), [own[:full] for own in pages], sequence.lock,
                sequence.priority, full * kv_cache.page_size)

    def chunk_planned(self, sequence: SequenceState, chunk: int) -> list[tuple[int, int, int]]:
        """Caches the full pages of a planned chunk. They may be shared from now on, even within the
        same step, since a layer writes all keys and values before it attends.

        Returns the plan's `checkpoints`: (slot, checkpoint, tokens of the chunk before it).
        """
        kv_cache = self.kv_cache
        if kv_cache.tree is None:
            return []
        pages = self.table.pages_of(sequence.slot)
        self.cache_prefix(sequence, pages, sequence.computed)
        if not (kv_cache.recurrent and kv_cache.checkpoints.count):
            return []
        start, saved = sequence.computed - chunk, []
        key = self._key(sequence)
        places = kv_cache.save_at(start, sequence.computed, sequence.total, sequence.branch,
                                  kv_cache.page_size)
        if places and sequence.started is not None:
            kv_cache.checkpoints.demote(sequence.started)
        for place in places:
            full = place // kv_cache.page_size
            number = kv_cache.checkpoint(key, [own[:full] for own in pages], sequence.priority,
                                         place)
            if number:
                saved.append((sequence.slot, number, place - start))
        return saved

    def _match_prefix(self, sequence: SequenceState) -> PrefixMatch | None:
        """Returns the cached prefix of a waiting sequence, which leaves at least a token to
        compute."""
        kv_cache, tree = self.kv_cache, self.kv_cache.tree
        if tree is None or sequence.wants_rows:
            return None
        if sequence.match_version != kv_cache.version or sequence.pending:
            key = self._key(sequence)
            most = len(key.data) // 4 - 1
            if kv_cache.recurrent:
                sequence.match, sequence.branch, sequence.pending = tree.match_state(
                    key, kv_cache.step, most)
            else:
                sequence.match = tree.match(key, most)
            sequence.match_version = kv_cache.version
        return sequence.match

    def _cached_tokens(self, sequence: SequenceState) -> int:
        match = self._match_prefix(sequence)
        return 0 if match is None else match.length

    # --- admission -------------------------------------------------------------------------------

    @property
    def next_waiting(self) -> SequenceState | None:
        """The sequence to admit next: the policy's choice, or, while some are on trial for a
        worker's death, the first of those. While new requests are held back, the first that has
        begun."""
        if self.admits == NONE:
            return None
        adapters = self.adapters
        if self.trial is None and self.admits == ALL:
            return self.queue.choose(self._cached_tokens,
                                     None if adapters is None else adapters.blocked)
        return next((s for s in self._admissible() if adapters is None
                     or not adapters.blocked(s.adapter, in_turn=False)), None)

    def _admissible(self) -> Iterator[SequenceState]:
        """Yields the waiting sequences that may be admitted where not all may."""
        sids = sorted(self.sequences if self.trial is None else self.trial)
        known = (self.sequences.get(sid) for sid in sids)
        return (s for s in known if s is not None and not s.slot
                and (self.admits == ALL or s.request.begun))

    @property
    def admissible_adapters(self) -> frozenset[bytes] | None:
        """Adapters of the only sequences that may be admitted; None = all may."""
        if self.trial is None and self.admits == ALL:
            return None
        return frozenset(s.adapter for s in self._admissible() if self.admits != NONE)

    @property
    def background_running(self) -> int:
        """Running sequences that give way to all others."""
        return self.table.num_background

    @property
    def foreground(self) -> bool:
        """A sequence waits or runs to which background ones give way."""
        return self.queue.foreground or self.table.num_running > self.background_running

    def can_admit(self, sequence: SequenceState) -> bool:
        """Returns whether there is a slot and room for a waiting sequence, and nothing is worth
        waiting a step for."""
        if not self.table.num_free:
            return False
        match = self._match_prefix(sequence)
        if sequence.pending:
            return False
        length = sequence.prompt_len + len(sequence.emitted)
        return self.room.fits(self.table.reach(length, sequence.end), match)

    def fetch_prefix(self, sequence: SequenceState) -> bool:
        """Returns whether a sequence that could be admitted waits for more of its prefix to come
        back."""
        return self.tier is not None and self.tier.fetch(
            sequence.sid, self._key(sequence), self._match_prefix(sequence))

    def admit(self, sequence: SequenceState) -> Admit:
        """Gives a waiting sequence, for which `can_admit` holds, a slot and its cached pages."""
        match = self._match_prefix(sequence)
        length = sequence.prompt_len + len(sequence.emitted)
        kv_cache = self.kv_cache
        pages, cached, checkpoint = [NO_PAGES] * len(kv_cache.pools), 0, 0
        if match is not None and match.length:
            pages, cached = match.pages, match.length
            if kv_cache.recurrent:
                checkpoint = kv_cache.checkpoints.use(match.node)
                sequence.started = match.node
            sequence.lock = kv_cache.share_prefix(match, sequence.sid)
        self.queue.admit(sequence)
        sequence.match, sequence.match_version = None, -1
        sequence.total, sequence.computed = length, cached
        sequence.shareable = shareable(sequence.request.submit.media, cached)
        if not sequence.preempted:
            self._first_admission(sequence, cached)
        tokens = tokens_of(sequence)
        self.table.add(sequence, pages)
        adapter = 0 if self.adapters is None else self.adapters.admitted(sequence)
        embeds = sequence.request.submit.embeds
        owner = 0 if self.answer_owners is None else self.answer_owners.number(
            sequence.weights + sequence.salt)
        self.prefilling.append(sequence)
        return Admit(slot=sequence.slot, tokens=tokens, prompt_len=sequence.prompt_len,
                     cached_len=cached, pages=np.concatenate(pages).tobytes(),
                     params=sequence.request.params, seed=sequence.seed, checkpoint=checkpoint,
                     media=sequence.request.submit.media, adapter=adapter,
                     pooling=sequence.request.submit.pooling, answers=owner,
                     embeds=None if embeds is None else embeds.behind(cached))

    def _first_admission(self, sequence: SequenceState, cached: int) -> None:
        if not sequence.counted:
            sequence.counted, sequence.cached_len = True, cached
            self.cache_lookup_tokens += sequence.prompt_len
            self.cache_hit_tokens += cached
            self.newly_marked.add(sequence)
        if (fair := self.queue.fair) is not None:
            fair.charge(sequence.tenant, sequence.prompt_len - cached, 0)

    def flush_cache(self) -> tuple[int, int]:
        """Empties the prefix cache, and the tier below it; no more drafts are made of earlier
        answers. Returns pages (freed, kept), of the device."""
        if self.answer_owners is not None:
            self.answer_owners.flush()
        freed, kept = self.kv_cache.flush()
        if self.tier is not None:
            self.tier.flush()
        return freed, kept

    def unlock_windows(self) -> bool:
        """Unlocks cached pages of windowed groups that no running sequence can see any more.
        Returns False if there were none."""
        windows = self.kv_cache.windows
        if not any(windows) or self.kv_cache.tree is None:
            return False
        found = False
        for sequence in self.table.sequences:
            lock = None if sequence is None else sequence.lock
            if sequence is not None and lock is not None and lock.windows:
                end = lock.node.end * self.kv_cache.page_size
                if self.table.len_lo[sequence.slot] - max(windows) > end:
                    sequence.lock = self.kv_cache.unlock_windows(lock)
                    found = True
        return found

    # --- the books ---

    def charge_tenants(self, sids: Longs, counts: Ints | None) -> None:
        """Charges tenants for emitted tokens: counts[i] (None = one each) of sids[i]."""
        if (fair := self.queue.fair) is None:
            return
        tokens: Counter[str] = Counter()
        for sid, count in zip(sids.tolist(), [1] * len(sids) if counts is None else counts.tolist(),
                              strict=True):
            sequence = self.sequences.get(sid)
            if sequence is not None:
                tokens[sequence.tenant] += count
        for tenant, count in tokens.items():
            fair.charge(tenant, 0, count)

    def audit(self) -> None:
        """Checks that everything is in exactly one place; raises `AccountingError`."""
        self.table.audit()
        self.kv_cache.audit(self._holders())
        running = self.table.num_running
        if running + len(self.queue) != len(self.sequences):
            raise AccountingError(f"{len(self.sequences)} sequences, but {running} running "
                                  f"and {len(self.queue)} waiting")
        if self.adapters is not None:
            with_adapters = Counter(sequence.adapter for sequence in self.table.sequences
                                    if sequence is not None and sequence.adapter)
            if wrong := self.adapters.audit(with_adapters):
                raise AccountingError(wrong)

    def _holders(self) -> Iterator[tuple[int, list[Ints]]]:
        if self.tier is not None:
            yield from self.tier.holders()
        for sequence in self.table.sequences:
            if sequence is not None:
                yield sequence.sid, self.table.pages_of(sequence.slot)


def tokens_of(sequence: SequenceState) -> bytes:
    """Returns prompt and emitted tokens of a sequence without a slot, i4. The prompt is not copied
    where none was emitted."""
    prompt = sequence.request.submit.prompt
    return prompt + sequence.emitted.tobytes() if len(sequence.emitted) else prompt
