"""A worker without a model: the token at a position is a hash of (seed, position).

It applies plans as a real worker does, at once, and so makes every token of the engine checkable.
With `debug_memory` it also writes a hash of each token's whole prefix into its pages and, at each
step of a sequence, checks that all that its queries see is its own prefix, whoever wrote it: a page
given to two sequences, shared too early or matched wrongly shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actorium.actors.core import Context, Health, Send
from actorium.actors.messages import (
    Admit,
    PageGroup,
    Ready,
    Reset,
    StepPlan,
    StepResult,
    ToWorker,
)
from actorium.actors.scheduler.null_memory import BadPlan, Ints, Longs, PageMemory, ints_of

VOCAB = 512
MAX_MODEL_LEN = 131_072
POOL_TOKENS = 1 << 20


def hash_tokens(seeds: Longs, positions: Longs, vocab: int) -> Ints:
    """Token of each (seed, position): splitmix64 of both, modulo the vocabulary. u8[n] -> i4[n]."""
    z = seeds + positions * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(vocab)).astype(np.int32)


def next_token(seed: int, position: int, vocab: int, held_back: tuple[int, ...] = ()) -> int:
    """Token at `position`: the hash, or the next id after it that is not held back."""
    token = int(hash_tokens(np.array([seed], np.uint64), np.array([position], np.uint64), vocab)[0])
    while token in held_back:
        token = (token + 1) % vocab
    return token


class NullWorker:
    """The actor's logic (see `core.Core`)."""

    inbox = ToWorker
    front = None

    def __init__(self, context: Context, windows: Sequence[int] = (0,),
                 checkpoints: int | None = None) -> None:
        """windows: attention window of each page group, 0 = all; checkpoints: of a recurrent model,
        None = it is none."""
        config = context.config
        self.page_size = config.memory.page_size
        tokens = config.memory.max_total_tokens or POOL_TOKENS
        pages = 1 + max(tokens // self.page_size, 1)
        slots = 1 + config.scheduler.max_num_seqs
        groups = [PageGroup(pages, window) for window in windows]
        self.ready = Ready(epoch=context.epoch, groups=groups, page_size=self.page_size,
                           slots=slots,
                           max_model_len=config.model.max_model_len or MAX_MODEL_LEN,
                           vocab_size=VOCAB, device="null", recurrent=checkpoints is not None,
                           checkpoints=checkpoints or 0)
        self._epoch = context.epoch
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
        self._picky = np.zeros(slots, np.bool_)
        """Has eos_ids, to be looked at one by one."""

    # --- the shell's side ------------------------------------------------------------------------

    def on_message(self, message: ToWorker, now: float) -> None:
        """Take a plan (and answer it) or a reset."""
        if isinstance(message, Reset):
            self._epoch = message.epoch
            self._clear(len(self._admits))
            if self._memory is not None:
                self._memory.clear()
        elif message.epoch == self._epoch:
            self._out.append(Send("scheduler", self.run(message)))
            self._steps += 1

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
        return Health("stepping" if self._steps else "ready", self._steps, 60.0)

    # --- a step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Apply one plan. Raises `BadPlan` where it breaks the protocol."""
        self._release(ints_of(plan.release))
        for admit in plan.admit:
            self._admit(admit)
        if self._memory is not None:
            self._memory.append(plan.page_appends)
        firsts = [slot for slot, count in ints_of(plan.extend).reshape(-1, 2).tolist()
                  if self._extend(slot, count)]
        decode = ints_of(plan.decode)
        self._before_decode(decode)
        if self._memory is not None:
            self._memory.check()
            self._memory.save(plan.checkpoints)
        rows = np.concatenate((np.array(firsts, np.int32), decode)) if firsts else decode
        alive = self._alive[rows]
        tokens, finish = self._sample(rows, alive)
        return StepResult(epoch=plan.epoch, step=plan.step, counts=alive.tobytes(),
                          tokens=tokens.tobytes(), finish=finish.tobytes())

    def _sample(self, rows: Ints, alive: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.uint8]]:
        going = rows if alive.all() else rows[alive]
        tokens = hash_tokens(self._seed[going], self._length[going].astype(np.uint64), VOCAB)
        ended = np.where(self._length[going] + 1 >= self._end[going], 2, 0).astype(np.uint8)
        for at in np.flatnonzero(self._picky[going]):
            tokens[at], by_eos = self._pick(int(going[at]))
            if by_eos:
                ended[at] = 1
        if self._memory is not None:
            for slot, token in zip(going.tolist(), tokens.tolist(), strict=True):
                self._memory.learn(slot, [token])
        self._length[going] += 1
        self._alive[going[ended > 0]] = False
        finish = np.zeros(len(rows), np.uint8)
        finish[alive] = ended
        return tokens, finish

    def _pick(self, slot: int) -> tuple[int, bool]:
        admit, position = self._admits[slot], int(self._length[slot])
        assert admit is not None
        eos = admit.params.eos_ids
        early = position - admit.prompt_len < admit.params.min_tokens
        token = next_token(admit.seed, position, VOCAB, eos if early else ())
        return token, token in eos

    def _release(self, slots: Ints) -> None:
        for slot in slots.tolist():
            if self._admits[slot] is None:
                raise BadPlan(f"release of the empty slot {slot}")
            self._admits[slot] = None
            self._alive[slot] = False
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
        self._picky[slot] = bool(admit.params.eos_ids)
        self._alive[slot] = True
        if self._memory is not None:
            self._check_emitted(admit)
            self._memory.admit(admit)

    def _check_emitted(self, admit: Admit) -> None:
        """After a preemption the emitted tokens must come back as they were."""
        eos = admit.params.eos_ids
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

    def _before_decode(self, slots: Ints) -> None:
        if (self._kv[slots] < self._target[slots]).any():
            raise BadPlan("decode of a slot whose prompt is not extended yet")
        if self._memory is not None:
            for slot in slots[self._alive[slots]].tolist():
                if self._admits[slot] is None:
                    raise BadPlan(f"decode of the empty slot {slot}")
                self._memory.write(slot, int(self._kv[slot]), 1)
        self._kv[slots] += self._alive[slots]


def build(context: Context) -> NullWorker:
    """A null worker with the page size, slots and limits of the configuration."""
    return NullWorker(context)
