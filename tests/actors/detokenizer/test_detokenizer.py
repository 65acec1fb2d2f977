"""Incremental text: never half a character, and together the same as decoding everything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers_examples import examples
from helpers_text import byte_fallback, byte_level
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actorium.actors.detokenizer.incremental import (
    ByteFallbackDecoder,
    ByteLevelDecoder,
    TokenDecoder,
    WindowedDecoder,
    make,
    take_bytes,
    utf8_tail,
)

LEVEL = byte_level()
FALLBACK = byte_fallback()
BARE = byte_fallback(strip=False)


def maker(tokenizer: Tokenizer, path: Path) -> TokenDecoder:
    tokenizer.save(str(path))
    return make(tokenizer, path)


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenDecoder]:
    base = tmp_path_factory.mktemp("tok")
    return {"level": maker(LEVEL, base / "a.json"), "fallback": maker(FALLBACK, base / "b.json"),
            "bare": maker(BARE, base / "c.json")}


def pieces(detokenizer: TokenDecoder, ids: Sequence[int], skip: bool = True,
           prompt: Sequence[int] = ()) -> list[str]:
    stream = detokenizer.stream(prompt, skip)
    return [stream.push(i) for i in ids] + [stream.flush()]


def test_the_decoder_determines_the_kind(makers: dict[str, TokenDecoder], tmp_path: Path) -> None:
    assert isinstance(makers["level"], ByteLevelDecoder)
    assert isinstance(makers["fallback"], ByteFallbackDecoder) and isinstance(makers["bare"],
                                                                              ByteFallbackDecoder)
    word = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    word.decoder = decoders.WordPiece()
    assert isinstance(maker(word, tmp_path / "w.json"), WindowedDecoder)


@settings(max_examples=examples(120), deadline=None)
@given(ids=st.lists(st.integers(0, LEVEL.get_vocab_size() + 3), max_size=30), skip=st.booleans())
@example(ids=[0xE2, 0x82], skip=True)
@example(ids=[0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3], skip=True)
def test_random_ids_byte_level(makers: dict[str, TokenDecoder], ids: list[int],
                               skip: bool) -> None:
    """Equal to the library's decode for any ids at all, those without a token included."""
    got = "".join(pieces(makers["level"], ids, skip))
    assert got == LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(80), deadline=None)
