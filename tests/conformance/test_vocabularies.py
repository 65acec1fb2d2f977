"""Vocabularies of published models, from llama.cpp's source package, with the ids that their own
tokenizers give: those made of the GGUF files give the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from actorium.actors.models.gguf_file import read_gguf
from actorium.actors.models.gguf_tokenizer import tokenizer_json

pytestmark = pytest.mark.conformance
FOLDER = Path(__file__).parents[2] / "build" / "llamacpp" / "models"
NOT_SERVED = {"bert-bge"}
"""WordPiece, of models that embed."""
SEPARATOR = b"\n__ggml_vocab_test__\n"
FILES = {file.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp"): file
         for file in sorted(FOLDER.glob("ggml-vocab-*.gguf.inp"))}


def test_they_are_there() -> None:
    """tests/conformance/setup.sh fetches them."""
    assert len(FILES) > 12 and set(FILES) > NOT_SERVED


@pytest.mark.parametrize("name", [name for name in FILES if name not in NOT_SERVED])
def test_ids_are_those_of_the_models_own_tokenizers(name: str) -> None:
    file = FILES[name]
    texts = [text.decode() for text in file.read_bytes().split(SEPARATOR)]
    wanted = file.with_suffix(".out").read_text().splitlines()
    # Some files end with a separator, and say nothing of the text behind it.
    assert len(wanted) > 40 and len(texts) - len(wanted) in (0, 1)
    made = Tokenizer.from_str(json.dumps(tokenizer_json(read_gguf(file.with_suffix("")))))
    for text, ids in zip(texts, wanted, strict=False):
        found = made.encode(text, add_special_tokens=False)
        assert found.ids == [int(one) for one in ids.split()], (name, text)
        assert made.decode(found.ids, skip_special_tokens=False).strip() == text.strip()
