"""The means of keys that queries and keys in 8 bits want: what is measured, and that nothing else
changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_models import CPU, write_checkpoint
from safetensors.torch import load_file, save_file

from actorium.actors.config.tree import Config, DeviceConfig, MemoryConfig, ModelConfig
from actorium.gpu.attention.attention_backend import AttentionBackend, SageAttention
from actorium.gpu.attention.capabilities import EXTEND
from actorium.gpu.worker.device import OpenedDevice, open_device
from actorium.gpu.worker.measure import TOKENS, measured_tokens
from actorium.kernels.reference.sage import KeyMeans

LACKS = SageAttention.missing(EXTEND, CPU)
pytestmark = [pytest.mark.usefixtures("all_threads"), pytest.mark.skipif(bool(LACKS), reason=LACKS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys carry a bias, as those of Qwen2 do."""
    path = tmp_path_factory.mktemp("qwen2")
    write_checkpoint(path, "Qwen2ForCausalLM", seed=4, head_dim=32, dtype=torch.bfloat16)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name] += 8
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def opened(path: Path, attention: str) -> OpenedDevice:
    config = Config(
        model=ModelConfig(model=str(path), dtype="bfloat16", max_model_len=512),
        memory=MemoryConfig(kv_cache_bytes=4 << 20),
        device=DeviceConfig(device="cpu", prefill_attention_backend=attention, passes="none",
                            optimization_level=0))
    return open_device(config, 1, lambda *_: None, {})


def means_of(own: OpenedDevice) -> tuple[KeyMeans, list[torch.Tensor]]:
    backend: AttentionBackend = own.runner.model.attention.extend  # type: ignore[attr-defined]
    assert isinstance(backend, SageAttention)
    return backend.means, [layer for pool in own.runner.pools for layer in pool.layers]


def test_means_are_measured_before_the_first_request(path: Path) -> None:
    """Of every layer, the same at each start; and the tables are as empty as without."""
    own, other = opened(path, "sage"), opened(path, "sage")
    (means, layers), (again, others) = means_of(own), means_of(other)
    for layer, twin in zip(layers, others, strict=True):
        kv_heads = layer.shape[1] // 2
        keys = layer[16:16 + TOKENS, :kv_heads].float()
        assert torch.allclose(means(layer), keys.mean(0), atol=1e-4)
        assert torch.equal(means(layer), again(twin))
        assert (keys - means(layer)).norm() < 0.8 * keys.norm()
    assert not own.runner.tables.sequences


def test_tokens_from_all_over_the_vocabulary() -> None:
    for vocab in (199, 49152, 248_320):
        ids = measured_tokens(vocab, TOKENS)
        assert ids.dtype == np.int32 and (ids >= 0).all() and (ids < vocab).all()
        counts, _ = np.histogram(ids, 8, (0, vocab))
        assert counts.min() > 0.8 * TOKENS / 8
