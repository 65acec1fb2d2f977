"""A worker without a model: the token at a position is a hash of (seed, position).

It applies plans as a real worker does, at once, and so makes every token of the engine checkable.
With `debug_memory` it also writes a hash of each token's whole prefix into its pages and checks, at
each step of a sequence, that its queries see its own prefix only: a page given to two sequences,
shared too early or matched wrongly is detected at once.

With drafts, a decode emits 1 to 1 + drafts tokens, the same ones as without: which drafts are right
follows from a hash of (seed, position) and given acceptance probabilities.

A sequence with masks emits the next token from the hash on that its mask allows. Its draft is the
hash itself or, for some positions, the token after it, which is mostly wrong: masks of later rows
depend on drafts, so which of them are right cannot be computed afterwards.

The tokens of a sequence with an adapter are the hash of another seed, made of the adapter's digest
and its own; adapters are not read, and one whose path ends in `REFUSED` cannot be served. So it is
with other weights: each token is of those that were there at its step. What it pools is a hash of
the prompt's tokens.

Of several ranks each computes every plan, and rank 0 answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from actorium.actors.config.parsed_values import parse_acceptance, parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.health import SLEEPING
from actorium.actors.messages import (
    AdapterAnswer,
    Admit,
    DropAdapter,
    LoadAdapter,
    Masks,
    PageAnswer,
    PageGroup,
    PageOrder,
    Pooled,
    PrepareWeights,
    ReadTensor,
    Ready,
    Reload,
    Reset,
    RowMask,
    StepPlan,
    StepResult,
    TensorAnswer,
    ToWorker,
    Unload,
    Unloaded,
    UpdateWeights,
    WeightsAnswer,
    WeightsSource,
)
from actorium.actors.params import PoolingTask, ResolvedPooling
from actorium.actors.runtime.roles import rank_of
from actorium.actors.runtime.splitmix64 import (
    FIRST_FACTOR,
    GOLDEN_GAMMA,
    SECOND_FACTOR,
    mix64,
)
from actorium.actors.scheduler.slot_table import within
from actorium.tools.null.null_memory import BadPlan, Ints, Longs, PageMemory, ints_of

VOCAB = 512
MAX_MODEL_LEN = 131_072
POOL_TOKENS = 1 << 20
ACCEPTANCE = (0.8, 0.6)
DICE = np.uint64(0x5851F42D4C957F2D)
SIDES = 1 << 20
REFUSED = "refused"
WIDTH, PRIME = 8, 65_521
"""Numbers of a vector, and what they are below."""
Cost = Callable[[int, int, int, int], int]
"""(decoded sequences, window, drafts, extended tokens) -> microseconds of the step."""


def hash_tokens(seeds: Longs, positions: Longs, vocab: int) -> Ints:
    """Token of each (seed, position): splitmix64 of both, modulo the vocabulary. u8[n] -> i4[n]."""
    z = seeds + positions * np.uint64(GOLDEN_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(vocab)).astype(np.int32)


def next_token(seed: int, position: int, vocab: int, held_back: tuple[int, ...] = ()) -> int:
    """Returns the token at `position`: the hash, or the next id after it that is not held back."""
    # Of one token, where numpy would take ten times as long.
    token = mix64(seed + position * GOLDEN_GAMMA) % vocab
    while token in held_back:
        token = (token + 1) % vocab
    return token


def adapted_seed(seed: int, digest: bytes) -> int:
    """Returns the seed of a sequence with the adapter of this digest; b"" = it has none."""
    return seed ^ int.from_bytes(digest[:7], "little")


def weights_digest(source: WeightsSource) -> bytes:
    """Returns what stands for the files of weights, which nobody reads."""
    return blake2b(repr((source.path, source.over)).encode(), digest_size=16).digest()


def next_allowed(seed: int, position: int, bits: bytes, held_back: tuple[int, ...] = ()) -> int:
    """Returns the first token from the hash on, round the vocabulary, that a mask allows and that
    is not held back."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
    allowed = allowed[~np.isin(allowed, held_back)] if held_back else allowed
    if not len(allowed):
        raise BadPlan("a mask allows nothing")
    at = np.searchsorted(allowed, next_token(seed, position, VOCAB))
    return int(allowed[at % len(allowed)])


