"""Which kernels a model gets, and that Triton's give whole models the tokens of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_hybrid import DENSE, write_hybrid
from helpers_imports import loaded_by
from helpers_models import write_checkpoint
from helpers_speculation import Work, tokens_of

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.errors import BadConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.worker.device import open_device
from actorium.kernels.backends import select_ops, triton_fault
from actorium.kernels.reference.torch_ops import TorchOps

CPU = torch.device("cpu")
pytest.importorskip("triton")
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


def load(path: Path, kernels: str) -> Decoder:
    config = Config(device=DeviceConfig(kernels=kernels))
    return load_model(path, config, CPU, lambda *_: None)


def test_torch_is_used_where_requested() -> None:
    assert type(select_ops(torch.bfloat16, CPU, 64, True, "torch")) is TorchOps
    assert select_ops(torch.bfloat16, CPU, 64, True).name in ("native", "torch")
    assert select_ops(torch.float32, CPU, 64, True).name == "torch"


@interpreted
def test_triton_is_used_on_a_cpu_where_requested() -> None:
    assert select_ops(torch.bfloat16, CPU, 64, True, "triton").name == "triton"


def test_triton_without_device_and_interpreter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="kernels: triton .*TRITON_INTERPRET=1"):
        select_ops(torch.float32, CPU, 64, True, "triton")
    write_checkpoint(tmp_path)
    with pytest.raises(BadConfig, match="kernels: triton .*TRITON_INTERPRET=1") as raised:
        load(tmp_path, "triton")
    assert raised.value.param == "device.kernels"


@pytest.mark.parametrize("kernels", ["auto", "torch", pytest.param("triton", marks=interpreted)])
def test_one_switch_for_model_and_sampler(tmp_path: Path, kernels: str) -> None:
    write_checkpoint(tmp_path)
    config = Config(model=ModelConfig(model=str(tmp_path), max_model_len=32),
                    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8),
                    device=DeviceConfig(device="cpu", kernels=kernels, threads=1),
                    memory=MemoryConfig(kv_cache_bytes=1 << 20))
    runner = open_device(config, 1, lambda *_: None, {}).runner
    name = "triton" if kernels == "triton" else "torch"
    assert runner.model.ops.sampling.name == runner.tables.sampling.name == name
    assert type(runner.arrays) is (DeviceArrays if kernels == "triton" else HostArrays)


def test_the_cpus_path_is_free_of_triton() -> None:
    code = ("import torch\nfrom actorium.kernels.backends import select_ops\n"
            "for native in (True, False):\n"
            "    select_ops(torch.bfloat16, torch.device('cpu'), 64, native)\n")
    assert "triton" not in loaded_by(code)


@interpreted
@pytest.mark.slow
def test_a_hybrid_model_speaks_as_on_torch_with_drafts_and_without(tmp_path: Path) -> None:
    write_hybrid(tmp_path, DENSE)
    work = Work([[5, 9, 2, 41, 17] * 4, [7, 3, 3]],
                [ResolvedParams(max_tokens=5, temperature=0.0)] * 2)
    want = work.plain(load(tmp_path, "torch"))
    triton = load(tmp_path, "triton")
    assert tokens_of(work.plain(triton)) == tokens_of(want)
    ring, got = work.guessed(triton, want, 2, lambda seed, at: at % 3 > 0)
    assert tokens_of(got) == tokens_of(want)
    assert all(out.finish == "length" for out in got)
