"""Counts, on any machine, what a decode step and a step with a prompt chunk ask of the device:
kernels launched, graphs replayed, copies, by operation.

The runner is the real one, with the kernels and graphs of CUDA devices, on CPU tensors in which
nothing is computed: each Triton launch and torch operation is recorded, a capture keeps its
records, and a replay stands for them. Memory that a kernel would have filled holds zeros. How many
launches a step takes depends on the number of layers and on the grids that a device of `SMS`
multiprocessors is given, not on the widths, which are tiny here.

An operation of torch counts as one launch, unless it is one of `NOT_LAUNCHED`. Of some, CUDA makes
more (a sort, an index of int32), so where torch still does such work the figure is a lower bound; a
product counts as one.

python benchmarks/launches.py [--out benchmarks/results/launches.json] [--before FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import numpy as np
from gpucheck.shapes import HYBRID, LLAMA
from harness import markdown
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.plan.graph_memory import GraphShape
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker.device import open_device
from actorium.kernels.triton.device_limits import HOPPER
from actorium.kernels.triton.skinny import CONFIGS

T = TypeVar("T")
SMS = 132
"""Multiprocessors of an H100 or H200."""
CONTEXT = 1000
"""Tokens of each sequence."""
PAGE = 16
NOT_LAUNCHED = frozenset(f"aten::{name}" for name in (
    # Views: other shapes and strides of the same memory.
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand",
    "narrow", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view",
    # Memory that is never filled.
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    # A number of Python's, which goes along with the launch that takes it.
    "lift_fresh", "scalar_tensor"))
MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
               "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 16,
               "num_experts_per_tok": 8, "moe_intermediate_size": 64, "norm_topk_prob": True,
               "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Qwen3-30B-A3B, with fewer experts."""
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "vocab_size": 5000,
          "eos_token_id": 4999, "max_position_embeddings": 4096, "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
GREEDY, TOP_P = ResolvedParams(max_tokens=64, temperature=0.0), ResolvedParams(max_tokens=64,
                                                                               top_p=0.9)


@dataclass
class Tally:
    launches: Counter[str] = field(default_factory=Counter)
    """Counts by kernel or torch operation, including replayed graphs."""
    replays: int = 0
    in_graphs: int = 0
    """Those of `launches` in replayed graphs, which the host does not make."""
    uploads: int = 0
    fetches: int = 0
    """Copies to the device and back."""

    def figures(self) -> dict[str, Any]:
        """Returns the counts in the form of `results/launches.json`."""
        return {"launches": sum(self.launches.values()), "replays": self.replays,
                "uploads": self.uploads, "fetches": self.fetches,
                "by_name": dict(self.launches.most_common())}


class Counting(TorchDispatchMode):
    """Writes down every operation; memory that a kernel would fill holds zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, func._schema.name
        with self:  # what consists of others is counted as those
            parts = func.decompose(*args, **options)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **options)
        if name not in NOT_LAUNCHED:
            self.tally.launches[name] += 1
        elif "empty" in name:
            out.zero_()
        return out

    @contextmanager
    def apart(self) -> Iterator[Tally]:
        """What is asked meanwhile, in a tally of its own."""
        before, self.tally = self.tally, Tally()
        try:
            yield self.tally
        finally:
            self.tally = before


@dataclass
class Replay:
    counting: Counting
    held: Tally

    def replay(self) -> None:
        tally = self.counting.tally
        tally.replays += 1
        tally.launches += self.held.launches
        tally.in_graphs += sum(self.held.launches.values())


@dataclass
class CountingCapturer:
    counting: Counting
    captured: int = 0

    def capture(self, run: Callable[[], T]) -> tuple[Replay, T]:
        with self.counting.apart() as held:
            out = run()
        assert not (held.replays or held.uploads or held.fetches), "no graph can hold that"
        self.captured += 1
        return Replay(self.counting, held), out

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor


@contextmanager
def counted() -> Iterator[Counting]:
    """Everything inside is counted, nothing computed."""
    counting, send, fetch = Counting(), DeviceArrays.send, DeviceArrays.fetch

    def launch(kernel: InterpretedFunction, *args: Any, grid: Any, **options: Any) -> None:
        counting.tally.launches[kernel.fn.__name__] += 1

    def send_counted(self: DeviceArrays, parts: Any) -> Tensor:
        counting.tally.uploads += 1
        with _disable_current_modes():
            return send(self, parts)

    def fetch_counted(self: DeviceArrays, *arrays: Tensor) -> Any:
        counting.tally.fetches += len(arrays)
        with _disable_current_modes():
            return fetch(self, *arrays)

    with ExitStack() as stack:
        for owner, name, other in ((InterpretedFunction, "run", launch),
                                   (DeviceArrays, "send", send_counted),
                                   (DeviceArrays, "fetch", fetch_counted)):
            stack.enter_context(patch.object(owner, name, other))
        for name in ("difference", "piece_difference"):  # nothing is there to compare
            stack.enter_context(patch(f"actorium.gpu.passes.pass_manager.{name}",
                                      lambda *_: 0.0))
        # As on a CUDA device: its products, and its multiprocessors.
        stack.enter_context(patch("actorium.kernels.triton.triton_ops.can_pack", lambda _: False))
        for name, module in list(sys.modules.items()):
            if name.startswith("actorium.kernels.triton") and hasattr(module, "device_limits"):
                stack.enter_context(patch.object(
                    module, "device_limits", lambda device: HOPPER._replace(processors=SMS)))
        yield stack.enter_context(counting)


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any]
    batch: int
    params: ResolvedParams = GREEDY
    drafts: int = 0
    quantization: str = "auto"
    group: int | None = None
    """Columns of such a weight that share a scale; 0: a row's."""


