"""What verified drafts and timed steps show, averaged over the recent past: acceptances and sums by
method, times by choice. `draft_policy` chooses by it. Pure."""

from __future__ import annotations

from actorium.actors.scheduler.request_state import VerifiedDrafts

ENOUGH = 4
"""Steps that make a measured time."""
MEMORY = 128
"""Steps over which a time is averaged."""
MEMORY_ROWS, MEMORY_STEPS = 512, 16
"""An acceptance forgets half of what it knows in so many rows, but not in fewer steps."""
PRIOR, PRIOR_ROWS = 0.7, 4.0
"""Acceptance of the first draft before any was verified, and how many rows that weighs. A later
position starts as good as the one before it: too high, so that it is tried."""


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
    """Microseconds of a step by choice, at one batch size. Choices go by their numbers."""

    def __init__(self, choices: int, present: int) -> None:
        self.present = present
        """The choice in use."""
        self.mean = [0.0] * choices
        """0 = not measured yet."""
        self.measured = [0] * choices
        """Plan at which each was measured (or tried) last."""
        self._counts = [0] * choices
        self._first: list[list[int]] = [[] for _ in range(choices)]

    def learn(self, choice: int, busy_us: int, plan: int) -> None:
        """Takes the time of a step. The first ones are warm-up, or noise: their median counts."""
        self.measured[choice] = plan
        self._counts[choice] += 1
        count, mean = self._counts[choice], self.mean[choice]
        if count <= ENOUGH:
            self._first[choice].append(busy_us)
            if count == ENOUGH:
                self.mean[choice] = float(sorted(self._first[choice])[ENOUGH // 2])
            return
        ours = choice == self.present
        sample = min(max(busy_us, mean / 2), mean * 2)
        new = mean + (sample - mean) / min(count, MEMORY if ours else MEMORY // 4)
        if ours and count > MEMORY:
            self.mean = [time * new / mean for time in self.mean]
        self.mean[choice] = new


class MethodRecord:
    """What became of one method's drafts."""

    def __init__(self, most: int) -> None:
        self.acceptance = AcceptanceRates(most)
        self.drafts = self.draft_tokens = 0
        """Windows verified, and the drafts in them."""
        self.accepted = [0] * most
        """By position."""
        self.found_share = 1.0
        """Share of the recent steps in which there were drafts to verify. Acceptances and times are
        those of such steps."""
        self._seen = [VerifiedDrafts([0] * (d + 2), [0] * (d + 2)) for d in range(most + 1)]
        """By the drafts of a row: what `learn` has not taken in yet."""
        self._steps = [0] * (most + 1)
        """How many steps that are."""

    def verified(self, seen: VerifiedDrafts) -> None:
        """Counts what became of a step's drafts; `learn` makes something of it later."""
        drafts = len(seen.going) - 2
        self._steps[drafts] += 1
        rows = sum(seen.going[1:]) + sum(seen.ended[1:])
        self.drafts += rows if seen.windows is None else seen.windows
        self.draft_tokens += rows * drafts if seen.drafts is None else seen.drafts
        self.tried(True)
        for total, more in zip(self._seen[drafts][:2], seen[:2], strict=True):
            for count, rows in enumerate(more):
                total[count] += rows

    def tried(self, found: bool) -> None:
        """Counts a step that was to verify drafts; found: there were any."""
        self.found_share += (found - self.found_share) / MEMORY

    def learn(self) -> None:
        """Takes in what was verified since the last call."""
        for drafts, steps in enumerate(self._steps):
            if not steps:
                continue
            seen = self._seen[drafts]
            self.acceptance.learn(seen, steps)
            for position in range(drafts):
                self.accepted[position] += seen.accepted(position)
            self._steps[drafts] = 0
            for total in seen[:2]:
                total[:] = [0] * (drafts + 2)

    def gauges(self) -> dict[str, float]:
        """Returns the sums since the start, and the acceptances by position."""
        total = sum(self.accepted)
        gauges: dict[str, float] = {
            "num_drafts": self.drafts, "num_draft_tokens": self.draft_tokens,
            "num_accepted_tokens": total,
            "acceptance_length": 1 + total / self.drafts if self.drafts else 0.0}
        for position, rate in enumerate(self.acceptance.rates()):
            gauges[f"num_accepted_tokens_pos_{position}"] = self.accepted[position]
            gauges[f"acceptance_pos_{position}"] = rate
        return gauges
