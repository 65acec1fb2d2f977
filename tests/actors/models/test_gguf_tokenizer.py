"""Tokenizers out of GGUF metadata give the ids of those that they were written from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from helpers_gguf import describe, own_cache
from helpers_models import tiny_config
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.detokenizer.incremental import ByteFallbackDecoder, ByteLevelDecoder, make
from actorium.actors.errors import BadModel
from actorium.actors.models.fim_tokens import FimTokens
from actorium.actors.models.gguf_pre import PRE_TOKENIZERS
from actorium.actors.models.model_dir import eos_ids, generation_defaults, read_config, resolve
from actorium.actors.tokenizer.chat_template import load as load_template
from actorium.actors.tokenizer.text_model import TextModel
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer

__all__ = ["own_cache"]
TEXTS = [
    "Hello world", " leading", "trailing ", "two  spaces   three", "\n\nlines\r\n\n  indented\n",
    "I'll, you've, DON'T, it'S", "1", "12", "123", "1234567890", "3.14159, 1,000,000", "x1y22z333",
    "naïve café déjà", "Ελληνικά текст עברית العربية हिन्दी ไทย", "中文字符 日本語 한국어",
    "emoji 🙂👩‍👩‍👧‍👦 🇩🇪", "\u00a0nbsp\u2003em", "tab\tand\u0000nul", "snake_case CamelCase",
    "def f(x):\n    return x**2  # comment", "…—“quotes”", "<|im_start|>user\nhi<|im_end|>\n", "",
    "   ", "e\u0301 combining", "\ud7ff\U0010ffff", "aaaa" * 30,
]
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
PRE: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                       pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    **{name: pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(cut), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        for name, cut in (("qwen2", QWEN2), ("llama-bpe", LLAMA3))},
}
"""As the models' own tokenizer.json has them."""
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
UNUSED = "[PAD7]"


def corpus() -> list[str]:
    here = Path(__file__).parents[3]
    return [*TEXTS, (here / "README.md").read_text(), Path(__file__).read_text()]


