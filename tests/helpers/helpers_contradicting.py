"""Workers, and a gateway, with faults of the kind that `actorium verify` is for: right alone, wrong
in company, with drafts, behind a cached prefix, once preempted or after a death. Each wraps one
function of a real worker's; with `--dtype float32` its kernels are those in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np


def _with(ctx: Any, owner: Any, name: str, wrapped: Callable[[Any], Any]) -> Any:
    from actorium.gpu.worker.core import build

    setattr(owner, name, wrapped(getattr(owner, name)))
    return build(ctx)


def sharing_seeds(ctx: Any) -> Any:
    """Each row is sampled with the seed of the first."""
    from actorium.gpu.step.tables import UniformCache

    def wrapped(usual: Any) -> Any:
        def at(self: Any, slots: Any, low: Any, high: Any, positions: Any) -> Any:
            first = np.zeros(len(low), np.int64)
            return usual(self, slots, low[first], high[first], positions)
        return at

    return _with(ctx, UniformCache, "at", wrapped)


def committing_too_much(ctx: Any) -> Any:
    """Of each window one draft more than was accepted is put into the recurrent states."""
    from actorium.gpu.step.states import StatePool

    def wrapped(usual: Any) -> Any:
        def rows(self: Any, plan: Any, extends: Any, decodes: Any, q_len: int = 1,
                 accepted: Any = None) -> Any:
            if accepted is not None:
                accepted = (accepted + 1).clamp(max=self.drafts)
            return usual(self, plan, extends, decodes, q_len, accepted)
        return rows

    return _with(ctx, StatePool, "rows", wrapped)


def forgetting_checkpoints(ctx: Any) -> Any:
    """A sequence behind a cached prefix begins with half of the state that was kept there."""
    from actorium.gpu.step.states import StatePool

    def wrapped(usual: Any) -> Any:
        def admit(self: Any, admits: Any) -> None:
            usual(self, admits)
            for a in admits:
                if a.checkpoint:
                    for layer in self.layers:
                        layer.state[a.slot - 1] *= 0.5
        return admit

    return _with(ctx, StatePool, "admit", wrapped)


# --- company --------------------------------------------------------------------------------------

def seeding_by_slot(ctx: Any) -> Any:
    """A row's seed is mixed with the number of its slot."""
    from actorium.gpu.step.tables import UniformCache

    def wrapped(usual: Any) -> Any:
        def at(self: Any, slots: Any, low: Any, high: Any, positions: Any) -> Any:
            return usual(self, slots, low ^ slots, high, positions)
        return at

    return _with(ctx, UniformCache, "at", wrapped)


def telling_other_rows(ctx: Any) -> Any:
    """Log-probabilities are those of the row before; the tokens are right."""
    from actorium.kernels.reference.torch_ops import TorchSampling

    def wrapped(usual: Any) -> Any:
        def logprobs(raw: Any, *more: Any) -> Any:
            return usual(raw.roll(1, 0), *more)
        return staticmethod(logprobs)

    return _with(ctx, TorchSampling, "logprobs", wrapped)


def taking_other_scales(ctx: Any) -> Any:
    """Keys and values in INT8 lie beside the scales of the token before, of whichever sequence."""
    from actorium.kernels.reference import kv

    def wrapped(usual: Any) -> Any:
        def quantise_rows(x: Any) -> Any:
            codes, scales = usual(x)
            return codes, scales.roll(1, 0)
        return quantise_rows

    return _with(ctx, kv, "quantise_rows", wrapped)


# --- drafts ---------------------------------------------------------------------------------------

def committing_twice(ctx: Any) -> Any:
    """Drafts that were accepted go into the recurrent states twice."""
    from actorium.kernels.reference.torch_ops import TorchOps

    def wrapped(usual: Any) -> Any:
        def delta_window(self: Any, p: Any, states: Any, columns: Any, pending: Any, rows: Any,
                         accepted: Any, layer: Any) -> Any:
            for place in range(pending.shape[1]):
                of = rows[(accepted > place) & (rows >= 0)]
                if len(of):
                    layer.advance(pending[of, place], (states, columns), of)
            return usual(self, p, states, columns, pending, rows, accepted, layer)
        return delta_window

    return _with(ctx, TorchOps, "delta_window", wrapped)


def turning_drafts_back(ctx: Any) -> Any:
    """Drafts have the position of the token before them."""
    from actorium.gpu.step import input_batch

    def wrapped(usual: Any) -> Any:
        def window_rows(t: Any, decode: Any, drafts: int, bound: int) -> Any:
            found = usual(t, decode, drafts, bound)
            late = np.arange(len(found.position)) % (drafts + 1) > 0
            return found._replace(position=found.position - late.astype(found.position.dtype))
        return window_rows

    return _with(ctx, input_batch, "_window_rows", wrapped)


def masking_late(ctx: Any) -> Any:
    """The rows of drafts are masked as those of the tokens before them."""
    from actorium.gpu.step import sampler

    def wrapped(usual: Any) -> Any:
        def apply_masks(t: Any, step: Any, masks: Any, logits: Any) -> None:
            known = {(mask.slot, mask.row): mask.bits for mask in masks}
            usual(t, step, [msgspec.structs.replace(mask, bits=known.get(
                (mask.slot, mask.row - 1), mask.bits)) for mask in masks], logits)
        return apply_masks

    return _with(ctx, sampler, "apply_masks", wrapped)


