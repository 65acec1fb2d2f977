"""A step under way on the device, and what becomes of it: its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actorium.actors.messages import Pooled, StepPlan, StepResult
from actorium.gpu.step.input_batch import PromptLogprobRows
from actorium.gpu.step.logits_processing import ProcessorFaults
from actorium.gpu.step.pooled_rows import PooledStep
from actorium.gpu.step.result_logprobs import prompt_logprobs, row_logprobs
from actorium.gpu.step.routed_experts import RoutedStep
from actorium.gpu.step.staging import Download
from actorium.gpu.step.tables import I32
from actorium.gpu.vision.media_steps import MediaReport


@dataclass(slots=True)
class LaunchedStep:
    """A step under way on the device."""

    plan: StepPlan
    slots: I32
    """Of the sampled sequences."""
    rows: Download | None = None
    """count, finish, then q_len times a token: [sequences] each; None when nothing was sampled."""
    ranked: list[tuple[int, int, int]] = field(default_factory=list)
    """(sampled sequence, its rows, alternatives) of those that want log-probabilities."""
    ranked_values: Download | None = None
    """Of all their rows."""
    prompts: Sequence[PromptLogprobRows] = ()
    prompt_values: Download | None = None
    pooled: PooledStep | None = None
    hidden: list[tuple[int, Pooled]] = field(default_factory=list)
    """Slots of prompts that it ends, and their hidden states."""
    experts: RoutedStep | None = None
    processed: ProcessorFaults | None = None
    """None where no row was processed."""
    drafts: Download | None = None
    """New drafts of the sequences with masks, which the scheduler must know."""
    media: MediaReport = MediaReport()
    drafted: bytes = b""
    """`StepResult.draft_counts`"""
    lost: Callable[[], bytes] = bytes
    """Waits for the copies of pages; `StepResult.lost`."""
    learn: Callable[[I32], None] | None = None
    """Called with the number of tokens each sequence emitted, where the host cannot know it."""

    def result(self, busy_us: int = 0, idle_us: int = 0, late_us: int = 0) -> StepResult:
        """Wait for the step; its result."""
        counts = np.zeros(0, np.uint8)
        tokens, finish, drafts = b"", b"", b""
        if self.rows is not None:
            emitted, end, *columns = self.rows.wait()
            counts = emitted.astype(np.uint8)
            finish = end.astype(np.uint8).tobytes()
            if len(columns) == 1:
                emitted_tokens = columns[0][emitted > 0]
            else:
                grid = np.stack(columns, axis=1)
                emitted_tokens = grid[np.arange(len(columns)) < emitted[:, None]]
            tokens = emitted_tokens.astype(np.int32).tobytes()
            if self.learn is not None:
                self.learn(emitted.astype(np.int32))
        if self.drafts is not None:
            drafts = self.drafts.wait()[0].astype(np.int32).tobytes()
        media = self.media
        if self.processed is not None:
            media = media._replace(failed=media.failed + self.processed.failed(counts.tolist()))
        return StepResult(
            self.plan.epoch, self.plan.step, counts.tobytes(), tokens, finish,
            row_logprobs(self.ranked, self.ranked_values, counts),
            prompt_logprobs(self.prompts, self.prompt_values), busy_us, idle_us, drafts, late_us,
            *media, self.lost(),
            self.hidden + (self.pooled.results() if self.pooled else []), self.drafted,
            experts=self.experts.results(counts) if self.experts else [])