CASES = (
    Case("Llama-3.1-8B, 1 greedy", LLAMA, 1),
    Case("Llama-3.1-8B, 1 top_p", LLAMA, 1, TOP_P),
    Case("Llama-3.1-8B, 64 greedy", LLAMA, 64),
    Case("Llama-3.1-8B, 64 top_p", LLAMA, 64, TOP_P),
    Case("Llama-3.1-8B, 256 greedy", LLAMA, 256),
    Case("Llama-3.1-8B in FP8, 1 greedy", LLAMA, 1, quantization="fp8"),
    Case("Llama-3.1-8B in INT8, a scale a row, 1 greedy", LLAMA, 1, quantization="int8", group=0),
    Case("Qwen3.5-9B, 1 greedy, 2 drafts", HYBRID, 1, GREEDY, 2),
    Case("Qwen3.5-9B, 32 top_p, 2 drafts", HYBRID, 32, TOP_P, 2),
    Case("Qwen3-30B-A3B, 1 greedy", MOE, 1),
    Case("Qwen3-30B-A3B, 64 greedy", MOE, 64),
)


PROMPTS = {"Llama-3.1-8B": LLAMA, "Qwen3.5-9B": HYBRID, "Qwen3-30B-A3B": MOE}
BEFORE, DECODES = 1000, 8
"""Tokens of a prompt before the piece that is counted, sequences that decode beside it."""


def settings(path: Path, case: Case, passes: str) -> Config:
    return Config(
        model=ModelConfig(model=str(path), load_format="dummy", quantization=case.quantization,
                          quantization_group=case.group),
        memory=MemoryConfig(kv_cache_bytes=512 << 20, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=case.batch, max_num_batched_tokens=4096),
        speculation=SpeculationConfig(
            speculative=f"mtp:{case.drafts},fixed" if case.drafts else "off"),
        device=DeviceConfig(device="cpu", threads=1, kernels="triton", passes=passes))


