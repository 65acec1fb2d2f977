"""Which modules of a model can have adapters, and the bytes that their matrices take. Nothing here
needs torch."""

from __future__ import annotations

from actorium.gpu.families.architectures import ARCHITECTURES
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import INDEXER, TensorSpec, layer_prefix

EXPERTS = ".experts."
"""Part of the names of experts' projections."""
INNER = frozenset({
    "q_b_proj", "f_b_proj", "g_b_proj", "x_proj", "dt_proj", "fc1_latent_proj", "fc2_latent_proj",
    "modality_router", "prediction_coefs", "correction_coefs"})
"""Projections that are made in the middle of attention or of a recurrent layer, among experts, or
between streams: there they do not take all rows of a step."""
INDEXED = (f"{INDEXER}wk", f"{INDEXER}weights_proj")
"""Ends of the names of an indexer's projections that the first product of attention makes."""
NUMBER = 4
"""Bytes of a scale, and of a rank, a float32 and an int32."""


def adapted_modules(s: ModelShape) -> list[TensorSpec]:
    """Their weights; of one GPU of several, its parts of them."""
    layer = ARCHITECTURES[s.architecture].layer
    return [spec for i in range(s.layers) for spec in layer(s, i, layer_prefix(i))
            if spec.module.endswith(INDEXED) or spec.projection is not None
            and EXPERTS not in spec.name and spec.module.rpartition(".")[2] not in INNER]


def adapter_bytes(s: ModelShape, slots: int, rank: int) -> int:
    """Of so many adapters, their modules of this rank."""
    if not slots or s.by_transformers:
        return 0
    each = 0
    for spec in adapted_modules(s):
        outs, ins = spec.shape
        # Queries and their gate are two products, each with a copy of A.
        products = 2 if spec.projection and spec.projection.gated_head else 1
        each += rank * (products * ins + outs) * s.itemsize + products * 2 * NUMBER
    return slots * each
