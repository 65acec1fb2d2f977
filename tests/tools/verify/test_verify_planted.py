"""Faults planted in the actors of real engines, each of which `actorium verify` finds and shrinks
to the conditions that show it. The table of them is in docs/verify.md."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import helpers_contradicting
import pytest
from helpers_kinds import write_bf16_kind, write_kind
from helpers_runtime import short_dir

from actorium.actors.config.tree import Config
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.roles import WORKER, roles_of
from actorium.tools.cli.engines import settings_of
from actorium.tools.cli.verify_command import run

pytestmark = pytest.mark.slow
DEMO, DRAFTING = "demo", "qwen35"
"""The packaged model, whose drafts are right where a schema is, too; a tiny one whose drafts are
often right. Both have a tokenizer."""


class Planted(NamedTuple):
    """A fault, and where it is looked for."""

    worker: str
    kind: str
    axes: str
    """That are varied: those that show it, and others."""
    causes: set[str]
    """Axes that the smallest pair has."""
    differs: tuple[str, ...] = ("token",)
    flags: tuple[str, ...] = ()
    cases: int = 24
    runs: int = 40
    """That shrinking may take."""
    comparisons: int = 120
    answer: int = 12
    """Tokens at the most."""
    role: str = WORKER
    """Who has the fault."""
    chance: bool = False
    """It is seen in some runs alone (steps preempt by their number, whoever came when), so that
    shrinking may keep neighbours that it does not need."""


PLANTED = [
    Planted("sharing_seeds", "llama", "neighbours,order,cache", {"neighbours"}),
    Planted("seeding_by_slot", "llama", "neighbours,logprobs,cache", {"neighbours"}),
    Planted("telling_other_rows", "llama", "neighbours,cache,threads", {"neighbours"},
            ("logprob",)),
    Planted("taking_other_scales", "llama", "neighbours,logprobs,threads", {"neighbours"},
            ("token", "logprob"), flags=("--kv-cache-dtype", "int8")),
    Planted("committing_twice", DRAFTING, "neighbours,drafts", {"drafts"}, ("token", "logprob")),
    Planted("committing_too_much", "hybrid", "neighbours,drafts", {"drafts"}),
    Planted("turning_drafts_back", DRAFTING, "neighbours,drafts", {"drafts"}, ("token", "logprob")),
    Planted("masking_late", DEMO, "drafts,logprobs", {"drafts"}),
    Planted("penalising_without_drafts", DRAFTING, "neighbours,drafts", {"drafts"}),
    Planted("penalising_what_it_computes", "llama", "neighbours,cache,threads", {"cache"}),
    Planted("reading_stale_pages", "llama", "neighbours,cache,pool",
            {"cache", "pool"}, runs=120),
    Planted("forgetting_checkpoints", "hybrid", "neighbours,cache", {"cache"}),
    Planted("saving_late", "hybrid", "neighbours,cache,threads", {"cache"}),
    Planted("helpers_faulty_attention:masking_worker", "llama", "neighbours,tokens_per_step",
            {"tokens_per_step"}, ("logprob",), cases=12),
    Planted("committing_too_much_once_preempted", "hybrid", "neighbours,drafts,preempt_every",
            {"drafts", "preempt_every"}, chance=True),
    Planted("seeding_anew", "llama", "neighbours,worker,logprobs", {"worker"}, comparisons=200),
    Planted("losing_an_event", "llama", "neighbours,reading,logprobs", {"reading"},
            ("token", "end"), role="gateway-0")]


def verified(fault: Planted, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([
        str(Path(helpers_contradicting.__file__).parent), os.environ.get("PYTHONPATH", "")]))
    worker = fault.worker if ":" in fault.worker else f"helpers_contradicting:{fault.worker}"
    report, model = folder / "report.json", [str(folder / "m")]
    if fault.kind == DEMO:
        model.clear()
    elif fault.kind == DRAFTING:
        write_bf16_kind(folder / "m", fault.kind)
    else:
        write_kind(folder / "m", fault.kind)
        model.append("--skip-tokenizer")

    @contextlib.contextmanager
    def start(config: Config) -> Iterator[Engine]:
        values = settings_of(config)
        roles = roles_of(config) | {fault.role: worker}
        with Engine(values.pop("model"), roles=roles, **values) as made:
            yield made

    with short_dir() as run_dir:
        monkeypatch.setenv("ACTORIUM_RUN_DIR", str(run_dir))
        assert run("verify", [
            *model, "--device", "cpu", "--dtype", "float32", "--fork-server", "off",
            "--comparisons", str(fault.comparisons), "--engines", "4",
            "--cases", str(fault.cases), "--answer-tokens", str(fault.answer),
            "--axes", fault.axes, "--logprobs", "close", "--shrink", "1",
            "--max-runs", str(fault.runs), "--json", str(report), *fault.flags], start) == 1
    return dict(json.loads(report.read_text()))


@pytest.mark.parametrize("fault", PLANTED, ids=[own.worker for own in PLANTED])
def test_a_fault_planted_in_workers(fault: Planted, tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, and shrunk to its axes."""
    report = verified(fault, tmp_path, monkeypatch)
    [own] = report["shrunk"]
    assert ("worker" in fault.causes) is bool(report["counts"]["deaths_met"])
    found = {word.partition("=")[0] for word in own["condition"].split(", ")}
    more = {"order", "neighbours"} if fault.chance else {"order"}
    assert found - more == fault.causes, own
    assert own["difference"]["kind"] in fault.differs