def count(case: Case, fused: bool = True, passes: str = "all") -> Tally:
    """One step of a batch that decodes, replayed where it can be. fused: whether products of few
    rows are as if measuring at start had found them faster with their norms and gates inside.
    passes: those that join the layers' operations, see `parsed_values`."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(case.config | WIDTHS))
        with counted() as counting:
            runner = open_device(settings(Path(scratch), case, passes), 1, lambda *_: None,
                                 {}).runner
            runner.model.ops.products.assume(  # type: ignore[attr-defined]
                CONFIGS if fused else ())
            graphs = runner.decode_graphs(CountingCapturer(counting),
                                          [GraphShape(case.batch, case.drafts + 1)])
            graphs.capture(lambda *_: None)
            runner.graphs = graphs
            return _step(runner, case, counting)


def _step(runner: ModelRunner, case: Case, counting: Counting) -> Tally:
    slots, pages = np.arange(1, case.batch + 1, dtype=np.int32), -(-CONTEXT // PAGE) + 1
    tokens = np.zeros(CONTEXT, np.int32).tobytes()
    own = np.zeros(runner.tables.groups * pages, np.int32).tobytes()
    cached = 0 if runner.states is not None else CONTEXT - 1
    admit = [Admit(slot, tokens, CONTEXT, cached, own, case.params, slot)
             for slot in slots.tolist()]
    extend = np.stack((slots, np.full_like(slots, CONTEXT - cached)), 1).tobytes()
    runner.launch(StepPlan(1, 0, admit=admit, extend=extend, drafts=case.drafts))
    decode = StepPlan(1, 0, decode=slots.tobytes(), drafts=case.drafts)
    runner.launch(decode)  # brings the slots of the graph's rows
    with counting.apart() as found:
        runner.launch(decode)
    return found


def count_piece(config: dict[str, Any], tokens: int, segments: bool) -> Tally:
    """One step of so many tokens: a piece of a prompt and `DECODES`, all greedy. segments: whether
    these serve it."""
    case = Case("", config, DECODES + 1)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config | WIDTHS))
        with counted() as counting:
            runner = open_device(settings(Path(scratch), case, "all"), 1, lambda *_: None,
                                 {}).runner
            runner.model.ops.products.assume(())  # type: ignore[attr-defined]
            if segments:
                runner.segments = PiecewiseGraphRunner(runner.model, runner.pools,
                                                       CountingCapturer(counting), [tokens])
                runner.segments.capture(lambda *_: None)
            return _piece_step(runner, tokens, counting)


def _piece_step(runner: ModelRunner, tokens: int, counting: Counting) -> Tally:
    slots, own = np.arange(1, DECODES + 2, dtype=np.int32), tokens - DECODES
    lengths = np.ones_like(slots)
    lengths[-1] = BEFORE + own + 1
    pages = [np.zeros(runner.tables.groups * -(-int(n) // PAGE), np.int32).tobytes()
             for n in lengths]
    admit = [Admit(slot, np.zeros(n, np.int32).tobytes(), n, 0, has, GREEDY, slot)
             for slot, n, has in zip(slots.tolist(), lengths.tolist(), pages, strict=True)]
    lengths[-1] = BEFORE
    extend = np.stack((slots, lengths), 1).tobytes()
    runner.launch(StepPlan(1, 0, admit=admit, extend=extend))
    with counting.apart() as found:
        runner.launch(StepPlan(1, 0, decode=slots[:-1].tobytes(),
                               extend=np.array([slots[-1], own], np.int32).tobytes()))
    return found


def pieces(tokens: int = 512) -> dict[str, Any]:
    """Counts what the host launches for such a step of each model: kernels and graphs."""
    found = {}
    for name, config in PROMPTS.items():
        eager, cut = (count_piece(config, tokens, how) for how in (False, True))
        own = sum(cut.launches.values()) - cut.in_graphs
        found[name] = {"tokens": tokens, "eager": sum(eager.launches.values()),
                       "in_graphs": cut.in_graphs, "launches": own, "replays": cut.replays}
    return found


def piece_table(found: dict[str, Any]) -> str:
    return markdown(
        ["a step of 512 tokens", "kernels by the host, eager", "in segments", "graphs replayed",
         "kernels in them"],
        [[name, *(own[key] for key in ("eager", "launches", "replays", "in_graphs"))]
         for name, own in found.items()])


def table(found: dict[str, Any], before: dict[str, Any]) -> str:
    rows = []
    for name, now in found.items():
        was = before.get(name, {"launches": "", "replays": ""})
        rows.append([name, was["launches"], now["unjoined"], now["apart"], now["launches"],
                     was["replays"], now["replays"]])
    return markdown(["step", "launches before", "now, without passes", "with them, products apart",
                     "fused", "graphs replayed before", "now"], rows)


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--out", type=Path, help="writes what was found, as JSON")
    args.add_argument("--before", type=Path, help="such a file, of another tree, to put beside it")
    given = args.parse_args()
    before = json.loads(given.before.read_text())["now"] if given.before else {}
    found = {case.name: count(case).figures() | {
        "apart": count(case, fused=False).figures()["launches"],
        "unjoined": count(case, fused=False, passes="none").figures()["launches"]}
        for case in CASES}
    print(table(found, before))
    prompts = pieces()
    print(piece_table(prompts))
    if given.out:
        given.out.write_text(json.dumps({"before": before, "now": found, "prompts": prompts},
                                        indent=1) + "\n")


if __name__ == "__main__":
    main()
