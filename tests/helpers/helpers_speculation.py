"""Runners that verify drafts, hooks that know what is right, and a scheduler by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from helpers_worker import CPU, Output, Ring
from numpy.typing import NDArray

from actorium.actors.messages import Admit, RowMask, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.actors.scheduler.draft_policy import DraftChoice
from actorium.gpu.plan.sizes import page_table_width
from actorium.gpu.step.draft_model import DraftModelProposer, make_draft_model_pool
from actorium.gpu.step.eagle import eagle_pool, eagle_proposers
from actorium.gpu.step.pools import make_draft_pool, make_pools
from actorium.gpu.step.runner import ModelRunner, ProposeHook
from actorium.gpu.step.speculation import make_proposers
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.states import StatePool
from actorium.gpu.step.tables import SlotTables
from actorium.kernels.sampling_tables import SEED_LOW

I32 = NDArray[np.int32]
RUBBISH = 50.0
"""What pages hold before they are written."""


def make_runner(model: Any, drafts: int, propose: ProposeHook | None = None, slots: int = 9,
                pages: int = 400, page_size: int = 8, checkpoints: int = 0,
                arrays: type[HostArrays] | type[DeviceArrays] | DeviceArrays = HostArrays,
                mtp: bool = False, draft: Any = None,
                force: tuple[float, ...] = (), kv_dtype: torch.dtype | None = None) -> ModelRunner:
    """A runner over a loaded model that verifies up to `drafts` drafts. mtp: of its own layer;
    draft: of this model."""
    shape, transport = model.shape, arrays(CPU) if isinstance(arrays, type) else arrays
    device = transport.device
    tables = SlotTables(transport, slots, page_table_width(shape.max_model_len, page_size),
                        page_size, shape.vocabulary, shape.max_model_len, len(shape.groups), drafts)
    dtype = kv_dtype or model.dtype
    pools = make_pools(shape, [pages] * len(shape.groups), page_size, dtype, device)
    states = None
    if shape.state is not None:
        states = StatePool(shape.state, len(shape.recurrent), slots, checkpoints, torch.float32,
                           model.dtype, device, drafts)
        for layer in states.layers:
            for part in layer:
                part.fill_(RUBBISH)
    own = make_draft_pool(shape, pages, page_size, dtype, device) if mtp else None
    for pool in pools:
        for pages_of in pool.tensors:
            pages_of.fill_(RUBBISH)
    proposers = make_proposers(getattr(model, "drafter", None), shape, own, tables)
    if drafts and getattr(model, "eagle", None) is not None:
        proposers |= eagle_proposers(
            model, eagle_pool(model, pages, page_size, dtype), tables)
    for name in proposers:
        for pages_of in proposers[name].pool.tensors:
            pages_of.fill_(RUBBISH)
    if draft is not None:
        pool = make_draft_model_pool(draft.shape, pages, page_size, draft.dtype, device)
        for pages_of in pool.tensors:
            pages_of.fill_(RUBBISH)
        full = [group.window for group in shape.groups].index(0)
        tables.keep_history()
        proposers["draft"] = DraftModelProposer(draft, pool, tables, full)
    return ModelRunner(model, pools, tables, states, proposers, propose, force)


class Guess:
    """Drafts of completions that are known, told apart by their seeds: right where `right(seed,
    position)` says so, else another token."""

    def __init__(self, right: Callable[[int, int], bool]) -> None:
        self.right = right
        self.wholes: dict[int, list[int]] = {}
        """Seed -> prompt and completion."""
        self.tables: SlotTables | None = None

    def __call__(self, slots: I32, positions: I32, k: int) -> I32:
        assert self.tables is not None
        out = np.zeros((len(slots), k), np.int32)
        for row, slot, position in zip(out, slots.tolist(), positions.tolist(), strict=True):
            seed = int(self.tables.record[slot][SEED_LOW])
            whole = self.wholes[seed]
            for i, at in enumerate(range(position, position + k)):
                token = whole[at] if at < len(whole) else 0
                row[i] = token if self.right(seed, at) else (token + 1) % self.tables.vocab
        return out


@dataclass
class Work:
    """Requests, one after the other; seeds are their numbers from 1."""

    prompts: list[list[int]]
    params: list[ResolvedParams]

    def ring(self, runner: ModelRunner, **ring: Any) -> Ring:
        """A ring to which all of them are submitted."""
        out = Ring(runner, **ring)
        for i, (prompt, params) in enumerate(zip(self.prompts, self.params, strict=True)):
            out.submit(prompt, params, i + 1)
        return out

    def plain(self, model: Any, runner: dict[str, Any] | None = None,
              **ring: Any) -> list[Output]:
        """Returns the output without drafts."""
        return self.ring(make_runner(model, 0, **(runner or {})), **ring).run()

    def guessed(self, model: Any, want: list[Output], drafts: int,
                right: Callable[[int, int], bool], choose: Callable[[], int] | None = None,
                runner: dict[str, Any] | None = None, **ring: Any) -> tuple[Ring, list[Output]]:
        """Returns the output with drafts of these completions. choose: how many each plan makes."""
        guess = Guess(right)
        made = make_runner(model, drafts, guess, **(runner or {}))
        guess.tables = made.tables
        guess.wholes = {i + 1: prompt + out.tokens
                        for i, (prompt, out) in enumerate(zip(self.prompts, want, strict=True))}
        play = self.ring(made, speculative=f"mtp:{drafts},fixed", **ring)
        if choose is not None:
            play.core._planner.drafting.next = lambda batch: DraftChoice("", choose())
        return play, play.run()


def tokens_of(outputs: list[Output]) -> list[tuple[list[int], str | None]]:
    """Tokens and how they ended."""
    return [(out.tokens, out.finish) for out in outputs]


def i4(*values: Any) -> bytes:
    """A column."""
    return np.array(values, np.int32).tobytes()


@dataclass
class Seq:
    """A sequence under `Hand`."""

    slot: int
    tokens: list[int]
    params: ResolvedParams
    prompt: int
    drafts: list[int] = field(default_factory=list)
    """Told by the last result, if it is masked."""
    finish: int = 0
    emitted: list[int] = field(default_factory=list)
    """How many tokens each of its steps emitted."""


class Hand:
    """A scheduler by hand, a plan at a time: every sequence has its pages from the start."""

    def __init__(self, runner: ModelRunner,
                 allowed: Callable[[list[int]], list[int]] | None = None) -> None:
        """allowed: tokens that may follow on a completion, for sequences that are masked."""
        self.runner, self.allowed, self.step, self.window = runner, allowed, 0, 1
        self.seqs: list[Seq] = []

    def admit(self, tokens: list[int], params: ResolvedParams, drafts: int, prompt: int = 0) -> Seq:
        """Extend a sequence over all its tokens, and sample its first new one. prompt: how many of
        the tokens are the prompt; 0 = all."""
        t = self.runner.tables
        slot = len(self.seqs) + 1
        seq = Seq(slot, list(tokens), params, prompt or len(tokens))
        width = -(-t.max_len // t.page_size)
        pages = [1 + (slot - 1) * width + i for i in range(width)] * t.groups
        admit = Admit(slot, i4(*tokens), seq.prompt, 0, i4(*pages), params, slot)
        self.seqs.append(seq)
        self._run(StepPlan(1, 0, admit=[admit], extend=i4((slot, len(tokens))), drafts=drafts,
                           masks=self._masks([seq], 1)), [seq])
        return seq

    def decode(self, drafts: int, ended: bool = False) -> StepResult:
        """A step of all sequences; ended: also of those that have ended."""
        seqs = [s for s in self.seqs if ended or not s.finish]
        return self._run(StepPlan(1, 0, decode=i4(*(s.slot for s in seqs)), drafts=drafts,
                                  masks=self._masks(seqs, self.window)), seqs)

    def _masks(self, seqs: list[Seq], window: int) -> list[RowMask]:
        masks = []
        for s in (s for s in seqs if s.params.masked):
            assert self.allowed is not None
            done = s.tokens[s.prompt:]
            for row in range(window):
                allowed = self.allowed(done)
                masks.append(mask(s.slot, row, allowed, self.runner.tables.vocab))
                if row == len(s.drafts) or s.drafts[row] not in allowed:
                    break
                done = [*done, s.drafts[row]]
        return masks

    def _run(self, plan: StepPlan, seqs: list[Seq]) -> StepResult:
        result = self.runner.run(plan)
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        for s, count, finish in zip(seqs, result.counts, result.finish, strict=True):
            s.tokens += [next(tokens) for _ in range(count)]
            s.finish = s.finish or finish
            s.emitted.append(count)
        assert not list(tokens)
        self.window = 1 + plan.drafts
        told = np.frombuffer(result.drafts, np.int32).reshape(-1, max(plan.drafts, 1)).tolist()
        for s in (s for s in seqs if s.params.masked):
            s.drafts = told.pop(0) if plan.drafts else []
        assert not told
        return result


def mask(slot: int, row: int, allowed: list[int], vocab: int) -> RowMask:
    """A row's mask."""
    bits = np.zeros(32 * -(-vocab // 32), np.uint8)
    bits[allowed] = 1
    return RowMask(slot, row, np.packbits(bits, bitorder="little").tobytes())