@given(text=st.text(max_size=40))
@example(text="\U0001f468‍\U0001f469‍\U0001f467 día € ~ é\u0301")
def test_any_text(makers: dict[str, TokenDecoder], text: str) -> None:
    """Whole characters at each step: every prefix of the pieces is a prefix of the text."""
    for name, tokenizer in (("level", LEVEL), ("fallback", FALLBACK), ("bare", BARE)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        said = ""
        for piece in pieces(makers[name], ids, skip=False):
            said += piece
            assert whole.startswith(said)
        assert said == whole


def reference_fallback(tokenizer: Tokenizer, ids: list[int], skip: bool, strip: bool) -> str:
    """Byte runs decoded at once, one U+FFFD for each byte that belongs to no character."""
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    text, run = "", b""

    def close(run: bytes) -> str:
        more, rest = take_bytes(run)
        return more + "\ufffd" * len(rest)

    for i in ids:
        token = tokenizer.id_to_token(i)
        if token is None or (skip and i in special):
            continue
        if len(token) == 6 and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        text += close(run) + token.replace("▁", " ")
        run = b""
    text += close(run)
    return text[1:] if strip and text.startswith(" ") else text


def runs_are_valid(tokenizer: Tokenizer, ids: list[int]) -> bool:
    run = b""
    for token in [*map(tokenizer.id_to_token, ids), "end"]:
        if token and len(token) == 6 and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        elif token:
            try:
                run.decode()
            except UnicodeDecodeError:
                return False
            run = b""
    return True


BYTES = st.integers(1, 256)
PIECES = st.integers(257, FALLBACK.get_vocab_size() + 2)
CHAR = st.characters().map(lambda c: [b + 1 for b in c.encode("utf-8", "replace")])


@settings(max_examples=examples(120), deadline=None)
@given(parts=st.lists(CHAR | PIECES.map(lambda i: [i]) | BYTES.map(lambda i: [i]), max_size=20),
       skip=st.booleans())
@example(parts=[[257], [257]], skip=True)
@example(parts=[[0xE2 + 1, 0x82 + 1], [258]], skip=True)
def test_random_ids_byte_fallback(makers: dict[str, TokenDecoder], parts: list[list[int]],
                                  skip: bool) -> None:
    ids = [i for part in parts for i in part]
    for name, tokenizer in (("fallback", FALLBACK), ("bare", BARE)):
        got = "".join(pieces(makers[name], ids, skip))
        assert got == reference_fallback(tokenizer, ids, skip, strip=name == "fallback")
        visible = [i for i in ids if tokenizer.id_to_token(i) not in
                   ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<unk>")]
        if runs_are_valid(tokenizer, visible):
            assert got == tokenizer.decode(ids, skip_special_tokens=skip)


def test_bytes_wait_for_their_character(makers: dict[str, TokenDecoder]) -> None:
    assert pieces(makers["level"], list("€é".encode())) == ["", "", "€", "", "é", ""]
    assert pieces(makers["level"], [0xE2, 0x41, 0xE2]) == ["", "\ufffdA", "", "\ufffd"]
    bos = FALLBACK.token_to_id("<bos>")
    assert pieces(makers["fallback"], [0xE3, bos, 0x83, 0xAD]) == ["", "", "", "€", ""]
    ids = [b + 1 for b in "€\n".encode()]
    assert pieces(makers["fallback"], ids) == ["", "", "€", "\n", ""]
    assert pieces(makers["fallback"], [*ids[:2], FALLBACK.token_to_id("a"), ids[0]]) == \
        ["", "", "\ufffd\ufffda", "", "\ufffd"]


def test_the_prompt_is_context(makers: dict[str, TokenDecoder]) -> None:
    level, fallback = makers["level"], makers["fallback"]
    assert pieces(level, [0xAC], prompt=[65, 0xE2, 0x82]) == ["€", ""]
    assert pieces(level, [0x42], prompt=list("€".encode())) == ["B", ""]
    hi, bos = FALLBACK.token_to_id("▁hi"), FALLBACK.token_to_id("<bos>")
    assert pieces(fallback, [hi], prompt=[hi]) == [" hi", ""]
    assert pieces(fallback, [hi], prompt=[bos]) == ["hi", ""]
    assert pieces(fallback, [hi], prompt=[]) == ["hi", ""]
    euro = [b + 1 for b in "€".encode()]
    assert pieces(fallback, euro[1:], prompt=[hi, euro[0]]) == ["", "€", ""]
    assert pieces(fallback, [hi], prompt=euro) == [" hi", ""]


@settings(max_examples=examples(50), deadline=None)
@given(text=st.text(min_size=1, max_size=30), cut=st.integers(0, 30))
def test_prompt_and_completion_join_up(makers: dict[str, TokenDecoder], text: str,
                                       cut: int) -> None:
    """decode(prompt) + completion == decode(prompt + completion), wherever it is cut between
    characters."""
    for name, tokenizer in (("level", LEVEL), ("fallback", FALLBACK)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        head, tail = ids[:cut], ids[cut:]
        before = tokenizer.decode(head, skip_special_tokens=False)
        if "\ufffd" not in before:
            got = before + "".join(pieces(makers[name], tail, False, head))
            assert got == tokenizer.decode(ids, skip_special_tokens=False)


def test_special_and_added_tokens(makers: dict[str, TokenDecoder]) -> None:
    ids = [LEVEL.token_to_id(t) for t in ("<bos>", "<tool>", "día €", "<eos>")]
    assert pieces(makers["level"], ids) == ["", "<tool>", "día €", "", ""]
    assert "".join(pieces(makers["level"], ids, skip=False)) == "<bos><tool>día €<eos>"
    assert pieces(makers["level"], [0xE2, ids[0], 0x82, 0xAC]) == ["", "", "", "€", ""]


def test_other_decoders_decode_in_windows(tmp_path: Path) -> None:
    vocab = {t: i for i, t in enumerate(["[UNK]", "un", "##believ", "##able", "story", "!"])}
    word = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    word.decoder = decoders.WordPiece(cleanup=False)
    meta = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "b": 3}, [("▁", "a")]))
    meta.pre_tokenizer = pre_tokenizers.Metaspace()
    meta.decoder = decoders.Metaspace()
    meta.add_special_tokens([AddedToken("<s>", special=True)])
    rng = random.Random(5)
    for tokenizer, size in ((word, 6), (meta, 5)):
        detokenizer = maker(tokenizer, tmp_path / "t.json")
        for _ in range(50):
            ids = [rng.randrange(size) for _ in range(rng.randrange(1, 40))]
            got = "".join(pieces(detokenizer, ids))
            assert got == tokenizer.decode(ids, skip_special_tokens=True)
    text = "".join(pieces(maker(word, tmp_path / "t.json"), [4], prompt=[1, 2, 3]))
    assert text == " story"


def test_helpers() -> None:
    assert utf8_tail(b"a\xe2\x82") == b"\xe2\x82" and utf8_tail("€".encode()) == b""
    assert utf8_tail(b"\xff\xff") == b""
    assert take_bytes(b"a\xffb\xe2") == ("a\ufffdb", b"\xe2")
