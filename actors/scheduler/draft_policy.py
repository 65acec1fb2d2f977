"""Which method makes a plan's drafts, and how many: what gives the most tokens a second, none
included.

A step with k drafts a sequence emits E(k) = 1 + a_1 + ... + a_k tokens of each, a_i being the share
of drafts 1..i that were all accepted, and takes t(b, k) with b sequences; the best k has the
highest E(k) / t(b, k). Both sides are measured, nothing is assumed of their form: a_i is the
product of measured acceptances by position, since a later position of a layer that is chained is
worse than the first one, not equal to it (which the usual (1 - a^(k+1)) / (1 - a) supposes). With
many sequences a step is bound by arithmetic, its time grows with b * (k + 1), and 0 wins by itself.

With several methods each has acceptances of its own, and each (method, k) times of its own; no
drafts are one choice for all of them. Drafts are made in one step and verified in the next, so that
a step between two choices costs something of both: only steps that verify what the same choice has
made as many of are measured.

What makes measured choices hard, and what is done about it:

- Times wander (contexts grow, clocks change) while only the choice in use is measured. So every
  time that its time drifts, the times kept of the others drift with it: what is kept is a ratio,
  and it changes only by measuring the other side. Noise of the choice in use cannot make it flap.
- What is not measured grows stale. So another one is tried now and then for a few steps. Each trial
  is paid out of an allowance of `ALLOWANCE` of all steps, at the price that its last measurement
  suggests: what is nearly as good is tried often, what is much worse hardly ever. All methods share
  the allowance.
- A batch size never seen has no times. They are derived from the nearest one that has: its ratio of
  one choice to another, times the time of that other one at this size; trials then correct it.
- A new choice must promise `GAIN` more than the present one, or that stays.

Tokens that a grammar leaves no choice about are drafts that cost nothing to make and are always
right. How many there are is known of each plan, so only the time of a longer window is measured:
`forced` says how long it pays to make the next one.

Only steps without extends count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from actorium.actors.config.parsed_values import GRAMMAR
from actorium.actors.health import BY_METHOD, SPECULATION
from actorium.actors.scheduler.draft_measurements import DraftStepTimes, MethodRecord
from actorium.actors.scheduler.request_state import VerifiedDrafts

GAIN = 0.03
"""By how much another choice must be better to be taken up."""
ALLOWANCE = 0.01
"""Share of all steps that trials may cost."""
TRIAL = 6
"""Plans of a trial. The first one only makes the drafts that the second verifies."""
TRIAL_EVERY = 200
"""Plans, at the least, between two measurements of one choice at one batch size."""
LEAST_COST = 0.01
"""Of another row of each sequence, as a share of a step without drafts: less is noise."""
UNKNOWN = 1.0
"""Price of a trial's step where nothing is known: all of a step."""
SINGLY = 4
"""Up to so many drafts every number is a choice, then one of two: 6, 8, 12, 16."""


class DraftChoice(NamedTuple):
    """What a plan does for each sequence that it samples."""

    method: str = ""
    """What makes the drafts; "" = there are none, or the worker has one way to make them."""
    drafts: int = 0