def pooled_tokens(tokens: Ints, pooling: ResolvedPooling) -> Pooled:
    """Returns the vector of a prompt, or of each of its tokens: the running sum of tokens times
    their place, modulo a prime, as `WIDTH` numbers (or as many as are asked for)."""
    sums = np.cumsum(tokens.astype(np.int64) * np.arange(1, len(tokens) + 1)) % PRIME
    every = pooling.every_row or pooling.task.startswith("token")
    rows = sums if every else sums[-1:]
    width = pooling.dimensions or WIDTH * max(1, len(pooling.layers))
    grid = ((rows[:, None] + 1) * np.arange(1, width + 1) % PRIME).astype(np.float32)
    shape = [*grid.shape] if every else [width]
    if pooling.layers:
        shape = [len(rows), len(pooling.layers), WIDTH]
    return Pooled(shape, grid.tobytes())


class NullWorker(Core):
    """The actor's logic (see `core.Core`)."""

    inbox = ToWorker
    client_inbox = None

    def __init__(self, context: Context, windows: Sequence[int] = (0,),
                 checkpoints: int | None = None, acceptance: Sequence[float] = (),
                 cost: Cost | None = None) -> None:
        """windows: attention window of each page group, 0 = all; checkpoints: of a recurrent model,
        None = not recurrent; acceptance: probability that a draft is right, by position (the last
        one repeats), empty = the configuration's; cost: the time that a step pretends to take."""
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
                           checkpoints=checkpoints or 0, drafts=drafts,
                           draft_methods=_methods(config) if drafts else {},
                           rank=rank_of(context.role),
                           adapters=config.adapters.max_loras * config.adapters.enable_lora,
                           pooling=[*get_args(PoolingTask)], hidden_states=(4, WIDTH, 4),
                           **_tiers(config))
        self._adapters: dict[int, bytes] = {}
        """Digests of adapters by their numbers."""
        self._prepared = 0, WeightsSource()
        """The weights that were read last, and their number."""
        self._epoch = 0
        """The scheduler's epoch."""
        self._acknowledged = False
        """True once the scheduler has acknowledged this worker."""
        self._steps = 0
        self._unloaded = False
        self._out: list[Send] = [Send("scheduler", self.ready)]
        debug = config.memory.debug_memory
        self.memory = PageMemory(self.ready) if debug else None
        self._clear(slots)

    def _clear(self, slots: int) -> None:
        self._admits: list[Admit | None] = [None] * slots
        self._seed = np.zeros(slots, np.uint64)
        self._target = np.zeros(slots, np.int64)
        """Tokens that came with the admission."""
        self._kv = np.zeros(slots, np.int64)
        """Tokens whose K and V would be in the pages."""
        self._length = np.zeros(slots, np.int64)
        """Tokens known: kv, and the last one sampled."""
        self._end = np.zeros(slots, np.int64)
        self._alive = np.zeros(slots, np.bool_)
        self._drafts = 0
        """Drafts per sampled row of the last plan."""
        self._drafted = np.zeros(slots, np.bool_)
        """Sampled by the last plan."""
        self._one_by_one = np.zeros(slots, np.bool_)
        """Slots with eos_ids or masks, sampled one by one."""
        self._masked: dict[int, list[int]] = {}
        """Slots with masks -> their drafts."""
        self._masks: dict[tuple[int, int], bytes] = {}
        """Masks of the step, by slot and row."""
        self._held: StepPlan | None = None
        """The plan that waits for its masks."""

    # --- the shell's side ------------------------------------------------------------------------

    def on_message(self, message: ToWorker, now: float) -> None:
        if isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Unload):
            self._unloaded = True
            self._out.append(self._standing)
        elif isinstance(message, Reload):
            if self._unloaded:
                self._unloaded = self._acknowledged = False
                self._out.append(self._standing)
        elif not self._acknowledged or message.epoch != self._epoch:
            return
        elif isinstance(message, LoadAdapter | DropAdapter):
            self._on_adapter(message)
        elif isinstance(message, PrepareWeights):
            self._prepare(message)
        elif isinstance(message, UpdateWeights):
            self._update(message)
        elif isinstance(message, ReadTensor):
            if not self.ready.rank:
                self._out.append(Send("scheduler", TensorAnswer(
                    message.epoch, message.number, error="there are no tensors")))
        elif isinstance(message, PageOrder):
            outcomes = b"" if self.memory is None else self.memory.obey(message)
            self._out.append(Send("scheduler", PageAnswer(
                message.epoch, self.ready.epoch, self.ready.rank, message.ticket,
                outcomes=outcomes)))
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

    def _on_adapter(self, message: LoadAdapter | DropAdapter) -> None:
        if isinstance(message, DropAdapter):
            self._adapters.pop(message.number, None)
            if any(admit is not None and admit.adapter == message.number for admit in self._admits):
                raise BadPlan(f"adapter {message.number} is dropped, which a slot has")
            return
        adapter = message.adapter
        if adapter.number in self._adapters:
            raise BadPlan(f"two adapters have the number {adapter.number}")
        refused = adapter.path.endswith(REFUSED)
        if not refused:
            self._adapters[adapter.number] = adapter.digest
        self._out.append(Send("scheduler", AdapterAnswer(
            message.epoch, self.ready.rank, adapter.number,
            f"{adapter.path}: it is refused" if refused else "")))

    def _prepare(self, message: PrepareWeights) -> None:
        """Weights whose path ends in `REFUSED` cannot be read."""
        source = message.source
        refused = source.path.endswith(REFUSED)
        if not refused:
            source = replace(source, digest=weights_digest(source))
            self._prepared = message.number, source
        self._out.append(Send("scheduler", WeightsAnswer(
            message.epoch, self.ready.rank, message.number, source,
            f"{source.path}: it is refused" if refused else "", prepared=True)))

    def _update(self, message: UpdateWeights) -> None:
        """Other weights are another seed."""
        number, source = self._prepared
        if not message.take:
            return
        if number != message.number:
            raise BadPlan(f"weights {message.number} are wanted, {number} were prepared")
        self._seed ^= np.uint64(adapted_seed(0, source.digest)
                                ^ adapted_seed(0, self.ready.weights.digest))
        self.ready = replace(self.ready, weights=source)
        self._out.append(Send("scheduler", WeightsAnswer(
            message.epoch, self.ready.rank, message.number, source)))

    def _answer(self, plan: StepPlan, masks: list[RowMask]) -> None:
        self._masks = {(mask.slot, mask.row): mask.bits for mask in masks}
        result = self.run(plan)
        if self.ready.rank == 0:
            self._out.append(Send("scheduler", result))
        elif plan.store or plan.load:
            self._out.append(Send("scheduler", PageAnswer(
                plan.epoch, self.ready.epoch, self.ready.rank, 0, step=plan.step,
                lost=result.lost)))
        self._steps += 1

    def _reset(self, reset: Reset) -> None:
        if reset.epoch < self._epoch or reset.worker not in (0, self.ready.epoch):
            return
        self._epoch, self._acknowledged = reset.epoch, reset.worker > 0
        self._clear(len(self._admits))
        self._adapters.clear()
        if self.memory is not None:
            self.memory.clear()
        if not self._acknowledged:
            self._out.append(self._standing)

    @property
    def _standing(self) -> Send:
        """What it says of itself."""
        return Send("scheduler", Unloaded(self._epoch, self.ready.rank) if self._unloaded
                    else self.ready)

    def on_client(self, client: bytes, message: object, now: float) -> None:
        """A worker has no front."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """Sends Ready the first time, results from then on."""
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        return None

    def drain(self, now: float) -> None:
        """Does nothing: no work is ever left over."""

    @property
    def done(self) -> bool:
        return True

    def health(self) -> Health:
        # A plan runs as soon as it is complete: nothing is in flight between two messages.
        phase = SLEEPING if self._unloaded else "idle" if self._steps else "ready"
        return Health(phase, self._steps, 60.0)

    # --- a step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Applies one plan. Raises `BadPlan` where it breaks the protocol."""
        lost = b"" if self.memory is None else self.memory.copy(plan.store, plan.load)
        self._release(ints_of(plan.release))
        for admit in plan.admit:
            self._admit(admit)
        if self.memory is not None:
            self.memory.append(plan.page_appends)
        longest = max((len(own.tokens) // 4 for own in plan.forced), default=0)
        window, self._drafts = 1 + max(self._drafts, longest), plan.drafts
        for own in plan.forced:
            self._masked[own.slot] = ints_of(own.tokens).tolist()
        extend, decode = ints_of(plan.extend).reshape(-1, 2), ints_of(plan.decode)
        self._check(plan, window)
        ended = [slot for slot, count in extend.tolist() if self._extend(slot, count)]
        firsts, pooled = self._pool(ended)
        rows, reach = decode, self._reach(decode, window)
        if firsts:
            rows = np.concatenate((np.array(firsts, np.int32), rows))
            reach = np.concatenate((np.ones(len(firsts), np.int32), reach))
        tokens, counts, finish = self._sample(rows, np.where(self._alive[rows], reach, 0))
        self._kv[decode] = self._length[decode] - 1
        self._drafted[:] = False
        self._drafted[rows] = True
        if self.memory is not None:
            self._remember(self.memory, rows, len(firsts), window, tokens, counts)
            self.memory.save(plan.checkpoints)
        busy = self._cost(len(decode), window, plan.drafts, int(extend[:, 1].sum())) \
            if self._cost is not None else 0
        return StepResult(epoch=plan.epoch, step=plan.step, tokens=tokens.tobytes(),
                          counts=counts.astype(np.uint8).tobytes(), finish=finish.tobytes(),
                          busy_us=busy, drafts=self._draft_masked(rows),
                          encoded=[item.key for item in plan.encode], lost=lost, pooled=pooled)

    def _remember(self, memory: PageMemory, rows: Ints, firsts: int, window: int, tokens: Ints,
                  counts: Ints) -> None:
        """Writes what the step's windows write, checks what its queries see, then drafts: chained
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
            memory.write_garbage(slot, start, min(start + self._drafts, int(self._end[slot])))

    def _reach(self, slots: Ints, window: int) -> Ints:
        """Returns how many tokens a window of each slot would emit, not regarding its end: a draft
        is right with its position's probability, by a hash of (seed, position)."""
        reach, right = np.ones(len(slots), np.int32), np.ones(len(slots), np.bool_)
        seeds, lengths = self._seed[slots] ^ DICE, self._length[slots]
        for draft in range(window - 1):
            dice = hash_tokens(seeds, (lengths + draft).astype(np.uint64), SIDES)
            right &= dice < self._acceptance[draft] * SIDES
            reach += right
        if self._masked:
            for row in np.flatnonzero(np.isin(slots, list(self._masked))):
                reach[row] = 1 + min(window - 1, len(self._masked[int(slots[row])]))
        return reach

    def _draft_masked(self, rows: Ints) -> bytes:
        """Drafts for the sampled slots with masks; returns the result's part about it."""
        masked = [slot for slot in rows.tolist() if slot in self._masked] if self._masked else []
        if not masked or not self._drafts:
            self._masked.update(dict.fromkeys(masked, []))
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
        """Samples the next `reach` tokens of each row (0 = it has ended), fewer if it ends earlier.
        Returns tokens, counts, finish."""
        length, end = self._length[rows], self._end[rows]
        counts = np.minimum(reach, end - length).astype(np.int32)
        positions = np.repeat(length, counts) + within(counts)
        tokens = hash_tokens(np.repeat(self._seed[rows], counts), positions.astype(np.uint64),
                             VOCAB)
        finish = np.where((length + counts >= end) & (counts > 0), 2, 0).astype(np.uint8)
        one_by_one = np.flatnonzero(self._one_by_one[rows] & (counts > 0))
        if len(one_by_one):
            parts = np.split(tokens, np.cumsum(counts)[:-1])
            for at in one_by_one.tolist():
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
        """Returns the next `count` tokens of a slot with eos_ids or masks, fewer if one of them is
        such an id or differs from the draft."""
        admit, length = self._admits[slot], int(self._length[slot])
        assert admit is not None
        eos, tokens, drafts = admit.params.eos_ids, list[int](), self._masked.get(slot)
        seed = int(self._seed[slot])
        for place, position in enumerate(range(length, length + count)):
            early = position - admit.prompt_len < admit.params.min_tokens
            bits = None if drafts is None else self._masks.get((slot, place))
            held_back = eos if early else ()
            tokens.append(next_token(seed, position, VOCAB, held_back)
                          if bits is None else next_allowed(seed, position, bits, held_back))
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
            if self.memory is not None:
                self.memory.release(slot)

    def _admit(self, admit: Admit) -> None:
        slot, tokens = admit.slot, len(admit.tokens) // 4
        if slot == 0 or self._admits[slot] is not None:
            raise BadPlan(f"admission to slot {slot}, which is taken")
        self._admits[slot] = admit
        digest = self._adapter_of(admit)
        self._seed[slot] = adapted_seed(adapted_seed(admit.seed, digest),
                                        self.ready.weights.digest)
        self._target[slot] = self._length[slot] = tokens
        self._kv[slot] = admit.cached_len
        self._end[slot] = admit.prompt_len + admit.params.max_tokens
        self._one_by_one[slot] = bool(admit.params.eos_ids) or admit.params.masked
        if admit.params.masked:
            self._masked[slot] = []
        self._alive[slot] = True
        if self.memory is not None:
            self._check_emitted(admit)
            self.memory.admit(admit, digest)

    def _adapter_of(self, admit: Admit) -> bytes:
        """Returns the digest of a sequence's adapter; b"" = it has none."""
        if not admit.adapter:
            return b""
        if (digest := self._adapters.get(admit.adapter)) is None:
            raise BadPlan(f"slot {admit.slot} is admitted with the adapter {admit.adapter}, which "
                          "is not loaded")
        running = {each.adapter for each in self._admits if each is not None and each.adapter}
        if len(running) > self.ready.adapters:
            raise BadPlan(f"more than {self.ready.adapters} different adapters run")
        return digest

    def _check_emitted(self, admit: Admit) -> None:
        """Checks that the emitted tokens come back unchanged after a preemption (unknown with
        masks, and where older weights may have made them)."""
        eos, seed = admit.params.eos_ids, int(self._seed[admit.slot])
        if admit.params.masked or self.ready.weights.digest:
            return
        for at, token in enumerate(ints_of(admit.tokens)[admit.prompt_len:].tolist()):
            early = at < admit.params.min_tokens
            if token != next_token(seed, admit.prompt_len + at, VOCAB, eos if early else ()):
                raise BadPlan(f"slot {admit.slot} is admitted with a wrong token {token} "
                              f"at {admit.prompt_len + at}")

    def _extend(self, slot: int, count: int) -> bool:
        """Computes a chunk; returns True if it ends the slot's tokens, so that the row is sampled.
        """
        start = int(self._kv[slot])
        if self._admits[slot] is None or start + count > self._target[slot]:
            raise BadPlan(f"extend of slot {slot} by {count} from {start}, "
                          f"it has {self._target[slot]} tokens")
        if self.memory is not None:
            self.memory.write(slot, start, count)
        self._kv[slot] += count
        return bool(self._kv[slot] == self._target[slot])

    def _pool(self, slots: list[int]) -> tuple[list[int], list[tuple[int, Pooled]]]:
        """Returns which slots, whose tokens are all computed, are sampled, and what the others are
        pooled to."""
        sampled, pooled = list[int](), list[tuple[int, Pooled]]()
        for slot in slots:
            admit = self._admits[slot]
            assert admit is not None
            if admit.pooling is None:
                sampled.append(slot)
                continue
            if admit.pooling.every_row and admit.cached_len:
                raise BadPlan(f"slot {slot}: every row is wanted, {admit.cached_len} are cached")
            self._alive[slot] = False
            pooled.append((slot, pooled_tokens(ints_of(admit.tokens), admit.pooling)))
        return sampled, pooled

    def _check(self, plan: StepPlan, window: int) -> None:
        """Checks a plan before its step: raises `BadPlan` where it cannot be computed."""
        decode = ints_of(plan.decode)
        if (self._kv[decode] < self._target[decode]).any():
            raise BadPlan("decode of a slot whose prompt is not extended yet")
        if plan.drafts > self.ready.drafts:
            raise BadPlan(f"{plan.drafts} drafts wanted, {self.ready.drafts} can be made")
        if window > 1 and not self._drafted[decode].all():
            raise BadPlan("decode of a slot for which the last plan made no drafts")
        for slot in decode.tolist() if self.memory is not None else ():
            if self._admits[slot] is None:
                raise BadPlan(f"decode of the empty slot {slot}")


def _speculation(config: Config, acceptance: tuple[float, ...]) -> tuple[int, tuple[float, ...]]:
    """Returns how many drafts can be made, and how good they are. There are no weights for `auto`
    to find: only given acceptances turn drafting on."""
    asked = parse_speculative(config.speculation.speculative)
    acceptance = acceptance or parse_acceptance(config.speculation.force_acceptance)
    if asked.auto and not acceptance:
        return 0, ()
    return asked.drafts, acceptance or ACCEPTANCE


def _methods(config: Config) -> dict[str, int]:
    """Returns what is said to make the drafts."""
    return dict(parse_speculative(config.speculation.speculative).methods)


def _tiers(config: Config) -> dict[str, Any]:
    """Fields of `Ready`: a token takes 8 bytes of the host's memory. Pages "on the disk" stay in
    the worker's."""
    memory, size = config.memory, config.memory.page_size
    if not memory.tiers:
        return {}
    buffer = 2 + 2 * config.scheduler.max_num_batched_tokens // size
    slots = memory.host_cache // (8 * size) if memory.host_cache else buffer
    below = memory.tiers[-1] != "host_cache"
    disk = "" if not below else "ahead" if memory.host_cache else "at once"
    return {"host_pages": slots, "disk": disk}


def build(context: Context) -> NullWorker:
    """Builds a null worker with the page size, slots and limits of the configuration."""
    return NullWorker(context)
