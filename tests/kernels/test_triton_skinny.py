"""Products of few rows with norm, gate and sum in one launch, and when they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers_compile import compiled
from helpers_models import write_checkpoint
from helpers_pairs import pairs
from helpers_worker import CPU
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.gpu.models.registry import load_model
from actorium.kernels.inputs import InputForm, Unnormed, plain
from actorium.kernels.reference.activation import gelu_mul, silu_mul
from actorium.kernels.reference.norm import rms_norm

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
BF16 = torch.bfloat16
COMPILED = """
import torch
from ptxas_device import facts
from actorium.kernels.triton.skinny import CONFIGS, skinny

def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)

for config in CONFIGS:
    skinny(empty(1, 4096), empty(6144, 4096), config, None, empty(4096), 1e-5)
    skinny(empty(16, 4096), empty(28672, 4096), config, None, empty(4096), 1e-5, "silu")
    skinny(empty(4, 14336), empty(4096, 14336), config, residual=empty(4, 4096))
    skinny(empty(1, 2560), empty(3848, 2560), config, empty(3848), empty(2560), 1e-5)
for kernel in hopper.kernels:
    own = facts(kernel, 90)
    assert own.spills == (0, 0) and own.programs >= 1 and own.products in ("mma", "wgmma"), own
"""


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("rows", "outs", "width", "dtype"), pairs(
    [(1, 96, 128), (3, 100, 192), (16, 64, 256), (33, 72, 128), (150, 64, 64)],
    [BF16, torch.float16]))
def test_products_are_those_of_the_reference(rows: int, outs: int, width: int,
                                             dtype: torch.dtype) -> None:
    """Against sums in fp32 of what was rounded as a normed row is. More rows than a program takes
    are taken by several."""
    from actorium.kernels.triton.skinny import CONFIGS, fits, skinny

    x, norm = drawn(rows, width, dtype=dtype), drawn(width, seed=1, dtype=dtype).abs() + 0.5
    w, bias = drawn(outs, width, seed=2, dtype=dtype), drawn(outs, seed=3, dtype=dtype)
    assert fits(w) and not fits(w.float()) and not fits(w[:, 1:])
    normed = rms_norm(x, norm, 1e-5).float()
    for config in (CONFIGS[:3] if rows <= 16 else CONFIGS[4:]):
        y = skinny(x, w, config)
        assert y.dtype is dtype
        close(y, x.float() @ w.float().t())
        close(skinny(x, w, config, bias, norm, 1e-5), normed @ w.float().t() + bias.float())
        for gate, reference in (("silu", silu_mul), ("gelu", gelu_mul)):
            close(skinny(x, w, config, None, norm, 1e-5, gate), reference(normed @ w.float().t()))
        residual = drawn(rows, outs, seed=4, dtype=dtype)
        want = residual.float() + x.float() @ w.float().t()
        assert skinny(x, w, config, residual=residual) is residual
        close(residual, want)


def close(got: Tensor, want: Tensor) -> None:
    """As near as rounding of the operands and of the result allows."""
    error = (got.float() - want).abs().max()
    assert float(error) <= 0.015 * float(want.abs().max()), float(error)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Weights of bf16 are not packed for oneDNN."""
    with patch("actorium.kernels.triton.triton_ops.can_pack", lambda weight: False):
        yield


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_models_give_what_they_give_apart(tmp_path: Path, architecture: str) -> None:
    from actorium.gpu.step.batch import ForwardBatch
    from actorium.gpu.step.pools import make_pools
    from actorium.kernels.triton.skinny import CONFIGS

    write_checkpoint(tmp_path, architecture, seed=5, hidden_size=64, intermediate_size=64,
                     num_hidden_layers=1, dtype=BF16)
    config = Config(model=ModelConfig(max_model_len=32, dtype="bfloat16"),
                    device=DeviceConfig(kernels="triton"))
    with as_on_a_device():
        model = load_model(tmp_path, config, CPU, lambda *_: None)
    found = []
    for chosen in ((), CONFIGS[1:2]):
        model.ops.products.assume(chosen)
        launched: list[str] = []
        pools = make_pools(model.shape, [3], 16, BF16, CPU)
        rows, position = torch.arange(3), torch.zeros(3, dtype=torch.int64)
        batch = ForwardBatch(
            torch.tensor([3, 14, 15]), position, 16 * torch.arange(3), [], 0, 3,
            torch.arange(3).int()[:, None], torch.ones(3).int(), 1, rows)
        with patch("triton.runtime.interpreter.InterpretedFunction.run",
                   counting(launched)):
            found.append(model.logits(model.forward([batch], pools)).float())
        layers = model.shape.layers
        assert launched.count("_norm") == (0 if chosen else 2 * layers + 1)
        plain = layers if model.shape.o_bias else 2 * layers
        assert launched.count("_skinny") == (2 * layers + 1 + plain if chosen else 0)
    close(found[1], found[0])


