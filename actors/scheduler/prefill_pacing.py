"""Bounds the gap between tokens of running sequences: how many prompt tokens may share a step with
decodes.

A step emits its decodes' tokens when all of it is computed, so the gap between two tokens of a
stream is the time of a step, and a step with a long chunk of a prompt stalls every stream. The
chunk is therefore cut to the time that the target leaves beside the decodes. That takes the time of
a step that was never run, so `StepTimeModel` fits one to the steps that were:

    t = base + row * decoded tokens + mixed * (has a prompt) + token * prompt tokens
        + position * (positions that those attend to)

by a Kalman filter whose coefficients may wander: contexts grow, clocks change, others use the
machine. What a plain fit lacks, and what is done about it:

- Times scatter in proportion to themselves, so does the noise of the model. A time that is too far
  off counts only in part, unless several in a row are off on the same side: then the machine has
  changed, and the model forgets what it was sure of.
- A run of steps that only decode says nothing about prompts. It makes the model less sure of them,
  but moves none of their coefficients, and the doubt has a limit. Such steps are added up and
  enter the model as one, so a steady step costs two additions.
- A model is not to be trusted far from what it has seen: a chunk is at most `REACH` times the
  largest one that was measured. With overlap a plan is made before the result of the one before is
  known; while that one goes beyond what was measured, the next one does not. So of two consecutive
  steps one at most is a guess.
- Half of the steps would exceed a target at the mean: the aim is below it by as much as
  predictions were off of late.

Prompts do not starve: whatever the target, they get `SHARE` of the decodes' time and at least what
is left of a page in each step. Steps without decodes are not bounded.

A prompt with images waits beside streams until the worker has made what its next one needs, in
slices of `encode_us`: half of what prompts may take, and what they leave of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actorium.actors.messages import MediaItem, Ready
from actorium.actors.scheduler.request_state import PlanRecord

FACTOR, LEAST_US = 3.0, 75_000.0
"""The default target on a CPU: so many times a step that only decodes, and at least so long.
Prompts get two thirds of the time then, and take half as long again beside streams as alone. With
twice the step the throughput of short requests that come all the time falls by 5 to 20 %, with this
by 2 to 5 %: few sequences stream while prompts wait, and decodes of few cost nearly as much as of
many. 50 ms at least instead of 75 cost models of fast steps 2 % of it, and nobody sees the
difference."""
CROWDED_FACTOR, CROWDED_US = 8.0, 150_000.0
"""The same where many wait for their first token and few stream, times the share of those who wait:
a queue must not grow for the sake of a few streams. With a factor of 5 a machine on which each row
of a decode costs as much as a token of a prompt stayed with 10 streams of 32: it computed 9 % less
and half of the prompts waited nine times as long, for a gap at p99 of 262 ms instead of 319."""
SHARE = 0.25
"""Time that prompts get in a step beside decodes, as a part of the decodes' time, at the least."""
REACH = 2.0
"""How many times the largest chunk measured a step may have."""
SCALES = (1.0, 1 / 32, 1.0, 1 / 128, 1 / (128 * 1024))
"""Units of the model's features, so that its coefficients are of one order."""
PRIOR = (1.0, 0.5, 0.2, 1.0, 0.1)
"""Standard deviation of each coefficient before anything is known, in times of the first step."""
NOISE = 0.08
"""Standard deviation of a step's time, as a part of it."""
DRIFT = 0.01
"""How far a coefficient wanders in a step, as a part of it."""
DOUBT = 0.3
"""The most that a coefficient's standard deviation grows to by wandering, as a part of it."""
CLIP = 3.0
"""Standard deviations beyond which a time counts as off."""
CHANGED = 3
"""Times that are off on the same side in a row, after which the machine has changed."""
RUN = 512
"""Steps that only decode that enter the model as one, at the most."""
TRUST = 8
"""How many independent steps such a run counts as, at the most."""
MEMORY = 32
"""Steps with prompts over which the errors of predictions are averaged."""
MARGIN, MAX_MARGIN = 2.0, 0.3
"""How many mean errors the aim is below the target, and the most of it, as a part of the target."""

ENCODE_SHARE = 0.5
"""Of what prompts may take of a step, for images that prompts wait for."""
AHEAD = 8
"""Images and videos that a plan wants ahead, at the most."""
REMEMBERED = 1024
"""Of those that are made and that no prompt has passed yet."""


