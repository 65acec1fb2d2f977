"""The attention kernels compile for Hopper, and fit it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_compile import compiled

pytest.importorskip("triton")
CODE = """
import torch
from helpers_attention import Paged
from actorium.kernels.triton.decode import decode
from actorium.kernels.triton.extend import extend

def both(heads, kv_heads, dim, page_size, window=0, kv_dtype=None, q_len=1, splits=2):
    case = Paged([(0, q_len)], heads, kv_heads, dim, page_size, window, torch.bfloat16, kv_dtype)
    decode(*case.tables(), 99, q_len, page_size, window, 1.0, 0.0, splits)(case.q, case.layer)
    case = Paged([(9, 40)], heads, kv_heads, dim, page_size, window, torch.bfloat16, kv_dtype)
    extend(case.rows, page_size, window, 1.0, 0.0, splits)(case.q, case.layer)

both(32, 8, 128, 16)
both(14, 2, 80, 64, window=1024, kv_dtype=torch.float16, q_len=4, splits=1)
"""


@pytest.mark.slow
def test_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_list", "_decode", "_extend", "_merge", "_list", "_decode",
                                        "_extend"]
