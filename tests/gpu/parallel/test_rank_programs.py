"""Decode steps of ranks, captured with the sums between them: the bits of steps that are run, and
the same end where a rank does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_deepseek import add_mtp
from helpers_hybrid import DENSE, write_hybrid
from helpers_kinds import write_kind
from helpers_models import write_checkpoint
from helpers_ranks import run_ranks, whole
from helpers_worker import Ring
from torch import Tensor

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.capture import Arena, KernelCapturer
from actorium.gpu.graphs.decode_programs import DecodePrograms
from actorium.gpu.parallel.rank_group import GroupTimeout, RankGroup
from actorium.gpu.parallel.shared_group import SharedMemoryGroup
from actorium.gpu.worker.device import open_device
from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.program import NotRecordable, Program

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2]]
PARAMS = [ResolvedParams(max_tokens=20, temperature=0.0, logprobs=2),
          ResolvedParams(max_tokens=14, temperature=1.3, top_k=20, top_p=0.9)]


def served(path: Path, speculative: str, eager: bool, group: RankGroup
           ) -> tuple[str, list[Tensor], int]:
    """Outputs, pages but for the sink, states, and how many steps were replayed."""
    config = Config(model=ModelConfig(model=str(path), dtype="bfloat16", max_model_len=128),
                    memory=MemoryConfig(page_size=16, max_total_tokens=1600, checkpoints=2),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48),
                    device=DeviceConfig(device="cpu", threads=group.place.size,
                                        enforce_eager=eager),
                    speculation=SpeculationConfig(speculative=speculative))
    opened = open_device(config, 1, lambda *_: None, {}, group)
    runner, footprint = opened.runner, opened.footprint
    assert footprint.measured.get("graphs", 0) == footprint.planned.get("graphs", 0)
    ring = Ring(runner, budget=48)
    for number, prompt in enumerate(PROMPTS):
        ring.submit(prompt, PARAMS[number % 2], seed=number)
    outputs = str(ring.run())
    kept = [layer[16:].clone() for pool in runner.all_pools for layer in pool.layers]
    if runner.states is not None:
        kept += [part.clone() for layer in runner.states.layers for part in layer]
    return outputs, kept, runner.served["program"]


def write_wide(path: Path, kind: str) -> None:
    """Widths of which a rank's half is a multiple of 32, as tiles of weights need."""
    if kind == "hybrid":
        add_mtp(path, write_hybrid(path, DENSE, 5, mtp_num_hidden_layers=1, intermediate_size=128,
                                   linear_value_head_dim=16))
    elif kind == "windows":
        write_checkpoint(path, "Gemma3ForCausalLM", 5, sliding_window=9, num_hidden_layers=4,
                         layer_types=["sliding_attention", "full_attention"] * 2,
                         intermediate_size=128)
    else:
        write_kind(path, kind)


@pytest.mark.parametrize(("kind", "speculative"), [
    ("llama", "off"), ("windows", "off"), ("hybrid", "off"), ("hybrid", "mtp:2,fixed")])
def test_the_same_bits_as_without(tmp_path: Path, kind: str, speculative: str) -> None:
    """Also where products of few rows alone are C's."""
    path = tmp_path / "model"
    path.mkdir()
    write_wide(path, kind)
    captured, plain = (whole(run_ranks(tmp_path / f"eager {eager}", 2, partial(
        served, path, speculative, eager))) for eager in (False, True))
    for (outputs, kept, replays), (wanted, right, none) in zip(captured, plain, strict=True):
        assert replays > 10 and none == 0
        assert outputs == wanted
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                   for a, b in zip(kept, right, strict=True))


# --- a program of sums ---------------------------------------------------------------------------

def captured(group: RankGroup, run: Callable[[], Tensor]) -> tuple[Program, Tensor]:
    lib = library()
    assert lib is not None
    return KernelCapturer(lib, 1, Arena(1 << 16), Arena(1 << 16)).capture(run)