class StepTimeModel:
    """Predicts a step's time in microseconds; see the module's docstring.

    A Kalman filter with the identity as its transition (Kalman 1960), coefficients projected on
    0 and above, and innovations clipped at `CLIP` standard deviations (as Huber's estimator does).
    """

    def __init__(self) -> None:
        self.coefficients = [0.0] * len(SCALES)
        self._covariance: list[list[float]] = []
        """Empty until a step was measured."""
        self._off = 0
        """Times in a row that were off, positive when they were too long."""

    @property
    def fitted(self) -> bool:
        """Whether any step was measured."""
        return bool(self._covariance)

    def predict(self, decoded: int, prompt: int = 0, attended: float = 0.0) -> float:
        """Returns the microseconds of a step of so many decoded and prompt tokens; attended:
        positions that the prompt tokens attend to, summed over them."""
        base, row, mixed, token, position = self.coefficients
        time = base + row * SCALES[1] * decoded
        if prompt:
            time += mixed + token * SCALES[3] * prompt + position * SCALES[4] * attended
        return time

    def learn(self, decoded: int, prompt: int, attended: float, spent: float,
              steps: int = 1) -> None:
        """Takes the time of a step, or the mean time of `steps` equal ones; microseconds."""
        x = [feature * scale for feature, scale in
             zip((1, decoded, prompt > 0, prompt, attended), SCALES, strict=True)]
        if not self._covariance:
            size = range(len(SCALES))
            self._covariance = [[(PRIOR[i] * spent) ** 2 if i == j else 0.0 for j in size]
                                for i in size]
        else:
            self._wander(steps)
        predicted = sum(a * b for a, b in zip(self.coefficients, x, strict=True))
        error = spent - predicted
        if self._is_off(error, x, max(spent, predicted), steps):
            self._forget()
        gain_of = self._times(x)
        noise = (NOISE * max(spent, predicted)) ** 2 / min(steps, TRUST)
        variance = sum(a * b for a, b in zip(gain_of, x, strict=True)) + noise
        limit = CLIP * variance ** 0.5
        step = min(max(error, -limit), limit) / variance
        self.coefficients = [c + g * step for c, g in zip(self.coefficients, gain_of, strict=True)]
        for row, gain in zip(self._covariance, gain_of, strict=True):
            part = gain / variance
            row[:] = [p - part * g for p, g in zip(row, gain_of, strict=True)]
        self._project()

    def _project(self) -> None:
        """Raises negative coefficients to 0 and moves the others as their covariance with those
        says, so that what was measured is still predicted."""
        for _ in SCALES:
            worst = min(range(len(SCALES)), key=self.coefficients.__getitem__)
            below, variances = self.coefficients[worst], self._covariance[worst]
            if below >= 0 or variances[worst] <= 0:
                break
            part = below / variances[worst]
            self.coefficients = [c - part * v
                                 for c, v in zip(self.coefficients, variances, strict=True)]
            self.coefficients[worst] = 0.0
        self.coefficients = [max(c, 0.0) for c in self.coefficients]

    def _times(self, x: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, x, strict=True)) for row in self._covariance]

    def _wander(self, steps: int) -> None:
        """Coefficients may have changed since the last time: the model is less sure of them."""
        least = 0.02 * sum(self.coefficients)
        for i, coefficient in enumerate(self.coefficients):
            about, row = max(coefficient, least), self._covariance[i]
            if row[i] < (DOUBT * about) ** 2:
                row[i] += steps * (DRIFT * about) ** 2

    def _is_off(self, error: float, x: list[float], time: float, steps: int) -> bool:
        """Returns whether this is the last of `CHANGED` times in a row that are off on the same
        side."""
        variance = sum(a * b for a, b in zip(self._times(x), x, strict=True))
        variance += (NOISE * time) ** 2 / min(steps, TRUST)
        if error * error <= CLIP * CLIP * variance:
            self._off = 0
            return False
        self._off = max(self._off, 0) + 1 if error > 0 else min(self._off, 0) - 1
        return abs(self._off) >= CHANGED

    def _forget(self) -> None:
        """As unsure of every coefficient as of one that has wandered for long."""
        self._off = 0
        for i, coefficient in enumerate(self.coefficients):
            about = max(coefficient, 0.02 * sum(self.coefficients))
            self._covariance[i] = [0.0] * len(SCALES)
            self._covariance[i][i] = about ** 2


