"""What the worker has room for, and what it can keep: the ranks as the scheduler sees them, ready
when all are, with the least room of any; and what fits there.

A group of ranks has one epoch: a rank that is started again brings all the others with it, so
messages of an older epoch no longer count.
"""

from __future__ import annotations

from msgspec.structs import replace

from actorium.actors.errors import BadModel
from actorium.actors.messages import BYTE_EXPERTS, MAX_RESULT, MAX_ROUTED_BYTES, PageGroup, Ready
from actorium.actors.scheduler.adapters import SERVES_NONE
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.request_state import Rejection, RequestState

SAME = ("page_size", "slots", "max_model_len", "vocab_size", "recurrent", "drafts", "host_parts",
        "disk", "adapters", "pooling", "whole_prompts", "weights", "routing")
"""Fields of `Ready` in which ranks that serve one model do not differ."""


class WorkerGroup:
    """The readiness of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._ready: dict[int, Ready] = {}
        """By rank, all of the newest epoch."""

    def join(self, ready: Ready) -> Ready | None:
        """Counts a rank in. Returns the group's readiness once all its ranks are there. Raises
        `BadModel` where they do not serve the same."""
        if self.ranks == 1:
            return ready
        newest = max((other.epoch for other in self._ready.values()), default=0)
        if ready.epoch < newest or ready.rank >= self.ranks:
            return None
        if ready.epoch > newest:
            self._ready.clear()
        self._ready[ready.rank] = ready
        return self._joined() if len(self._ready) == self.ranks else None

    def clear(self) -> None:
        """No rank is ready any more."""
        self._ready.clear()

    def _joined(self) -> Ready:
        first, ranks = self._ready[0], self._ready.values()
        windows = [group.window for group in first.groups]
        for other in ranks:
            pairs = {field: (getattr(first, field), getattr(other, field)) for field in SAME}
            pairs["windows"] = windows, [group.window for group in other.groups]
            for field, (ours, theirs) in pairs.items():
                if ours != theirs:
                    raise BadModel(f"{field}: rank 0 of the worker has {ours}, rank {other.rank} "
                                   f"has {theirs}")
        pages = zip(*(ready.groups for ready in ranks), strict=True)
        return replace(
            first, checkpoints=min(ready.checkpoints for ready in ranks),
            host_pages=min(ready.host_pages for ready in ranks),
            inexact=next((ready.inexact for ready in ranks if ready.inexact), ""),
            groups=[PageGroup(min(group.pages for group in same), same[0].window)
                    for same in pages])


def check_request(request: RequestState, worker: Ready, kv_cache: KVCacheManager,
                  whole_prompts: int = 0) -> Rejection | None:
    """Returns why this worker cannot run a request even alone; None if it can. whole_prompts: see
    `SchedulerState`."""
    if request.submit.deterministic and worker.inexact:
        return Rejection("invalid_request", "deterministic: this engine cannot keep it: "
                         f"{worker.inexact}")
    if request.submit.adapter is not None and not worker.adapters:
        return Rejection("invalid_request", f"adapter: {SERVES_NONE}")
    length, window = len(request.prompt), 1 + worker.drafts
    if request.params.routed_experts:
        layers, chosen, experts = worker.routing
        if not layers:
            return Rejection("invalid_request", "routed_experts: the model has no mixture of "
                             "experts whose choices it could tell")
        most = min(length + request.params.max_tokens, worker.max_model_len)
        size = most * layers * chosen * (1 if experts <= BYTE_EXPERTS else 2)
        if size > MAX_ROUTED_BYTES:
            return Rejection("invalid_request", f"routed_experts: those of {most} tokens are "
                             f"{size:,} bytes, at most {MAX_ROUTED_BYTES:,}: lower max_tokens")
    capacity, pooling = kv_cache.capacity(window), request.submit.pooling
    if pooling is not None and pooling.task not in worker.pooling:
        return Rejection("invalid_request", f"task: the model does not serve {pooling.task}")
    if (why := _check_hidden(request, worker)) is not None:
        return why
    if length + (pooling is None) > worker.max_model_len:
        more = " and one to generate" if pooling is None else ""
        return Rejection("context_overflow", f"prompt: {length} tokens{more} exceed "
                         f"max_model_len={worker.max_model_len}")
    if 0 < whole_prompts < length:
        return Rejection("context_overflow", f"prompt: {length} tokens exceed the "
                         f"{whole_prompts} of a step (--max-num-batched-tokens), and the model "
                         "takes each prompt in one")
    if length > capacity:
        return Rejection("context_overflow", f"prompt: {length} tokens need "
                         f"{kv_cache.pages_for(length + (window > 1))} pages of "
                         f"{kv_cache.page_size}, "
                         f"the pool has {kv_cache.pages_for(capacity)}")
    return None


def _check_hidden(request: RequestState, worker: Ready) -> Rejection | None:
    """As `check_request`, of the hidden states that are wanted of its tokens, those of the longest
    completion included."""
    pooling, tokens = request.submit.pooling, len(request.prompt)
    if pooling is not None:
        field, wanted, more = "layers", pooling.layers, ""
    else:
        field, wanted, more = "hidden_states", request.params.hidden_states, ", or lower max_tokens"
        tokens = min(tokens + request.params.max_tokens, worker.max_model_len)
    layers, width, number = worker.hidden_states
    if wrong := [own for own in wanted if not -layers - 1 <= own <= layers]:
        return Rejection("invalid_request", f"{field}: must be between -{layers + 1} and "
                         f"{layers}, got {wrong[0]}")
    if (size := tokens * len(wanted) * width * number) > MAX_RESULT:
        return Rejection("invalid_request", f"{field}: {len(wanted)} of {tokens} tokens are "
                         f"{size:,} bytes, the limit of a result is {MAX_RESULT:,}: ask for fewer "
                         f"layers at a time{more}")
    return None


def max_sequence_tokens(worker: Ready, kv_cache: KVCacheManager, whole: bool = False) -> int:
    """Returns how many tokens prompt and completion of a sequence may have together. whole: the
    last token is computed as well, when hidden states are asked for.

    Alone in the pool a sequence of length n needs pages for n-1 tokens, for n where drafts are
    made.
    """
    return min(worker.max_model_len, kv_cache.capacity(1 + worker.drafts) + (not whole))
