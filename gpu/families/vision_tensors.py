"""The tensors of a vision tower, as checkpoints of text and images have them behind `visual.`. None
is quantised at load, and every rank has them whole."""

from __future__ import annotations

from collections.abc import Iterator

from actorium.gpu.families.tensor_specs import TensorSpec
from actorium.gpu.families.vision_shape import VisionShape

TOWER = "visual."


def vision_tensors(v: VisionShape) -> list[TensorSpec]:
    """All of them."""
    patch = (v.hidden, v.channels, v.frames, v.patch, v.patch)
    specs = [TensorSpec(f"{TOWER}patch_embed.proj.weight", patch)]
    if not v.gated:
        specs.append(TensorSpec(f"{TOWER}patch_embed.proj.bias", (v.hidden,)))
    if v.positions:
        specs.append(TensorSpec(f"{TOWER}pos_embed.weight", (v.positions**2, v.hidden)))
    for i in range(v.depth):
        specs += _block(f"{TOWER}blocks.{i}.", v)
    specs += _merger(f"{TOWER}merger.", v, v.hidden)
    for i in range(len(v.deepstack)):
        specs += _merger(f"{TOWER}deepstack_merger_list.{i}.", v, v.merged)
    return specs


def mlp_names(v: VisionShape) -> tuple[str, ...]:
    """The products of a block's MLP; the last leads back."""
    return ("gate_proj", "up_proj", "down_proj") if v.gated else ("linear_fc1", "linear_fc2")


def merger_names(v: VisionShape) -> tuple[str, str, str]:
    """Norm and products of a merger."""
    return ("ln_q", "mlp.0", "mlp.2") if v.gated else ("norm", "linear_fc1", "linear_fc2")


def _block(at: str, v: VisionShape) -> Iterator[TensorSpec]:
    yield from _norm(f"{at}norm1", v, v.hidden)
    yield from _product(f"{at}attn.qkv", 3 * v.hidden, v.hidden)
    yield from _product(f"{at}attn.proj", v.hidden, v.hidden)
    yield from _norm(f"{at}norm2", v, v.hidden)
    *first, last = mlp_names(v)
    for name in first:
        yield from _product(f"{at}mlp.{name}", v.intermediate, v.hidden)
    yield from _product(f"{at}mlp.{last}", v.hidden, v.intermediate)


def _merger(at: str, v: VisionShape, normed: int) -> Iterator[TensorSpec]:
    norm, into, out = merger_names(v)
    yield from _norm(f"{at}{norm}", v, normed)
    yield from _product(f"{at}{into}", v.merged, v.merged)
    yield from _product(f"{at}{out}", v.out_hidden, v.merged)


def _norm(name: str, v: VisionShape, size: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (size,))
    if not v.gated:
        yield TensorSpec(f"{name}.bias", (size,))


def _product(name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, columns))
    yield TensorSpec(f"{name}.bias", (rows,))