def write(path: Path, tokens: list[str], types: list[int], **fields: Any) -> None:
    """A file without tensors but the embedding's."""
    import numpy as np

    config = tiny_config("Qwen2ForCausalLM")
    writer = gguf.GGUFWriter(str(path), fields.pop("arch", "qwen2"))
    describe(writer, config, "qwen2")
    writer.add_tokenizer_model(fields.pop("model"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, number in fields.pop("numbers", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}", number)
    for name, value in fields.items():
        getattr(writer, name)(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def byte_level(pre: str) -> Tokenizer:
    """Trained, with a special token and one that is not."""
    own = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    own.pre_tokenizer = PRE[pre]
    own.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=700, show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    own.add_tokens([AddedToken("snake_", normalized=False)])
    return own


def written(path: Path, own: Tokenizer, pre: str, **fields: Any) -> None:
    by_id = {i: text for text, i in own.get_vocab().items()}
    tokens = [by_id[i] for i in range(len(by_id))] + [UNUSED]
    types = [3] * 3 + [1] * (len(tokens) - 5) + [4, 5]
    merges = [" ".join(pair) for pair in json.loads(own.to_str())["model"]["merges"]]
    write(path, tokens, types, model="gpt2", add_tokenizer_pre=pre, add_token_merges=merges,
          **fields)


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_ids_are_those_it_was_made_of(pre: str, tmp_path: Path) -> None:
    path, own = tmp_path / "m.gguf", byte_level(pre)
    written(path, own, pre)
    found = load_tokenizer(resolve(str(path)))
    for text in TEXTS:
        want = own.encode(text).ids
        assert found.encode(text, add_special_tokens=False).ids == want, text
        assert found.decode(want, skip_special_tokens=False) == text
    assert found.token_to_id(UNUSED) is None
    assert isinstance(make(found, resolve(str(path)) / "tokenizer.json"), ByteLevelDecoder)


@pytest.mark.parametrize("pre", {own.cuts: name for name, own in PRE_TOKENIZERS.items() if
                                 own.bytes}.values())
def test_however_texts_are_cut_nothing_is_lost(pre: str, tmp_path: Path) -> None:
    """Every expression compiles, and ids decode to the text."""
    path, own = tmp_path / "m.gguf", byte_level("gpt-2")
    written(path, own, pre, add_add_bos_token=False)
    found = load_tokenizer(resolve(str(path)))
    for text in TEXTS:
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(("pre", "text", "parts"), [
    ("deepseek-llm", "a1234\n\nb! \u4e2d\u6587",
     ["a", "1234", "\n", "\n", "b", "!", " ", "\u4e2d\u6587"]),
    ("deepseek-coder", "a12 b, c", ["a", "1", "2", " b", ",", " c"]),
    ("falcon", "x=12345`` y", ["x", "=", "123", "45", "``", " y"]),
    ("superbpe", "1234567 ab cd", ["1", "234", "567", " ab cd"]),
    ("afmoe", "x1234567 890", ["x", "1", "234", "567", " ", "890"]),
    ("tiny_aya", "12345 a", ["12", "345", " a"]),
    ("kimi-k2", "\u4f60\u597dabC \u4e2d", ["\u4f60\u597d", "ab", "C", " ", "\u4e2d"]),
    ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
    ("seed-coder", "a!\n12", ["a", "!", "\n", "1", "2"]),
    ("qwen2", "a!\n12", ["a", "!\n", "1", "2"]),
    ("laguna", "a  \n\nb's", ["a", "  ", "\n\n", "b", "'s"]),
    ("ufakzeka", "b's", ["b", "'s"]), ("viking", "a, b12", ["a", ",", " b", "1", "2"]),
    ("bloom", "a, b12", ["a", ",", " b12"]), ("minicpm5", "1234", ["123", "4"]),
    ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
    ("exaone-moe", "ab cd", ["ab cd"]), ("talkie", "aB's 1234", ["a", "B's", " ", "123", "4"]),
    ("youtu", "\u3042\uff01a", ["\u3042", "\uff01", "a"]),
    ("chameleon", "a1\t", ["a", "1", "\t"]), ("spark2_5", "a!\n", ["a", "!", "\n"]),
])
def test_how_texts_are_cut(pre: str, text: str, parts: list[str]) -> None:
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated")
                                   for one in PRE_TOKENIZERS[pre].cuts])
    assert [part for part, _ in cut.pre_tokenize_str(text)] == parts


def test_tokens_that_are_spelt_as_sentencepieces_with_merges(tmp_path: Path) -> None:
    """Gemma 4's kind: no cuts, spaces and bytes as SentencePiece has them."""
    octets = [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["<pad>", "<eos>", "<bos>", *octets, *"ab\u2581\n", "ab", "\u2581a", "\n\n",
              "\u2581ab"]
    merges = ["a b", "\u2581 a", "\n \n", "\u2581 ab"]
    path = tmp_path / "m.gguf"
    write(path, pieces, [3] * 3 + [6] * 256 + [1] * 8, model="gemma4", add_token_merges=merges,
          add_bos_token_id=2, add_eos_token_id=1)
    found = load_tokenizer(resolve(str(path)))
    ids = [pieces.index(one) for one in ("ab", "\u2581ab", "\n\n", "<0xC3>", "<0xA9>")]
    assert found.encode("ab ab\n\n\xe9").ids == [2, *ids]
    assert found.decode(ids) == "ab ab\n\n\xe9"


def test_what_is_served_is_called_by_the_files_name(tmp_path: Path) -> None:
    path, own = tmp_path / "Some-Model.Q4_K_M.gguf", byte_level("qwen2")
    written(path, own, "qwen2", add_eos_token_id=2)
    model = TextModel(Config(model=ModelConfig(model=str(path))))
    assert model.info()["model"] == "Some-Model.Q4_K_M"
    assert model.encode("Hello", False, "prompt").tolist() == own.encode("Hello").ids
    assert model.facts.eos_ids == (2, 0)


def test_ends_templates_and_defaults(tmp_path: Path) -> None:
    path, own = tmp_path / "m.gguf", byte_level("qwen2")
    written(path, own, "qwen2", add_bos_token_id=1, add_eos_token_id=2, add_add_bos_token=True,
            add_chat_template=CHAT, add_sampling_temp=0.5, add_sampling_top_k=7)
    folder = resolve(str(path))
    found = load_tokenizer(folder)
    assert found.encode("Hello").ids == [1, *own.encode("Hello").ids]
    assert eos_ids(read_config(folder), {}) == (2, 0), "<|endoftext|> ends a turn, too"
    template = load_template(folder, None).pick(None, False)
    assert template is not None and template.source == CHAT
    assert template.special["eos_token"] == "<|im_end|>"
    assert generation_defaults(folder) == {"temperature": 0.5, "top_k": 7}


def test_tokens_for_filling_in_are_those_that_the_file_names(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    written(path, byte_level("qwen2"), "qwen2", numbers={
        "fim_pre_token_id": 1, "fim_suf_token_id": 2, "fim_mid_token_id": 4, "fim_sep_token_id": 5})
    model = TextModel(Config(model=ModelConfig(model=str(path))))
    assert model.fim == FimTokens(prefix=1, suffix=2, middle=4, file=5)
    assert model.info()["fim_tokens"].ends == [5]


def test_named_templates(tmp_path: Path) -> None:
    path, own = tmp_path / "m.gguf", byte_level("qwen2")
    named = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": "{{ tools }}"}]
    written(path, own, "qwen2", add_eos_token_id=2, add_chat_template=named)
    found = load_template(resolve(str(path)), None)
    for tools, want in ((False, CHAT), (True, "{{ tools }}")):
        template = found.pick(None, tools)
        assert template is not None and template.source == want


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("text", ["<end_of_turn>", "<|flush|>", "<|calls|>", "</s>", "<turn|>",
                                  "<|tool_response>", "[e~[", "<|fim_pad|>", "<|file_sep|>"])
def test_ends_of_another_type_end_a_turn_and_are_one_token(
        text: str, kind: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, own = tmp_path / "m.gguf", byte_level("qwen2")
    by_id = {i: text for text, i in own.get_vocab().items()}
    end = len(by_id)
    merges = [" ".join(pair) for pair in json.loads(own.to_str())["model"]["merges"]]
    write(path, [*(by_id[i] for i in range(end)), text], [*[3] * 3, *[1] * (end - 3), kind],
          model="gpt2", add_tokenizer_pre="qwen2", add_token_merges=merges, add_eos_token_id=0)
    folder = resolve(str(path))
    assert eos_ids(read_config(folder), {}) == (0, 2, end)
    found = load_tokenizer(folder)
    assert found.encode(f"a{text}b").ids == [*own.encode("a").ids, end, *own.encode("b").ids]
    assert found.decode([*own.encode("a").ids, end]) == "a", "its text is not shown"
    assert f"{text}: no control tokens" in caplog.text


def test_known_texts_that_mean_something_else(tmp_path: Path) -> None:
    """`</s>` is a tag beside `<eos>`; `<|end|>` ends a message beside what ends an answer."""
    own = byte_level("qwen2")
    by_id = {i: text for text, i in own.get_vocab().items()}
    count = len(by_id)
    merges = [" ".join(pair) for pair in json.loads(own.to_str())["model"]["merges"]]
    for i, (others, ends) in enumerate({
            ("</s>", "<eos>"): (count + 1,), ("<|end|>", "<|return|>", "<|call|>"):
            (count + 1, count + 2), ("<|end|>", "<|return|>"): (count, count + 1)}.items()):
        path = tmp_path / f"{i}.gguf"
        write(path, [*(by_id[i] for i in range(count)), *others],
              [*[3] * 3, *[1] * (count - 3 + len(others))], model="gpt2",
              add_tokenizer_pre="qwen2", add_token_merges=merges)
        assert eos_ids(read_config(resolve(str(path))), {}) == (0, 2, *ends)


def sentencepiece() -> tuple[list[str], list[int], list[float]]:
    """(tokens, types, scores) as Llama's: control tokens, bytes, then pieces by their scores."""
    own = Tokenizer(models.BPE())
    own.train_from_iterator([text.replace(" ", "▁") for text in corpus()], trainers.BpeTrainer(
        vocab_size=600, show_progress=False, max_token_length=12))
    alphabet = [text for text in own.get_vocab() if len(text) == 1]
    merged = sorted((text for text in own.get_vocab() if len(text) > 1),
                    key=lambda text: own.get_vocab()[text])
    octets = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, *merged, *alphabet]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(alphabet))]
    return tokens, types, [*[0.0] * 259, *(float(-i) for i in range(len(tokens) - 259))]


def llama_cpp(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Its algorithm: of all neighbours that make a token, those of the highest score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        best = max(((scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(
            parts, parts[1:], strict=False)) if a + b in ids), default=None)
        if best is None:
            break
        at = -best[1]
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


def test_sentencepiece_ids_are_those_of_the_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens, types, scores = sentencepiece()
    write(path, tokens, types, model="llama", add_token_scores=scores, add_bos_token_id=1,
          add_eos_token_id=2, add_unk_token_id=0)
    folder = resolve(str(path))
    found = load_tokenizer(folder)
    for text in TEXTS:
        ids = llama_cpp(text, tokens, scores)
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.encode(text).ids == [1, *ids]
        assert found.decode(ids) == text
    assert found.encode("a</s>b", add_special_tokens=False).ids == [
        *llama_cpp("a", tokens, scores), 2, *llama_cpp("b", tokens, scores)]
    assert isinstance(make(found, folder / "tokenizer.json"), ByteFallbackDecoder)


def test_gemma_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """Its merges go by the order of tokens, pieces of spaces are spaces in the file."""
    from transformers import GemmaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    path = tmp_path / "m.gguf"
    tokens, _, _ = sentencepiece()
    pieces = [token for token in tokens[3:] if token.strip("▁")] + ["▁"]
    runs = ["▁" * count for count in range(2, 6)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", *runs, *pieces]
    types = [3, 3, 3, 2, 3, *[4] * 4, *(6 if t.startswith("<0x") else 1 for t in pieces)]
    write(path, [t.replace("▁", " ") if t in runs else t for t in tokens], types, arch="gemma3",
          model="llama", add_token_scores=[0.0] * len(tokens), add_bos_token_id=2,
          add_eos_token_id=1, add_unk_token_id=3, add_add_space_prefix=False)
    vocab = {token: i for i, token in enumerate(tokens)}
    plain = {t: -i for i, (t, kind) in enumerate(zip(tokens, types, strict=True))
             if kind in (1, 4)}
    want = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab, plain))
    found = load_tokenizer(resolve(str(path)))
    for text in TEXTS:
        assert found.encode(text, add_special_tokens=False).ids == want.encode(
            text, add_special_tokens=False), text


@pytest.mark.parametrize("kind", [1, 4])
def test_gemmas_end_of_turn_of_another_type(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens, types, _ = sentencepiece()
    tokens, types = [*tokens, "<end_of_turn>", "<eos>"], [*types, kind, 3]
    write(path, tokens, types, arch="gemma3", model="llama", add_bos_token_id=1,
          add_token_scores=[0.0] * len(tokens), add_eos_token_id=len(tokens) - 1)
    model = TextModel(Config(model=ModelConfig(model=str(path))))
    end = len(tokens) - 2
    assert model.facts.eos_ids == (end + 1, end)
    assert end in model.encode("Hello<end_of_turn>", False, "prompt")
    assert model.decode([end], True) == ""


@pytest.mark.parametrize(("fields", "why"), [
    *(({"model": own}, f"'{own}' is not served; served are gpt2, llama, gemma4") for own in (
        "t5", "rwkv", "plamo2", "hybriddna", "whitespace")),
    ({"model": "gpt2", "add_tokenizer_pre": "whitespace", "add_token_merges": ["a b"]},
     "'whitespace' is not served"),
    ({"model": "gpt2", "add_tokenizer_pre": "nobody", "add_token_merges": ["a b"]}, "'nobody'"),
    ({"model": "gpt2", "add_tokenizer_pre": "gpt-2"}, "tokenizer.ggml.merges"),
    ({"model": "llama"}, "tokenizer.ggml.scores"),
    ({"model": "llama", "add_token_scores": [float("nan")] * 4}, "finite numbers"),
    ({"model": "llama", "add_token_scores": [0.0] * 4, "add_bos_token_id": 9},
     "outside the vocabulary"),
])
def test_what_is_not_served_is_named(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, ["a", "b", "ab", "c"], [1] * 4, **fields)
    with pytest.raises(BadModel, match=why):
        resolve(str(path))


def test_a_cut_that_is_not_named_is_warned_of(tmp_path: Path,
                                              caplog: pytest.LogCaptureFixture) -> None:
    """Texts are cut as llama.cpp's default has it."""
    write(tmp_path / "m.gguf", ["a", "b", "ab", "c"], [1] * 4, model="gpt2",
          add_token_merges=["a b"])
    resolve(str(tmp_path / "m.gguf"))
    assert "no tokenizer.ggml.pre: texts are cut as llama.cpp's default" in caplog.text
    caplog.clear()
    write(tmp_path / "n.gguf", ["a", "b", "ab", "c"], [1] * 4, model="gpt2",
          add_tokenizer_pre="gpt-2", add_token_merges=["a b"])
    resolve(str(tmp_path / "n.gguf"))
    assert "tokenizer.ggml.pre" not in caplog.text


def test_tokens_with_one_text_and_without_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for tokens, types, why in ((["a", "b", "a"], [1] * 3, "'a' is there twice"),
                               (["a", "b", "c"], [1], "1 types of 3 tokens")):
        write(path, tokens, types, model="llama", add_token_scores=[0.0] * 3)
        with pytest.raises(BadModel, match=why):
            resolve(str(path))