def test_a_replay_sums_what_is_there_now(tmp_path: Path) -> None:
    def body(group: RankGroup) -> list[Tensor]:
        assert isinstance(group, SharedMemoryGroup)
        part = torch.full((3, 64), 1.0 + group.place.rank)
        residual, weight = torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16()

        def run() -> tuple[Tensor, ...]:
            mine = torch.empty(3, 64).copy_(part)  # all_reduce writes where it reads
            return (group.reduce_add(part, residual), group.reduce_to(part, torch.bfloat16),
                    group.reduce_add_norm(part, residual, weight, 0.0)[1], group.all_reduce(mine))

        program, found = captured(group, run)
        seen = [own.clone() for own in found]
        part += 1
        group.replay(program.replay)
        return seen + list(found)

    for own in whole(run_ranks(tmp_path, 2, body)):
        values = [float(each.flatten()[0]) for each in own]
        assert values == [4, 3, 1, 3, 6, 5, 1, 5]
        assert all(bool((each == each.flatten()[0]).all()) for each in own)


def test_a_gather_is_not_captured(tmp_path: Path) -> None:
    x = torch.ones(2, 2)

    def body(group: RankGroup) -> str:
        with pytest.raises(NotRecordable) as error:
            captured(group, lambda: group.all_gather(x))
        return str(error.value)

    assert "rank_all_gather" in whole(run_ranks(tmp_path, 2, body))[0]


def replaying(group: RankGroup, missing: Callable[[RankGroup], Any], own: int) -> tuple[float, str]:
    """Rank `own` captures 50 sums with the others, and is missing when they replay them. What
    theirs raises, and after how long."""
    x = torch.ones(2, 64)
    residual = torch.ones(2, 64).bfloat16()

    def chain() -> Tensor:
        y = residual
        for _ in range(50):
            y = group.reduce_add(x, y)
        return y

    program, _ = captured(group, chain)
    start = time.monotonic()
    with pytest.raises(GroupTimeout) as error:
        group.barrier()  # who leaves it last may hear there already that one is gone
        if group.place.rank == own:
            missing(group)
        group.replay(program.replay)
    if group.place.rank == own:
        return 0.0, ""
    taken = time.monotonic() - start
    assert error.value.missing == own
    with pytest.raises(GroupTimeout):
        group.replay(program.replay)
    return taken, str(error.value)


def late(group: RankGroup) -> None:
    time.sleep(2 * group.timeout_s)


def fenced(group: RankGroup) -> None:
    time.sleep(0.1)
    group.fence(group.place.rank)


@pytest.mark.parametrize(("missing", "timeout_s", "words"), [
    (late, 1.0, "did not come within 1 s"), (lambda group: group.close(), 20.0, "has ended"),
    (fenced, 20.0, "is missing, by another's word")])
def test_a_replay_ends_with_a_rank_that_has_ended(tmp_path: Path, missing: Callable[..., Any],
                                                timeout_s: float, words: str) -> None:
    """Once, whatever many sums are behind the one that fails: none of them waits again. Nobody
    waits out the time for one who is known to be gone."""
    def body(group: RankGroup) -> tuple[float, str]:
        group.barrier()
        group.timeout_s = timeout_s
        return replaying(group, missing, 1)

    for taken, said in (found := whole(run_ranks(tmp_path, 3, body)))[::2]:
        assert taken < 15.0
        assert "rank 1 of 3" in said
    assert any(words in said for _, said in found)


def test_a_step_that_one_rank_cannot_capture_none_replays(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    write_kind(path, "llama")
    whole_capture = DecodePrograms._captured

    def body(group: RankGroup) -> int:
        return served(path, "off", False, group)[2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodePrograms, "_captured", lambda self, shape: None if (
            self._model.group.place.rank) and whole_capture(self, shape) else whole_capture(
                self, shape))
        assert whole(run_ranks(tmp_path / "group", 2, body)) == [0, 0]
