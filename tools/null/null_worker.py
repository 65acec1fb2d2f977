"""A worker without a model: the token at a position is a hash of (seed, position).

It applies plans as a real worker does, at once, and so makes every token of the engine checkable.
With `debug_memory` it also writes a hash of each token's whole prefix into its pages and, at each
step of a sequence, checks that all that its queries see is its own prefix, whoever wrote it: a page
given to two sequences, shared too early or matched wrongly shows at once.

With drafts, a decode emits 1 to 1 + drafts tokens, the same ones as without: which drafts were
right is decided by dice of (seed, position) against given acceptances.

A sequence with masks emits the next token from the hash on that its mask allows. What is drafted
for it is the hash itself, or, where the dice say so, the token after it, which is mostly wrong:
masks of later rows depend on drafts, so which of them are right cannot be said afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actorium.actors.config.speculative import parse_acceptance, parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.messages import (
    Admit,
    Masks,
    PageGroup,
    Ready,
    Reset,
    RowMask,
    StepPlan,
    StepResult,
    ToWorker,
)
from actorium.actors.runtime.splitmix64 import FIRST_FACTOR, GOLDEN_GAMMA, SECOND_FACTOR
from actorium.actors.scheduler.slot_table import within
from actorium.tools.null.null_memory import BadPlan, Ints, Longs, PageMemory, ints_of

VOCAB = 512
MAX_MODEL_LEN = 131_072
POOL_TOKENS = 1 << 20
ACCEPTANCE = (0.8, 0.6)
DICE = np.uint64(0x5851F42D4C957F2D)
SIDES = 1 << 20
Cost = Callable[[int, int, int, int], int]
"""(decoded sequences, window, drafts, extended tokens) -> microseconds of the step."""


def hash_tokens(seeds: Longs, positions: Longs, vocab: int) -> Ints:
    """Token of each (seed, position): splitmix64 of both, modulo the vocabulary. u8[n] -> i4[n]."""
    z = seeds + positions * np.uint64(GOLDEN_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(vocab)).astype(np.int32)


def next_token(seed: int, position: int, vocab: int, held_back: tuple[int, ...] = ()) -> int:
    """Token at `position`: the hash, or the next id after it that is not held back."""
    token = int(hash_tokens(np.array([seed], np.uint64), np.array([position], np.uint64), vocab)[0])
    while token in held_back:
        token = (token + 1) % vocab
    return token


def next_allowed(seed: int, position: int, bits: bytes, held_back: tuple[int, ...] = ()) -> int:
    """The first token from the hash on, round the vocabulary, that a mask allows and that is not
    held back."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
    allowed = allowed[~np.isin(allowed, held_back)] if held_back else allowed
    if not len(allowed):
        raise BadPlan("a mask allows nothing")
    at = np.searchsorted(allowed, next_token(seed, position, VOCAB))
    return int(allowed[at % len(allowed)])