def penalising_without_drafts(ctx: Any) -> Any:
    """Penalties of a draft's row know nothing of the drafts before it."""
    from actorium.gpu.step import sampler

    return _with(ctx, sampler, "_count_drafts", lambda _: lambda *_: None)


# --- the prefix cache -----------------------------------------------------------------------------

def penalising_what_it_computes(ctx: Any) -> Any:
    """Penalties count the tokens that were computed, and not those that came from the cache."""
    from actorium.gpu.step.tables import SlotTables

    def wrapped(usual: Any) -> Any:
        def token_counts(self: Any, a: Any, tokens: Any) -> Any:
            rest = msgspec.structs.replace(a, prompt_len=max(a.prompt_len - a.cached_len, 0))
            return usual(self, rest, tokens[a.cached_len:])
        return token_counts

    return _with(ctx, SlotTables, "_token_counts", wrapped)


def reading_stale_pages(ctx: Any) -> Any:
    """Of a cached prefix those pages are read that it had the first time, whoever has them now."""
    from actorium.gpu.step.tables import SlotTables

    first: dict[bytes, int] = {}
    usual_admit = SlotTables.admit

    def admit(self: Any, admits: Any, up: Any) -> None:
        told = []
        for a in admits:
            pages = np.frombuffer(a.pages, np.int32)
            ends = 4 * self.page_size * np.arange(1, len(pages) + 1)
            known = [first.get(a.tokens[:end], page)
                     for end, page in zip(ends, pages.tolist(), strict=True)]
            told.append(msgspec.structs.replace(a, pages=np.array(known, np.int32).tobytes()))
        usual_admit(self, told, up)

    def wrapped(usual: Any) -> Any:
        def append_pages(self: Any, appends: Any, up: Any) -> None:
            for slot, index, page in appends.reshape(-1, 3).tolist():
                tokens = self.sequences[slot].tokens
                if (end := (index + 1) * self.page_size) <= len(tokens):
                    first.setdefault(tokens[:end].tobytes(), page)
            usual(self, appends, up)
        return append_pages

    SlotTables.admit = admit  # type: ignore[method-assign]
    return _with(ctx, SlotTables, "append_pages", wrapped)


def saving_late(ctx: Any) -> Any:
    """A checkpoint is taken a page late, or at the end of the chunk."""
    from actorium.gpu.step.states import StatePool

    def wrapped(usual: Any) -> Any:
        def rows(self: Any, plan: Any, extends: Any, *more: Any) -> Any:
            saved = np.frombuffer(plan.checkpoints, np.int32).reshape(-1, 3).copy()
            counts = {row.slot: row.count for row in extends}
            for own in saved:
                own[2] = min(own[2] + ctx.config.memory.page_size, counts[own[0]])
            return usual(self, msgspec.structs.replace(plan, checkpoints=saved.tobytes()), extends,
                         *more)
        return rows

    return _with(ctx, StatePool, "rows", wrapped)


# --- preemption, and deaths -----------------------------------------------------------------------

def committing_too_much_once_preempted(ctx: Any) -> Any:
    """Windows of a sequence that was preempted are committed with one token too many."""
    from actorium.gpu.step.states import StatePool

    usual_admit, again = StatePool.admit, set()

    def admit(self: Any, admits: Any) -> None:
        for a in admits:
            (again.add if len(a.tokens) // 4 > a.prompt_len else again.discard)(a.slot - 1)
        usual_admit(self, admits)

    def wrapped(usual: Any) -> Any:
        def rows(self: Any, plan: Any, extends: Any, decodes: Any, q_len: int = 1,
                 accepted: Any = None) -> Any:
            if accepted is not None:
                one = accepted.new_tensor([int(row) in again for row in decodes.tolist()])
                accepted = (accepted + one).clamp(max=self.drafts)
            return usual(self, plan, extends, decodes, q_len, accepted)
        return rows

    StatePool.admit = admit  # type: ignore[method-assign]
    return _with(ctx, StatePool, "rows", wrapped)


def seeding_anew(ctx: Any) -> Any:
    """What is under way when a worker dies goes on with another seed."""
    from actorium.gpu.step.tables import SlotTables

    def wrapped(usual: Any) -> Any:
        def admit(self: Any, admits: Any, up: Any) -> None:
            usual(self, [msgspec.structs.replace(a, seed=a.seed ^ 1)
                         if ctx.epoch > 1 and len(a.tokens) // 4 > a.prompt_len else a
                         for a in admits], up)
        return admit

    return _with(ctx, SlotTables, "admit", wrapped)


# --- over HTTP ------------------------------------------------------------------------------------

def losing_an_event(ctx: Any) -> Any:
    """A gateway that does not send the first event of a stream that is taken up."""
    from weakref import WeakSet

    from actorium.actors.gateway import actor
    from actorium.actors.gateway.resume.event_ids import ResumableStream

    usual, lost = ResumableStream.label, WeakSet[Any]()

    def label(self: Any, events: bytes) -> bytes:
        told = usual(self, events)
        if self._recut is None or self in lost or not told:
            return told
        lost.add(self)
        return told.partition(b"\n\n")[2]

    ResumableStream.label = label  # type: ignore[method-assign]
    return actor.build(ctx)