@dataclass
class PrefillAllowance:
    """What prompts may take of one step: a time, and no more than so many tokens."""

    page_size: int
    tokens: int
    spare_us: float
    """Microseconds."""
    us_per_token: float
    us_per_position: float
    """Of each position that a token attends to."""
    deferred: int = 0
    """Tokens by which chunks were cut."""
    first: bool = True
    """No chunk was taken yet: the first one goes to the next page boundary at least."""
    reserved_us: float = 0.0
    """For images and videos alone."""
    encoded: dict[bytes, None] = field(default_factory=dict)
    """Keys of those that the worker has made; who passes one takes it off."""
    encode: list[MediaItem] = field(default_factory=list)

    @property
    def encode_us(self) -> int:
        """See `StepPlan`."""
        return max(int(self.reserved_us + max(self.spare_us, 0.0)), 1) if self.encode else 0

    @property
    def spent(self) -> bool:
        """Whether not even a page of a fresh prompt fits any more."""
        page = self.page_size
        return not self.first and (self.tokens < page or self.spare_us < self._time(0, page))

    def take(self, start: int, wanted: int, media: Sequence[MediaItem] = ()) -> int:
        """Takes the chunk of a prompt that begins at position `start`: `wanted` tokens, or as many
        as fit. Returns its length. A chunk that is cut ends at a page boundary, or before an item
        that is not made yet."""
        if media and not (wanted := self._before_missing(start, wanted, media)):
            return 0
        fit = self._taken(start, wanted)
        for item in media:
            if start < item.end <= start + fit:
                self.encoded.pop(item.key, None)
        return fit

    def _before_missing(self, start: int, wanted: int, media: Sequence[MediaItem]) -> int:
        missing = [item for item in media if item.end > start and item.key not in self.encoded]
        if not missing or missing[0].start >= start + wanted:
            return wanted
        self.encode += missing[:AHEAD - len(self.encode)]
        return max(missing[0].start - start, 0)

    def _taken(self, start: int, wanted: int) -> int:
        fit, page = min(wanted, self.tokens), self.page_size
        if self._time(start, fit) > self.spare_us:
            fit = self._fitting(start, fit)
        if fit < wanted:
            fit = max((start + fit) // page * page - start, 0)
            if self.first and not fit:
                fit = min(wanted, page - start % page)
        self.first = self.first and not fit
        self.tokens -= fit
        self.spare_us -= self._time(start, fit)
        self.deferred += wanted - fit
        return fit

    def _time(self, start: int, tokens: int) -> float:
        return tokens * (self.us_per_token + self.us_per_position * (start + tokens / 2))

    def _fitting(self, start: int, wanted: int) -> int:
        """Returns the most of `wanted` tokens, which do not fit, that do: the positive root of
        `_time`."""
        if self.spare_us <= 0:
            return 0
        half = self.us_per_token + self.us_per_position * start
        root = half + (half * half + 2 * self.us_per_position * self.spare_us) ** 0.5
        return min(int(2 * self.spare_us / root), wanted)


class PrefillPacer:
    """Cuts prompts' chunks to what a target leaves. Reads no clock: times come with results."""

    def __init__(self, target_us: float | None, page_size: int) -> None:
        """target_us: microseconds of a step with decodes; None = the default of a CPU."""
        self.about = (f"{target_us / 1e3:g} ms" if target_us else
                      f"{FACTOR:g} times a step without prompts, at least {LEAST_US / 1e3:g} ms")
        """What it keeps to, for the log."""
        self.model = StepTimeModel()
        self._fixed, self._page_size = target_us, page_size
        self._untimed = False
        """The worker measures no times."""
        self._encoded: dict[bytes, None] = {}
        """See `PrefillAllowance`."""
        self._given: PrefillAllowance | None = None
        """The last allowance."""
        self._reach = 0
        """Prompt tokens of the largest step measured."""
        self._error = 0.1
        """Of predictions of steps with prompts beside decodes: the mean, as a part."""
        self._rows, self._window, self._steps = 0, 1, 0
        """A run of steps that only decode: rows and window of each, and how many there were."""
        self._spent = self._most = 0
        """Their microseconds, and what one of them may count at the most."""
        self._target = target_us or LEAST_US
        """At present."""
        self._counts = {"paced_steps": 0.0, "deferred_prompt_tokens": 0.0,
                        "mixed_step_us": 0.0, "mixed_step_predicted_us": 0.0,
                        "over_target_steps": 0.0}

    def allowance(self, decoded: int, streaming: int, waiting: int,
                  unresolved: Iterable[PlanRecord]) -> PrefillAllowance | None:
        """Returns what prompts may take of a step that decodes so many tokens of `streaming`
        sequences, while `waiting` others have no token yet; None = all of it. unresolved: the plans
        in flight."""
        if self._untimed:
            return None
        self._close_run()
        model, reach = self.model, self._reach
        beside = model.predict(decoded)
        crowd = waiting / (waiting + streaming)
        self._target = self._fixed or max(FACTOR * beside, LEAST_US, CROWDED_US * crowd,
                                          CROWDED_FACTOR * beside * crowd)
        aim = self._target * (1 - min(MARGIN * self._error, MAX_MARGIN))
        _, _, mixed, token, position = model.coefficients
        guessing = any(record.prompt_tokens > reach for record in unresolved)
        spare = max(aim - beside, SHARE * beside) - mixed
        reserved = ENCODE_SHARE * max(spare, 0.0) if self._given and self._given.encode else 0.0
        self._given = PrefillAllowance(
            page_size=self._page_size, tokens=int(reach if guessing else REACH * reach),
            spare_us=spare - reserved, us_per_token=token * SCALES[3],
            us_per_position=position * SCALES[4], reserved_us=reserved, encoded=self._encoded)
        return self._given

    def encoded(self, keys: Iterable[bytes]) -> None:
        """Takes note that the worker has encoded these items."""
        self._encoded.update(dict.fromkeys(keys))
        while len(self._encoded) > REMEMBERED:
            del self._encoded[next(iter(self._encoded))]

    def predict(self, decoded: int, prompt: int, attended: float) -> int:
        """Returns the microseconds that the step of a plan will take."""
        return int(self.model.predict(decoded, prompt, attended))

    def planned(self, deferred: int) -> None:
        """Counts a plan that leaves so many prompt tokens to later ones."""
        if deferred:
            self._counts["paced_steps"] += 1
            self._counts["deferred_prompt_tokens"] += deferred

    def measured(self, record: PlanRecord, busy: int, idle: int) -> None:
        """Learns from a step that took `busy` microseconds (0 = not measured), `idle` of them
        before it."""
        if (self._steps and not record.extends and len(record.slots) == self._rows
                and record.window == self._window and 0 < busy < self._most):
            self._steps += 1
            self._spent += busy + idle
            if self._steps == RUN:
                self._close_run()
        elif busy:
            self._measured_apart(record, busy + idle)
        else:
            self._untimed = True

    def _measured_apart(self, record: PlanRecord, spent: int) -> None:
        """Learns from a step that is not one more of the run."""
        self._untimed = False
        self._close_run()
        if not record.extends:
            self._rows, self._window = record.decodes, record.window
            self._steps, self._spent, self._most = 1, spent, 2 * spent
            return
        decoded, prompt = record.decodes * record.window, record.prompt_tokens
        if decoded and record.predicted_us:
            self._counts["over_target_steps"] += spent > self._target
            self._counts["mixed_step_us"] += spent
            self._counts["mixed_step_predicted_us"] += record.predicted_us
            error = min(abs(spent - record.predicted_us) / record.predicted_us, 1.0)
            self._error += (error - self._error) / MEMORY
        self.model.learn(decoded, prompt, record.attended, spent)
        self._reach = max(self._reach, prompt)

    def _close_run(self) -> None:
        if self._steps:
            self.model.learn(self._rows * self._window, 0, 0.0, self._spent / self._steps,
                             self._steps)
            self._steps = 0

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat: the target at present, and sums since the start."""
        return {"target_itl_us": self._target, **self._counts}


def new_pacer(target_itl: float | None, worker: Ready) -> PrefillPacer | None:
    """Returns the pacer of a fresh worker; None = off. target_itl: milliseconds, 0 = off, None = by
    the device: on a CPU a full chunk beside decodes takes seconds, on a GPU it is computed in the
    time of a few decodes, and prompts in short chunks leave most of it idle."""
    cpu = worker.device.split(" ", 1)[0] == "cpu"
    if target_itl == 0 or (target_itl is None and not cpu):
        return None
    return PrefillPacer(None if target_itl is None else target_itl * 1e3, worker.page_size)