def choices_of(methods: Mapping[str, int]) -> list[DraftChoice]:
    """Returns what may be chosen: no drafts, then of each method 1 up to its most, with gaps behind
    `SINGLY`."""
    found = [DraftChoice()]
    for method, most in methods.items():
        numbers = {*range(1, min(most, SINGLY) + 1), *(k for k in (6, 8, 12, 16) if k < most), most}
        found += [DraftChoice(method, k) for k in sorted(numbers)]
    return found


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Returns E(0), E(1), ..., E(K): tokens of a step with k drafts; acceptance[i] is that of draft
    i + 1 when those before it were accepted."""
    tokens, share = [1.0], 1.0
    for rate in acceptance:
        share *= rate
        tokens.append(tokens[-1] + share)
    return tokens


def best(tokens: Sequence[float], times: Sequence[float | None], present: int,
         gain: float = GAIN) -> int:
    """Returns the number of the choice with the most tokens per time; `present`, unless another one
    promises `gain` more.

    tokens: E of each choice; times: microseconds of its step, None = unknown (no candidate; where
    that is so of `present`, it stays).
    """
    now = times[present]
    if not now:
        return present
    rates = [e / t if t else 0.0 for e, t in zip(tokens, times, strict=True)]
    winner = max(range(len(rates)), key=rates.__getitem__)
    return winner if rates[winner] > (1 + gain) * tokens[present] / now else present


def bucket(batch: int) -> int:
    """Returns the class of a batch size; one class each: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24,
    ..."""
    if batch <= 4:
        return batch
    power = (batch - 1).bit_length() - 1
    return 2 * power + ((batch - 1) >> (power - 1) & 1) + 1


class DraftPolicy:
    """Says of each plan what makes its drafts, and how many. Reads no clock and throws no dice:
    time is counted in plans."""

    def __init__(self, methods: Mapping[str, int], fixed: bool = False) -> None:
        """methods: what makes drafts, and how many of a sequence and step at most, at least one;
        fixed: the first of them always makes so many."""
        self.methods = dict(methods)
        made = {method: most for method, most in methods.items() if method != GRAMMAR}
        self.choices = choices_of(made)
        self._made = len(self.choices)
        """Those of them that a plan may make; behind them are windows of forced tokens."""
        if GRAMMAR in methods:
            self.choices += choices_of({GRAMMAR: methods[GRAMMAR]})[1:]
        self.changes = self.trials = 0
        """How often another choice was taken up, and how often one was tried, since the start."""
        self._fixed = fixed
        self._records = {method: MethodRecord(most) for method, most in methods.items()}
        self._numbers = {choice: number for number, choice in enumerate(self.choices)}
        self._first = self._numbers[DraftChoice(*next(iter(made.items()), ("", 0)))]
        """Where it begins."""
        self._last = self._first
        """Of the last plan."""
        self._times: dict[int, DraftStepTimes] = {}
        self._at = 0
        """The bucket of the last plan."""
        self._plans = self._decide_at = 0
        self._allowance = self._full = TRIAL * UNKNOWN * (len(self.choices) - 1)
        """Steps that trials may still cost: at first, each choice once."""
        self.cost = 0.0
        """What one more draft for each sequence costs of a step without any, at the last plan's
        batch size; 0 where that is not measured, and in trials, which measure it."""
        self._measured_cost = 0.0
        self._trial, self._plans_left = 0, 0
        """What is being tried, and for how many plans more."""

    # --- what steps show -------------------------------------------------------------------------

    def verified(self, method: str, seen: VerifiedDrafts | None) -> None:
        """Counts what became of a step's drafts, which a method has made; None: it found none."""
        if seen is None:
            self._records[method].tried(False)
        else:
            self._records[method].verified(seen)

    def timed(self, batch: int, choice: DraftChoice, busy_us: int) -> None:
        """Takes the time of a step that decoded `batch` sequences and nothing else, and verified
        what the same choice had made as it makes (of a method that finds fewer than planned: that
        had so many to verify); 0 = not measured. More than the method makes are another's, beside
        which it had to find room: they say nothing of it."""
        if busy_us and batch and choice.drafts <= self.methods.get(choice.method, 0):
            while choice not in self._numbers:  # what is found may lie in a gap
                choice = choice._replace(drafts=choice.drafts + 1)
            self._times_at(bucket(batch)).learn(self._numbers[choice], busy_us, self._plans)

    # --- what to do ------------------------------------------------------------------------------

    def next(self, batch: int) -> DraftChoice:
        """Returns which drafts to make in the next plan for each of its `batch` sampled rows."""
        if not batch:
            return self.choices[0]
        if not self._fixed:
            self._last = self._choose(bucket(batch))
        return self.choices[self._last]

    def forced(self, batch: int, lengths: Sequence[int]) -> int:
        """Returns how many forced tokens of a sequence the next plan is to verify at most; 0 =
        none. batch: its sequences; lengths: how many tokens those have that have any."""
        most = max(lengths)
        if self._fixed:
            return min(most, self.methods[GRAMMAR])
        current, tokens, times = self._times_at(bucket(batch)), self._tokens(), self.times(
            bucket(batch))
        present = current.present
        now = times[present]
        if not now:
            return 0
        wanted, highest = 0, batch * tokens[present] / now
        for number in range(self._made, len(self.choices)):
            drafts = self.choices[number].drafts
            if number > self._made and self.choices[number - 1].drafts >= most:
                break
            emitted = (batch - len(lengths)) * tokens[present] + sum(
                1 + min(length, drafts) for length in lengths)
            time = times[number]
            rate = emitted / time if time else 0.0
            due = not time or self._plans - current.measured[number] >= TRIAL_EVERY
            price = min(max(1 - rate / highest, 0.05), UNKNOWN)
            if rate > highest:
                wanted, highest = drafts, rate
            elif due and price <= self._allowance:
                self._allowance -= price
                self.trials += 1
                return drafts
        return wanted

    def _choose(self, at: int) -> int:
        self._plans += 1
        self._allowance = min(self._allowance + ALLOWANCE, self._full)
        if at != self._at:
            self._at, self._plans_left, self._decide_at = at, 0, self._plans
        current = self._times_at(at)
        if not self._plans_left and self._plans >= self._decide_at:
            self._decide_at = self._plans + TRIAL
            self._decide(current, at)
        self.cost = 0.0 if self._plans_left else self._measured_cost
        if self._plans_left:
            self._plans_left -= 1
            return self._trial
        return current.present

    def _times_at(self, at: int) -> DraftStepTimes:
        if at not in self._times:
            near = next(iter(self._by_distance(at)), None)
            self._times[at] = DraftStepTimes(len(self.choices),
                                             near.present if near else self._first)
        return self._times[at]

    def _by_distance(self, at: int) -> list[DraftStepTimes]:
        """Returns the times of the other batch sizes, the nearest first."""
        others = sorted((abs(other - at), other) for other in self._times if other != at)
        return [self._times[other] for _, other in others]

    def _decide(self, current: DraftStepTimes, at: int) -> None:
        self._measured_cost = self._row_cost(self.times(at))
        tokens, times = self._expected(self.times(at))
        winner = best(tokens[:self._made], times[:self._made], current.present)
        if winner != current.present:
            current.present = winner
            self.changes += 1
        for choice in sorted(range(self._made), key=current.measured.__getitem__):
            if choice != winner and self._due(current, choice):
                price = self._price(tokens, times, choice, winner)
                if price <= self._allowance:
                    self._allowance -= price
                    self._trial, self._plans_left = choice, TRIAL
                    current.measured[choice] = self._plans
                    self.trials += 1
                    return

    def _row_cost(self, times: Sequence[float | None]) -> float:
        plain = times[0]
        if not plain:
            return 0.0
        costs = [(time / plain - 1) / choice.drafts
                 for time, choice in zip(times, self.choices, strict=True)
                 if time and choice.drafts]
        return max(median(costs), LEAST_COST) if costs else 0.0

    def _expected(self, times: list[float | None]) -> tuple[list[float], list[float | None]]:
        """Returns E and t of each choice. Where a method finds no drafts in some steps, those are
        steps without: t(b, 0) and one token."""
        tokens, plain = self._tokens(), times[0]
        if plain is None:
            return tokens, times
        shares = [self._records[method].found_share if drafts else 1.0
                  for method, drafts in self.choices]
        return ([1 + share * (own - 1) for share, own in zip(shares, tokens, strict=True)],
                [own and plain + share * (own - plain)
                 for share, own in zip(shares, times, strict=True)])

    def _tokens(self) -> list[float]:
        """Returns E of each choice, in steps with drafts."""
        expected = {}
        for method, record in self._records.items():
            record.learn()
            expected[method] = expected_tokens(record.acceptance.rates())
        return [expected[method][drafts] if drafts else 1.0 for method, drafts in self.choices]

    def _due(self, current: DraftStepTimes, choice: int) -> bool:
        """Returns whether a choice may be tried: not twice in a while, and not before the one in
        use has a time."""
        pause = TRIAL_EVERY if current.mean[choice] else 4 * TRIAL
        since = self._plans - current.measured[choice]
        return bool(current.mean[current.present]) and (
            since >= pause or not current.measured[choice])

    def _price(self, tokens: Sequence[float], times: Sequence[float | None], choice: int,
               present: int) -> float:
        """Steps that a trial is likely to cost: its time, less what it emits, in steps."""
        ours, theirs = times[present], times[choice]
        if not ours or not theirs:
            return TRIAL * UNKNOWN
        return TRIAL * max(theirs / ours - tokens[choice] / tokens[present], 0.05)

    def times(self, at: int) -> list[float | None]:
        """Returns the microseconds by choice at a bucket: measured, else derived from the nearest
        one."""
        current, others = self._times_at(at), self._by_distance(at)
        known = sorted((j for j, time in enumerate(current.mean) if time),
                       key=lambda j: j != current.present)
        return [time or _derived(current, known, [own for own in others if own.mean[choice]],
                                 choice) for choice, time in enumerate(current.mean)]

    # --- gauges ---------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Returns the sums since the start, and what the choice rests on: of all methods together,
        then of each. Acceptances and times of all together are those of the method in use."""
        for record in self._records.values():
            record.learn()
        method, drafts = self.choices[self._last]
        method = method or next(iter(self.methods))
        by_method = {name: record.gauges() for name, record in self._records.items()}
        for (name, k), time in zip(self.choices, self.times(self._at) if self._at else (),
                                   strict=False):
            for own in ([by_method[name]] if k else by_method.values()):
                if time:
                    own[f"step_us_k_{k}"] = time
        gauges = dict(by_method[method])
        for name in {name for own in by_method.values() for name in own if name[:4] == "num_"}:
            gauges[name] = sum(own.get(name, 0.0) for own in by_method.values())
        windows, accepted = gauges["num_drafts"], gauges["num_accepted_tokens"]
        gauges["acceptance_length"] = 1 + accepted / windows if windows else 0.0
        gauges |= {"k": drafts, "k_most": max(self.methods.values()), "changes": self.changes,
                   "trials": self.trials}
        for name, own in by_method.items():
            if name:
                gauges |= {f"{BY_METHOD}{name}_{what}": value for what, value in own.items()}
        return {f"{SPECULATION}{name}": float(value) for name, value in gauges.items()}


def _derived(current: DraftStepTimes, known: Sequence[int], others: Sequence[DraftStepTimes],
             choice: int) -> float | None:
    """Returns the time of a choice that was never measured at a batch size. known: the choices that
    were, the one in use first; others: the batch sizes at which this one was, the nearest first."""
    for j in known:
        for near in others:
            if near.mean[j]:
                return current.mean[j] * near.mean[choice] / near.mean[j]
    return others[0].mean[choice] if others and not known else None