class NullWorker(Core):
    """The actor's logic (see `core.Core`)."""

    inbox = ToWorker
    front = None

    def __init__(self, context: Context, windows: Sequence[int] = (0,),
                 checkpoints: int | None = None, acceptance: Sequence[float] = (),
                 cost: Cost | None = None) -> None:
        """windows: attention window of each page group, 0 = all; checkpoints: of a recurrent model,
        None = it is none; acceptance: probability that a draft is right, by position (the last one
        goes on), empty = the configuration's; cost: what a step pretends to take."""
        config = context.config
        drafts, acceptance = _speculation(config, tuple(acceptance))
        self._acceptance = [*acceptance, *acceptance[-1:] * drafts][:drafts]
        self._cost = cost
        self.page_size = config.memory.page_size
        tokens = config.memory.max_total_tokens or POOL_TOKENS
        pages = 1 + max(tokens // self.page_size, 1)
        slots = 1 + config.scheduler.max_num_seqs
        groups = [PageGroup(pages, window) for window in windows]
        self.ready = Ready(epoch=context.epoch, groups=groups, page_size=self.page_size,
                           slots=slots,
                           max_model_len=config.model.max_model_len or MAX_MODEL_LEN,
                           vocab_size=VOCAB, device="null", recurrent=checkpoints is not None,
                           checkpoints=checkpoints or 0, drafts=drafts)
        self._epoch = 0
        """The scheduler's."""
        self._taken = False
        """The scheduler knows that we are here."""
        self._steps = 0
        self._out: list[Send] = [Send("scheduler", self.ready)]
        debug = config.memory.debug_memory
        self._memory = PageMemory(self.ready) if debug else None
        self._clear(slots)

    def _clear(self, slots: int) -> None:
        self._admits: list[Admit | None] = [None] * slots
        self._seed = np.zeros(slots, np.uint64)
        self._target = np.zeros(slots, np.int64)
        """Tokens that the admission brought."""
        self._kv = np.zeros(slots, np.int64)
        """Tokens whose K and V would be in the pages."""
        self._length = np.zeros(slots, np.int64)
        """Tokens known: kv, and the last one sampled."""
        self._end = np.zeros(slots, np.int64)
        self._alive = np.zeros(slots, np.bool_)
        self._drafts = 0
        """What the last plan made for each sampled row."""
        self._drafted = np.zeros(slots, np.bool_)
        """Sampled by the last plan."""
        self._picky = np.zeros(slots, np.bool_)
        """Has eos_ids or masks, to be looked at one by one."""
        self._masked: dict[int, list[int]] = {}
        """Slots with masks -> what was drafted for them."""
        self._masks: dict[tuple[int, int], bytes] = {}
        """Of the step, by slot and row."""
        self._held: StepPlan | None = None
        """Waits for its masks."""

    # --- the shell's side ------------------------------------------------------------------------

    def on_message(self, message: ToWorker, now: float) -> None:
        """Take a plan (and answer it) or a reset."""
        if isinstance(message, Reset):
            self._reset(message)
        elif not self._taken or message.epoch != self._epoch:
            return
        elif isinstance(message, Masks):
            plan, self._held = self._held, None
            if plan is None or plan.step != message.step:
                raise BadPlan(f"masks of step {message.step}, for which no plan waits")
            self._answer(plan, message.masks)
        elif self._held is not None:
            raise BadPlan(f"step {message.step} comes before the masks of {self._held.step}")
        elif message.masks_follow:
            self._held = message
        else:
            self._answer(message, message.masks)

    def _answer(self, plan: StepPlan, masks: list[RowMask]) -> None:
        self._masks = {(mask.slot, mask.row): mask.bits for mask in masks}
        self._out.append(Send("scheduler", self.run(plan)))
        self._steps += 1

    def _reset(self, reset: Reset) -> None:
        if reset.epoch < self._epoch or reset.worker not in (0, self.ready.epoch):
            return
        self._epoch, self._taken = reset.epoch, reset.worker > 0
        self._clear(len(self._admits))
        if self._memory is not None:
            self._memory.clear()
        if not self._taken:
            self._out.append(Send("scheduler", self.ready))

    def on_client(self, client: bytes, message: object, now: float) -> None:
        """A worker has no front."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """Ready the first time, results from then on."""
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        return None

    def drain(self, now: float) -> None:
        """Nothing is ever left over."""

    @property
    def done(self) -> bool:
        return True

    def health(self) -> Health:
        # A plan is run when it is whole: between two messages nothing is ever on its way.
        return Health("idle" if self._steps else "ready", self._steps, 60.0)

    # --- a step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Apply one plan. Raises `BadPlan` where it breaks the protocol."""
        self._release(ints_of(plan.release))
        for admit in plan.admit:
            self._admit(admit)
        if self._memory is not None:
            self._memory.append(plan.page_appends)
        window, self._drafts = 1 + self._drafts, plan.drafts
        extend, decode = ints_of(plan.extend).reshape(-1, 2), ints_of(plan.decode)
        self._check(plan, window)
        firsts = [slot for slot, count in extend.tolist() if self._extend(slot, count)]
        rows, reach = decode, self._reach(decode, window)
        if firsts:
            rows = np.concatenate((np.array(firsts, np.int32), rows))
            reach = np.concatenate((np.ones(len(firsts), np.int32), reach))
        tokens, counts, finish = self._sample(rows, np.where(self._alive[rows], reach, 0))
        self._kv[decode] = self._length[decode] - 1
        self._drafted[:] = False
        self._drafted[rows] = True
        if self._memory is not None:
            self._remember(self._memory, rows, len(firsts), window, tokens, counts)
            self._memory.save(plan.checkpoints)
        busy = self._cost(len(decode), window, plan.drafts, int(extend[:, 1].sum())) \
            if self._cost is not None else 0
        return StepResult(epoch=plan.epoch, step=plan.step, tokens=tokens.tobytes(),
                          counts=counts.astype(np.uint8).tobytes(), finish=finish.tobytes(),
                          busy_us=busy, drafts=self._draft_masked(rows))

    def _remember(self, memory: PageMemory, rows: Ints, firsts: int, window: int, tokens: Ints,
                  counts: Ints) -> None:
        """Write what the step's windows write, check what its queries see, then draft: chained
        drafts are written past the last token."""
        at = 0
        for row, (slot, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            memory.learn(slot, tokens[at:at + count].tolist())
            at += count
            if row >= firsts and count:
                start = int(self._length[slot]) - count - 1
                memory.verify(slot, start, count, min(window, int(self._end[slot]) - start))
        memory.check()
        for slot in rows[self._alive[rows]].tolist():
            start = int(self._length[slot]) - 1
            memory.scribble(slot, start, min(start + self._drafts - 1, int(self._end[slot])))

    def _reach(self, slots: Ints, window: int) -> Ints:
        """How many tokens a window of each slot would emit, its end left aside: a draft is right
        with its position's probability, by dice of (seed, position)."""
        reach, right = np.ones(len(slots), np.int32), np.ones(len(slots), np.bool_)
        seeds, lengths = self._seed[slots] ^ DICE, self._length[slots]
        for draft in range(window - 1):
            dice = hash_tokens(seeds, (lengths + draft).astype(np.uint64), SIDES)
            right &= dice < self._acceptance[draft] * SIDES
            reach += right
        if self._masked:
            reach[np.isin(slots, list(self._masked))] = window
        return reach

    def _draft_masked(self, rows: Ints) -> bytes:
        """Draft for the sampled slots with masks; what the result says of that."""
        masked = [slot for slot in rows.tolist() if slot in self._masked] if self._masked else []
        if not masked or not self._drafts:
            return b""
        grid = np.zeros((len(masked), self._drafts), np.int32)
        for place in range(self._drafts):
            seeds, at = self._seed[masked], (self._length[masked] + place).astype(np.uint64)
            wrong = hash_tokens(seeds ^ DICE, at, SIDES) >= self._acceptance[place] * SIDES
            grid[:, place] = (hash_tokens(seeds, at, VOCAB) + wrong) % VOCAB
        for slot, drafts in zip(masked, grid.tolist(), strict=True):
            self._masked[slot] = drafts
        return grid.tobytes()

    def _sample(self, rows: Ints, reach: Ints) -> tuple[Ints, Ints, NDArray[np.uint8]]:
        """The next tokens of each row, `reach` of them (0 = it has ended) unless it ends earlier.
        Returns tokens, counts, finish."""
        length, end = self._length[rows], self._end[rows]
        counts = np.minimum(reach, end - length).astype(np.int32)
        positions = np.repeat(length, counts) + within(counts)
        tokens = hash_tokens(np.repeat(self._seed[rows], counts), positions.astype(np.uint64),
                             VOCAB)
        finish = np.where((length + counts >= end) & (counts > 0), 2, 0).astype(np.uint8)
        picky = np.flatnonzero(self._picky[rows] & (counts > 0))
        if len(picky):
            parts = np.split(tokens, np.cumsum(counts)[:-1])
            for at in picky.tolist():
                parts[at], by_eos = self._pick(int(rows[at]), int(counts[at]))
                if by_eos:
                    finish[at] = 1
                elif len(parts[at]) < counts[at]:
                    finish[at] = 0
                counts[at] = len(parts[at])
            tokens = np.concatenate(parts)
        self._length[rows] += counts
        self._alive[rows[finish > 0]] = False
        return tokens, counts, finish

    def _pick(self, slot: int, count: int) -> tuple[Ints, bool]:
        """The next `count` tokens of a slot with eos_ids or masks, fewer if one of those ids is
        among them, or one is not what was drafted."""
        admit, length = self._admits[slot], int(self._length[slot])
        assert admit is not None
        eos, tokens, drafts = admit.params.eos_ids, list[int](), self._masked.get(slot)
        for place, position in enumerate(range(length, length + count)):
            early = position - admit.prompt_len < admit.params.min_tokens
            bits = None if drafts is None else self._masks.get((slot, place))
            held_back = eos if early else ()
            tokens.append(next_token(admit.seed, position, VOCAB, held_back)
                          if bits is None else next_allowed(admit.seed, position, bits, held_back))
            if tokens[-1] in eos:
                return np.array(tokens, np.int32), True
            if drafts is not None and place < len(drafts) and tokens[-1] != drafts[place]:
                break
        return np.array(tokens, np.int32), False

    def _release(self, slots: Ints) -> None:
        for slot in slots.tolist():
            if self._admits[slot] is None:
                raise BadPlan(f"release of the empty slot {slot}")
            self._admits[slot] = None
            self._alive[slot] = False
            self._masked.pop(slot, None)
            if self._memory is not None:
                self._memory.release(slot)

    def _admit(self, admit: Admit) -> None:
        slot, tokens = admit.slot, len(admit.tokens) // 4
        if slot == 0 or self._admits[slot] is not None:
            raise BadPlan(f"admission to slot {slot}, which is taken")
        self._admits[slot] = admit
        self._seed[slot] = admit.seed
        self._target[slot] = self._length[slot] = tokens
        self._kv[slot] = admit.cached_len
        self._end[slot] = admit.prompt_len + admit.params.max_tokens
        self._picky[slot] = bool(admit.params.eos_ids) or admit.params.masked
        if admit.params.masked:
            self._masked[slot] = []
        self._alive[slot] = True
        if self._memory is not None:
            self._check_emitted(admit)
            self._memory.admit(admit)

    def _check_emitted(self, admit: Admit) -> None:
        """After a preemption the emitted tokens must come back as they were (which with masks
        nobody knows)."""
        eos = admit.params.eos_ids
        if admit.params.masked:
            return
        for at, token in enumerate(ints_of(admit.tokens)[admit.prompt_len:].tolist()):
            early = at < admit.params.min_tokens
            if token != next_token(admit.seed, admit.prompt_len + at, VOCAB, eos if early else ()):
                raise BadPlan(f"slot {admit.slot} is admitted with a wrong token {token} "
                              f"at {admit.prompt_len + at}")

    def _extend(self, slot: int, count: int) -> bool:
        """Compute a chunk; True if it ends the slot's tokens, so that the row is sampled."""
        start = int(self._kv[slot])
        if self._admits[slot] is None or start + count > self._target[slot]:
            raise BadPlan(f"extend of slot {slot} by {count} from {start}, "
                          f"it has {self._target[slot]} tokens")
        if self._memory is not None:
            self._memory.write(slot, start, count)
        self._kv[slot] += count
        return bool(self._kv[slot] == self._target[slot])

    def _check(self, plan: StepPlan, window: int) -> None:
        """Before a step: raises `BadPlan` where it cannot be computed."""
        decode = ints_of(plan.decode)
        if (self._kv[decode] < self._target[decode]).any():
            raise BadPlan("decode of a slot whose prompt is not extended yet")
        if plan.drafts > self.ready.drafts:
            raise BadPlan(f"{plan.drafts} drafts wanted, {self.ready.drafts} can be made")
        if window > 1 and not self._drafted[decode].all():
            raise BadPlan("decode of a slot for which the last plan made no drafts")
        for slot in decode.tolist() if self._memory is not None else ():
            if self._admits[slot] is None:
                raise BadPlan(f"decode of the empty slot {slot}")


def _speculation(config: Config, acceptance: tuple[float, ...]) -> tuple[int, tuple[float, ...]]:
    """Drafts that can be made, and how good they are. There are no weights for `auto` to find: only
    acceptances that are given make it draft."""
    asked = parse_speculative(config.speculation.speculative)
    acceptance = acceptance or parse_acceptance(config.speculation.force_acceptance)
    if asked.auto and not acceptance:
        return 0, ()
    return asked.drafts, acceptance or ACCEPTANCE


def build(context: Context) -> NullWorker:
    """A null worker with the page size, slots and limits of the configuration."""
    return NullWorker(context)
