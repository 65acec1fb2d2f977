"""A whole tiny model under `--exact on` with a device's kernels, in the interpreter: what it says
of a token has the same bits in a prompt, in chunks, decoded, verified, alone and among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_attention import INTERPRETED
from helpers_models import Seq, Stepper, write_checkpoint
from helpers_worker import CPU
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.worker.exactness import departures, require_exact

pytest.importorskip("triton")
pytestmark = INTERPRETED

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WAYS = [(1, [((22,), 0, 1), ((5, 17), 1, 1)]),
        pytest.param(4, [((36,), 0, 1), ((36,), 3, 1), ((20, 16), 1, 1), ((1, 35), 0, 1),
                         ((36,), 0, 4), ((36,), 2, 2), ((7, 33), 0, 1)], marks=pytest.mark.slow)]
"""How many of a prompt's last tokens are compared, and ways to ask: chunks of it, of which what is
left is decoded; sequences beside it; rows of a decode."""


def load(path: Path, exact: str, **model: Any) -> Model:
    config = Config(model=ModelConfig(dtype=model.pop("dtype", "bfloat16"), **model),
                    device=DeviceConfig(kernels="triton", exact=exact))
    return load_model(path, config, CPU, lambda *_: None)


@pytest.mark.parametrize(("last", "ways"), WAYS)
def test_what_a_model_says_does_not_depend_on_how_it_is_asked(
    tmp_path: Path, last: int, ways: list[tuple[tuple[int, ...], int, int]]
) -> None:
    write_checkpoint(tmp_path, "Qwen3ForCausalLM", seed=2, dtype=BF16, **SIZES)
    model = load(tmp_path, "on")
    assert departures(model, "on") == []
    require_exact(model, "on")

    prompt = list(range(3, 43 if last > 1 else 26))

    def said(counts: tuple[int, ...], beside: int = 0, q_len: int = 1) -> Tensor:
        """Of the prompt's last tokens."""
        stepper, own = Stepper(model, 64), Seq(prompt)
        others = [Seq([7 + i] * 60) for i in range(beside)]
        if others:
            stepper.step([(other, 9 + i) for i, other in enumerate(others)])
        found = []
        for count in counts:
            found.append(stepper.step([(own, count)], others, every_row=True)[:count])
        while own.done < len(prompt):
            found.append(stepper.step([], [own, *others], q_len)[:q_len])
        return torch.cat(found)[-last:]

    want = said((len(prompt),))
    assert want.shape[0] == last and want.isfinite().all()
    for way in ways:
        assert torch.equal(said(*way), want), way


@pytest.mark.parametrize(("dtype", "said"), [("float32", "products of weights in float32 by torch"),
                                             ("bfloat16", "")])
def test_what_is_not_exact_is_refused_by_name(tmp_path: Path, dtype: str, said: str) -> None:
    write_checkpoint(tmp_path, "Qwen3ForCausalLM", seed=2, dtype=BF16, **SIZES)
    model = load(tmp_path, "on", dtype=dtype)
    if not said:
        return require_exact(model, "on")
    assert departures(model, "on") == [said, "attention by triton, whose tiles and splits follow "
                                       "the step"]
    with pytest.raises(BadConfig, match=f"--exact auto.*|{said}"):
        require_exact(model, "on")


def test_auto_stays_as_fast_as_it_is_and_says_what_it_is_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Qwen3ForCausalLM", seed=2, dtype=BF16, **SIZES)
    model = load(tmp_path, "auto")
    assert type(model.ops).__name__ == "TritonOps"
    assert departures(model, "auto") == [
        "products, whose kernels follow the number of rows",
        "attention by triton, whose tiles and splits follow the step"]
    require_exact(model, "auto")
