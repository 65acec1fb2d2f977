"""How many drafts a plan makes: as many as give the most tokens a second, none included.

A step with k drafts a sequence emits E(k) = 1 + a_1 + ... + a_k tokens of each, a_i being the share
of drafts 1..i that were all accepted, and takes t(b, k) with b sequences; the best k has the
highest E(k) / t(b, k). Both sides are measured, nothing is assumed of their form: a_i is the
product of measured acceptances by position, since a later position of an MTP layer that is chained
is worse than the first one, not equal to it (which the usual (1 - a^(k+1)) / (1 - a) supposes).
With many sequences a step is bound by arithmetic, its time grows with b * (k + 1), and 0 wins by
itself.

What makes measured choices hard, and what is done about it:

- Times wander (contexts grow, clocks change) while only the k in use is measured. So every time
  that the k in use drifts, the times kept of the others drift with it: what is kept is a ratio, and
  it changes only by measuring the other side. Noise of the k in use cannot make the choice flap.
- What is not measured grows stale. So another k is tried now and then for a few steps. Each trial
  is paid out of an allowance of `ALLOWANCE` of all steps, at the price that its last measurement
  suggests: what is nearly as good is tried often, what is much worse hardly ever.
- A batch size never seen has no times. They are derived from the nearest one that has: its ratio of
  k to another k, times the time of that other k at this size; trials then correct it.
- A new k must promise `GAIN` more than the present one, or it stays.

Only steps without extends count, whose decodes verified as many drafts as they made.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorium.actors.scheduler.request_state import VerifiedDrafts

GAIN = 0.03
"""By how much another k must be better to be taken up."""
ALLOWANCE = 0.01
"""Share of all steps that trials may cost."""
TRIAL = 6
"""Plans of a trial. The first one only makes the drafts that the second verifies."""
TRIAL_EVERY = 200
"""Plans, at the least, between two measurements of one k at one batch size."""
UNKNOWN = 1.0
"""Price of a trial's step where nothing is known: all of a step."""
ENOUGH = 4
"""Steps that make a measured time."""
MEMORY = 128
"""Steps over which a time is averaged."""
MEMORY_ROWS, MEMORY_STEPS = 512, 16
"""An acceptance forgets half of what it knows in so many rows, but not in fewer steps."""
PRIOR, PRIOR_ROWS = 0.7, 4.0
"""Acceptance of the first draft before any was verified, and how many rows that weighs. A later
position starts as good as the one before it: too high, so that it is tried."""


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
    """Returns the k of the most tokens per time; `present`, unless another one promises `gain`
    more.

    tokens: E(k); times: microseconds of a step by k, None = unknown (no candidate; where that is so
    of `present`, it stays).
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


class AcceptanceRates:
    """How often each draft is accepted when those before it were, averaged over the recent past."""

    def __init__(self, most: int) -> None:
        self._tested = [0.0] * most
        self._accepted = [0.0] * most

    def learn(self, seen: VerifiedDrafts, steps: int = 1) -> None:
        """Takes the rows of so many steps."""
        for position in range(len(seen.going) - 2):
            accepted = seen.accepted(position)
            tested = accepted + seen.going[position + 1]
            keep = 0.5 ** min(tested / MEMORY_ROWS, steps / MEMORY_STEPS)
            self._tested[position] = keep * self._tested[position] + tested
            self._accepted[position] = keep * self._accepted[position] + accepted

    def rates(self) -> list[float]:
        """Returns the rates by position."""
        rates, before = [], PRIOR
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            before = (accepted + PRIOR_ROWS * before) / (tested + PRIOR_ROWS)
            rates.append(before)
        return rates


class DraftStepTimes:
    """Microseconds of a step with k drafts, at one batch size."""

    def __init__(self, most: int, present: int) -> None:
        self.present = present
        """The k in use."""
        self.mean = [0.0] * (most + 1)
        """0 = not measured yet."""
        self.measured = [0] * (most + 1)
        """Plan at which each k was measured (or tried) last."""
        self._counts = [0] * (most + 1)
        self._first: list[list[int]] = [[] for _ in range(most + 1)]

    def learn(self, drafts: int, busy_us: int, plan: int) -> None:
        """Takes the time of a step. The first ones are warm-up, or noise: their median counts."""
        self.measured[drafts] = plan
        self._counts[drafts] += 1
        count, mean = self._counts[drafts], self.mean[drafts]
        if count <= ENOUGH:
            self._first[drafts].append(busy_us)
            if count == ENOUGH:
                self.mean[drafts] = float(sorted(self._first[drafts])[ENOUGH // 2])
            return
        ours = drafts == self.present
        sample = min(max(busy_us, mean / 2), mean * 2)
        new = mean + (sample - mean) / min(count, MEMORY if ours else MEMORY // 4)
        if ours and count > MEMORY:
            self.mean = [time * new / mean for time in self.mean]
        self.mean[drafts] = new


class DraftPolicy:
    """Says of each plan how many drafts it makes. Reads no clock and throws no dice: time is
    counted in plans."""

    def __init__(self, most: int, fixed: bool = False) -> None:
        """most: drafts at the most, at least one; fixed: always so many."""
        self.max_drafts, self._fixed = most, fixed
        self.acceptance = AcceptanceRates(most)
        self.present = most
        """Of the last plan."""
        self.changes = self.trials = 0
        """How often another k was taken up, and how often one was tried, since the start."""
        self._times: dict[int, DraftStepTimes] = {}
        self._at = 0
        """The bucket of the last plan."""
        self._plans = self._decide_at = 0
        self._allowance = self._full = TRIAL * UNKNOWN * most
        """Steps that trials may still cost: at first, each k once."""
        self._trial, self._pages_left = 0, 0
        """What is being tried, and for how many plans more."""
        self._seen = [VerifiedDrafts([0] * (d + 2), [0] * (d + 2)) for d in range(most + 1)]
        """By the drafts of a row: what the acceptance has not learnt yet."""
        self._steps = [0] * (most + 1)
        """How many steps that are."""
        self._drafts = self._draft_tokens = 0
        self._accepted = [0] * most

    # --- what steps show -------------------------------------------------------------------------

    def verified(self, seen: VerifiedDrafts) -> None:
        """Counts what became of a step's drafts; `_learn` makes something of it later."""
        drafts = len(seen.going) - 2
        self._steps[drafts] += 1
        for total, more in zip(self._seen[drafts], seen, strict=True):
            for count, rows in enumerate(more):
                total[count] += rows

    def _learn(self) -> None:
        for drafts, steps in enumerate(self._steps):
            if not steps:
                continue
            seen = self._seen[drafts]
            self.acceptance.learn(seen, steps)
            rows = sum(seen.going[1:]) + sum(seen.ended[1:])
            self._drafts += rows
            self._draft_tokens += rows * drafts
            for position in range(drafts):
                self._accepted[position] += seen.accepted(position)
            self._steps[drafts] = 0
            for total in seen:
                total[:] = [0] * (drafts + 2)

    def timed(self, batch: int, drafts: int, busy_us: int) -> None:
        """Takes the time of a step that decoded `batch` sequences and nothing else, and verified as
        many drafts as it made; 0 = not measured."""
        if busy_us and batch:
            self._times_at(bucket(batch)).learn(drafts, busy_us, self._plans)

    # --- what to do ------------------------------------------------------------------------------

    def next(self, batch: int) -> int:
        """Returns how many drafts to make in the next plan for each of its `batch` sampled rows."""
        if not batch:
            return 0
        if not self._fixed:
            self.present = self._choose(bucket(batch))
        return self.present

    def _choose(self, at: int) -> int:
        self._plans += 1
        self._allowance = min(self._allowance + ALLOWANCE, self._full)
        if at != self._at:
            self._at, self._pages_left, self._decide_at = at, 0, self._plans
        current = self._times_at(at)
        if not self._pages_left and self._plans >= self._decide_at:
            self._decide_at = self._plans + TRIAL
            self._decide(current, at)
        if self._pages_left:
            self._pages_left -= 1
            return self._trial
        return current.present

    def _times_at(self, at: int) -> DraftStepTimes:
        if at not in self._times:
            near = self._nearest(at)
            self._times[at] = DraftStepTimes(self.max_drafts,
                                             near.present if near else self.max_drafts)
        return self._times[at]

    def _nearest(self, at: int, *drafts: int) -> DraftStepTimes | None:
        """Returns, of the other batch sizes, the nearest where all of `drafts` were measured."""
        known = [(abs(other - at), other) for other, times in self._times.items()
                 if other != at and all(times.mean[k] for k in drafts)]
        return self._times[min(known)[1]] if known else None

    def _decide(self, current: DraftStepTimes, at: int) -> None:
        self._learn()
        tokens, times = expected_tokens(self.acceptance.rates()), self.times(at)
        winner = best(tokens, times, current.present)
        if winner != current.present:
            current.present = winner
            self.changes += 1
        for k in sorted(range(self.max_drafts + 1), key=current.measured.__getitem__):
            if k != winner and self._due(current, k):
                price = self._price(tokens, times, k, winner)
                if price <= self._allowance:
                    self._allowance -= price
                    self._trial, self._pages_left = k, TRIAL
                    current.measured[k] = self._plans
                    self.trials += 1
                    return

    def _due(self, current: DraftStepTimes, k: int) -> bool:
        """Returns whether k may be tried: not twice in a while, and not before the k in use has a
        time."""
        pause = TRIAL_EVERY if current.mean[k] else 4 * TRIAL
        since = self._plans - current.measured[k]
        return bool(current.mean[current.present]) and (since >= pause or not current.measured[k])

    def _price(self, tokens: Sequence[float], times: Sequence[float | None], k: int,
               present: int) -> float:
        """Steps that a trial of k is likely to cost: its time, less what it emits, in steps."""
        ours, theirs = times[present], times[k]
        if not ours or not theirs:
            return TRIAL * UNKNOWN
        return TRIAL * max(theirs / ours - tokens[k] / tokens[present], 0.05)

    def times(self, at: int) -> list[float | None]:
        """Returns the microseconds by k at a bucket: measured, else derived from the nearest
        one."""
        mean = self._times_at(at).mean
        return [mean[k] or self._derived(at, k) for k in range(self.max_drafts + 1)]

    def _derived(self, at: int, k: int) -> float | None:
        current = self._times[at]
        order = sorted((j for j in range(self.max_drafts + 1) if current.mean[j]),
                       key=lambda j: j != current.present)
        for j in order:
            near = self._nearest(at, j, k)
            if near is not None:
                return current.mean[j] * near.mean[k] / near.mean[j]
        near = None if order else self._nearest(at, k)
        return near.mean[k] if near else None

    # --- gauges ---------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Returns the sums since the start, and what the choice rests on."""
        self._learn()
        total = sum(self._accepted)
        gauges = {"num_drafts": self._drafts, "num_draft_tokens": self._draft_tokens,
                  "num_accepted_tokens": total,
                  "acceptance_length": 1 + total / self._drafts if self._drafts else 0.0,
                  "k": self.present, "k_most": self.max_drafts, "changes": self.changes,
                  "trials": self.trials}
        for position, rate in enumerate(self.acceptance.rates()):
            gauges[f"num_accepted_tokens_pos_{position}"] = self._accepted[position]
            gauges[f"acceptance_pos_{position}"] = rate
        for k, time in enumerate(self.times(self._at) if self._at else ()):
            if time:
                gauges[f"step_us_k_{k}"] = time
        return {f"spec_decode_{name}": float(value) for name, value in gauges.items()}