def counting(names: list[str]) -> object:
    """`InterpretedFunction.run` that tells whom it runs."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch_seen(kernel: InterpretedFunction, *args: object, **options: object) -> object:
        names.append(kernel.fn.__name__)
        return run(kernel, *args, **options)

    return launch_seen


@pytest.mark.slow
def test_the_fastest_correct_product_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """Times are told, not measured: ways apart take 1 s, unless said otherwise."""
    from actorium.kernels.triton import skinny_linear
    from actorium.kernels.triton.skinny import CONFIGS
    from actorium.kernels.triton.skinny_linear import Products, SkinnyLinear

    times: dict[object, float] = {}
    real, ran = skinny_linear.skinny, [None]

    def skinny(x: Tensor, weight: Tensor, config: object, *args: object) -> Tensor:
        ran[0] = config  # type: ignore[call-overload]
        y = real(x, weight, config, *args)
        return y * 1.1 if config == CONFIGS[2] else y

    def seconds(work: object) -> float:
        ran[0] = None
        work()  # type: ignore[operator]
        return times.get(ran[0], 1.0)

    products = Products()
    own = [SkinnyLinear(drawn(16, 64, seed=i), None, products) for i in range(2)]
    gated, residual = SkinnyLinear(drawn(32, 64), None, products, "silu"), drawn(3, 16, seed=9)
    want = residual.float() + drawn(3, 64).float() @ own[0].weight.float().t()
    close(own[0].add(drawn(3, 64), residual), want)
    asked = [each.form.norms for each in (*own, gated)]
    norms = asked[0]
    assert norms is not None
    assert not any(each and each(1) for each in asked), "nothing is chosen that was not measured"
    with (patch.object(skinny_linear, "skinny", skinny),
          patch.object(skinny_linear, "BUCKETS", (1, 4, 16, 32))):  # 256 take the interpreter long
        for told, want in (({}, None), ({CONFIGS[0]: 0.99}, None), ({CONFIGS[0]: 0.9}, CONFIGS[0]),
                           ({CONFIGS[0]: 0.9, CONFIGS[1]: 0.8}, CONFIGS[1]),
                           ({CONFIGS[0]: 0.9, CONFIGS[2]: 0.1}, CONFIGS[0])):
            times.clear()
            times.update(told)
            products.tune(seconds, CONFIGS[:3])
            for rows in (1, 3, 16, 17, 32):
                for kind in (own[0].normed_kind, gated.normed_kind):
                    assert products.config(kind, rows, own[0]) == want
                assert norms(rows) == (want is not None)
                added = products.config(own[0].added_kind, rows, own[0])
                assert added == (want if rows <= 16 else None), "no launch would be saved"
            assert not norms(257)
            products.assume(())
            assert not any(each and each(1) for each in asked)
            own[0].add(drawn(3, 64), residual)
    assert "not what it should be" in caplog.text
    products.assume(CONFIGS[:1])
    x, norm = drawn(3, 64, seed=7), drawn(64, seed=8)
    close(own[1](Unnormed(x, norm, 1e-5)),
          rms_norm(x, norm, 1e-5).float() @ own[1].weight.float().t())
    with pytest.raises(ValueError, match="257 rows are to be normed before"):
        own[1](Unnormed(x[:1].expand(257, 64), norm, 1e-5))
    with pytest.raises(ValueError, match="takes its input normed"):
        plain(Unnormed(x, norm, 1e-5))
    assert own[1].form.also(InputForm()).norms is None, "two products share what is normed"


def test_rows_are_padded_as_little_as_can_be() -> None:
    from actorium.kernels.triton.skinny import CONFIGS, configs_of

    for rows, padded in ((1, 16), (16, 16), (17, 32), (33, 64), (65, 128), (129, 128), (256, 128)):
        assert {config.rows for config in configs_of(rows)} == {padded}
        assert any(config.gated for config in configs_of(rows))
    assert configs_of(40, CONFIGS[:2]) == list(CONFIGS[:2])


@pytest.mark.slow
def test_they_compile_without_spilling(tmp_path: Path) -> None:
    assert compiled(COMPILED, tmp_path) == ["_skinny"] * 4 * 9
