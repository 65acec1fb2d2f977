"""What a rank reads of a GGUF file: its rows, or its columns, alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers_gguf import write_model
from helpers_peak import LIBRARIES, peak_of

from actorium.actors.models.gguf_file import read_gguf
from actorium.actors.models.gguf_tensors import GgufPart, checkpoint_tensors
from actorium.gpu.parallel.rank_slices import Span, TensorSlice
from actorium.gpu.weights import gguf_reader
from actorium.gpu.weights.gguf_reader import _tensor
from actorium.gpu.weights.lazy_tensors import LazyTensor
from actorium.gpu.weights.sliced_tensors import sliced
from actorium.kernels.cpu.grouped_native import GroupedMemory, NativeGrouped
from actorium.kernels.cpu.native_library import library

CPU = torch.device("cpu")
SIZES = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2}
HALF = {"q_proj": TensorSlice(0, (Span(256, 512, 256),)),
        "up_proj": TensorSlice(0, (Span(0, 128, 128), Span(384, 512, 128))),
        "down_proj": TensorSlice(1, (Span(256, 512, 256),)),
        "embed_tokens": TensorSlice(0, (Span(0, 99, 99),))}


def parts_of(path: Path) -> dict[str, GgufPart]:
    return {name: part for part in checkpoint_tensors(read_gguf(path)) for name in HALF
            if f"{name}.weight" in part.name}


def lazy(part: GgufPart, keep: bool) -> LazyTensor:
    found = _tensor(part, torch.bfloat16, CPU, keep)
    assert isinstance(found, LazyTensor) and found.cut is not None
    return found


def cut(whole: LazyTensor, own: TensorSlice) -> LazyTensor:
    assert whole.cut is not None
    found = whole.cut(own)
    assert found is not None
    return found


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "F16"])
def test_a_rank_reads_what_it_would_cut_from_the_whole(tmp_path: Path, kind: str,
                                                       keep: bool) -> None:
    """Rows in the order of heads, spans apart, and columns: read, and laid out from the file."""
    path, lib = tmp_path / "m.gguf", library()
    write_model(path, "LlamaForCausalLM", kind, 5, **SIZES)
    for name, part in parts_of(path).items():
        whole, own = lazy(part, keep), HALF[name]
        found, want = cut(whole, own), sliced(name, whole.read(), own)
        assert found.dtype is whole.dtype and torch.equal(found.read(), want)
        assert (found.blocks is None) == (whole.blocks is None) == (not keep or kind == "F16")
        if found.blocks is None:
            continue
        assert torch.equal(found.blocks.rows(), want)
        if lib is not None:
            one, other = (NativeGrouped(rows, None, lib, 1, GroupedMemory())
                          for rows in (found.blocks, want))
            assert torch.equal(one.held, other.held)


@pytest.mark.parametrize(("name", "own"), [
    ("q_proj", TensorSlice(0, (Span(64, 320, 256),))),
    ("down_proj", TensorSlice(1, (Span(16, 272, 256),))),
    ("embed_tokens", TensorSlice(0, (Span(100, 199, 100),)))],
    ids=["within a head", "within a block", "zeros behind it"])
def test_what_the_file_has_in_no_piece_of_its_own(tmp_path: Path, name: str,
                                                  own: TensorSlice) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "LlamaForCausalLM", "Q8_0", 5, **SIZES)
    whole = lazy(parts_of(path)[name], True)
    assert whole.cut is not None and whole.cut(own) is None


def test_no_other_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "m.gguf", []
    write_model(path, "LlamaForCausalLM", "Q8_0", 5, **SIZES)
    fill = gguf_reader.fill
    monkeypatch.setattr(gguf_reader, "fill", lambda fd, to, at: (
        sizes.append(len(to)), fill(fd, to, at))[1])
    for name in ("q_proj", "up_proj"):
        part = parts_of(path)[name]
        sizes.clear()
        cut(lazy(part, True), HALF[name]).read()
        assert sum(sizes) == part.stored.bytes // 2


def test_a_cut_tensor_of_a_short_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "LlamaForCausalLM", "Q8_0", 5, **SIZES)
    part = parts_of(path)["down_proj"]
    found = cut(lazy(part, True), HALF["down_proj"])
    os.truncate(path, part.stored.start + part.stored.bytes - 300)
    with pytest.raises(Exception, match="it ends early"):
        found.read()


HALF_A_MODEL = """
from actorium.actors.models.model_dir import resolve
from actorium.gpu.parallel.rank_group import LoneRank, RankPlace

class Half(LoneRank):  # nobody sums at load
    def __init__(self):
        super().__init__()
        self.place = RankPlace(1, 2)

path = resolve(sys.argv[1])
config = Config(model=ModelConfig(model=sys.argv[1], dtype="bfloat16"))
"""
LOAD = "model = load_model(path, config, torch.device('cpu'), lambda *_: None, Half())"


@pytest.mark.slow
def test_loading_holds_the_rank_s_weights_once(tmp_path: Path) -> None:
    """A rank's peak: its part, and not a whole matrix beside it (32 MB in codes)."""
    if library() is None:
        pytest.skip("no compiler")
    path = tmp_path / "m.gguf"
    write_model(path, "LlamaForCausalLM", "Q8_0", 5, vocab_size=32_000, hidden_size=1024,
                intermediate_size=3072, num_hidden_layers=2, head_dim=64, num_attention_heads=16,
                num_key_value_heads=4, tie_word_embeddings=False)
    planned, peak = peak_of(LOAD, str(path), before=HALF_A_MODEL)
    assert 0.5 * planned < peak < planned + LIBRARIES
