"""Torch's dtypes by the names that configs and flags have for them."""

from __future__ import annotations

import torch

from actorium.gpu.families.tensor_specs import TensorSpec

TORCH_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
}
"""Those of `model_shape.DTYPE_BYTES`: of weights and states, and, by the names of
`--kv-cache-dtype`, of pages."""


def tensor_dtype(spec: TensorSpec | None, model: torch.dtype) -> torch.dtype:
    """That a tensor is kept in. model: the dtype of those that say nothing of their own."""
    return TORCH_DTYPES[spec.dtype] if spec is not None and spec.dtype else model


def kv_dtype(name: str, weights: torch.dtype) -> torch.dtype:
    """Of the pages: as asked for by `--kv-cache-dtype`, auto = as the weights."""
    return TORCH_DTYPES.get(name, weights)
