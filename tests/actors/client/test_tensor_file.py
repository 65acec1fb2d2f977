"""Tensors that the SDK writes for an engine: what safetensors reads again."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from actorium.actors.client.tensor_file import write_tensors
from actorium.actors.errors import ActoriumError, InvalidRequest


def test_torch_and_numpy(tmp_path: Path) -> None:
    """Also what does not lie in one piece, a scalar, and an empty tensor."""
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn((6, 4), generator=draw)
    given: dict[str, Any] = {
        "a": whole.bfloat16(), "b.weight": whole.t(), "c": torch.nn.Parameter(whole[::2].half()),
        "d": torch.tensor(2.5), "e": torch.zeros((0, 3)), "f": whole.double().numpy(),
        "g": whole.numpy()[:, ::2]}
    path = write_tensors(tmp_path, given)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = load_file(path)
    assert found.keys() == given.keys()
    for name, own in given.items():
        want = torch.from_numpy(own.copy()) if isinstance(own, np.ndarray) else own.detach()
        assert found[name].dtype is want.dtype and torch.equal(found[name], want)


def test_the_bytes_of_a_file(tmp_path: Path) -> None:
    content = save({"a": torch.ones(3)})
    assert write_tensors(tmp_path, content).read_bytes() == content


@pytest.mark.parametrize("given", [
    {}, b"", {"a": torch.zeros(2, dtype=torch.int8)}, {"a": [1.0]}, {1: torch.zeros(2)},
    {"a": np.zeros(2, np.int64)}])
def test_what_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(InvalidRequest, match="weights: "):
        write_tensors(tmp_path, given)
    assert not list(tmp_path.iterdir())


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(ActoriumError, match="No such file"):
        write_tensors(tmp_path / "gone", {"a": torch.zeros(2)})
