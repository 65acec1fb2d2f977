"""A model directory of a stranger: read, or refused in one line; never run, never waited for."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import Cli
from helpers_mutations import (
    ODD,
    READERS,
    chat,
    copy_of,
    demo,
    detokenize,
    opened,
    outcome,
    outcomes,
    places,
    plan,
    replaced,
    text,
    weights,
)
from helpers_runtime import short_dir

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.errors import EngineUnavailable
from actorium.actors.messages import ChatMessage
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.tokenizer.chat_template import ChatTemplate

EXTRA = (
    "head_dim", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "max_window_layers", "attention_bias", "partial_rotary_factor", "num_experts",
    "num_experts_per_tok", "mlp_only_layers", "text_config", "quantization_config", "auto_map",
    "full_attention_interval", "torch_dtype", "n_positions", "trust_remote_code")
"""Fields that the packaged model's config.json does not have."""
OTHERS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "special_tokens_map.json", "chat_template.jinja", "model.safetensors",
          "model.safetensors.index.json")


def refused(path: Path, *readers: Callable[[Path], None]) -> None:
    """Each of them refuses it, naming a file or a field."""
    for read, line in zip(readers, outcomes(readers, path), strict=True):
        assert line and not line.startswith("BAD"), f"{read.__name__}: {line or 'was read'}"


def held(path: Path, *readers: Callable[[Path], None], what: object = "") -> None:
    """Each of them reads it, or refuses it."""
    for read, line in zip(readers, outcomes(readers, path), strict=True):
        assert not line.startswith("BAD"), f"{read.__name__}, {what}: {line}"


def json_of(name: str) -> Any:
    return json.loads((DEMO_MODEL / name).read_text())


@pytest.mark.mended("a billion layers, positions of 10^18, numbers beyond float and lists of lists "
                    "in config.json ended plan and worker by MemoryError, OverflowError or "
                    "TypeError")
def test_values_of_config_json(tmp_path: Path, tried: Any, amount: Any) -> None:
    path, config = demo(tmp_path), json_of("config.json")
    kinds = [(at, new) for at in places(config) for new in (*ODD, KeyError)]
    kinds += [((name,), new) for name in EXTRA for new in ODD]
    known = [(("num_hidden_layers",), 10**9), (("max_position_embeddings",), 10**18),
             (("rms_norm_eps",), 10**400), (("layer_types",), [[]] * 4), (("dtype",), [1]),
             (("rope_parameters",), [1]), (("hidden_size",), 10**400)]
    chosen = random.Random(1).sample(kinds, amount(3, 150))
    for at, new in known + chosen:
        (path / "config.json").write_text(json.dumps(replaced(config, at, new)))
        held(path, plan, text, weights, what=(at, str(new)[:40]))
        tried(3)


@pytest.mark.mended("a config.json nested 10,000 deep or of 100 MB was read whole, and the worker "
                    "died of a RecursionError")
@pytest.mark.slow
def test_config_json_that_is_none(tmp_path: Path, tried: Any) -> None:
    path = demo(tmp_path)
    deep = b'{"text_config":' * 10_000 + b"{}" + b"}" * 10_000
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe{", b"\xef\xbb\xbf{}", deep, b"[" * 100_000,
                 b'{"a": NaN}', b'{"x":"\\ud800"}', b'{"x":"' + b"a" * (100 << 20) + b'"}'):
        (path / "config.json").write_bytes(data)
        refused(path, plan, text, weights)
        tried(3)


def test_no_code_of_the_directory_is_run(tmp_path: Path, tried: Any) -> None:
    """Its Python files, those that `auto_map` names, and a pickle under any name."""
    path, marker = demo(tmp_path), tmp_path / "marker"
    for name in ("modeling.py", "tokenizer.py", "__init__.py", "sitecustomize.py", "torch.py"):
        (path / name).write_text(f"open({str(marker)!r}, 'w')")
    custom = {"auto_map": {"AutoConfig": "modeling.C", "AutoTokenizer": ["tokenizer.T", None]},
              "trust_remote_code": True, "tokenizer_class": "../../tokenizer.T"}
    for name in ("config.json", "tokenizer_config.json"):
        (path / name).write_text(json.dumps(json_of(name) | custom))
    held(path, *READERS)
    held_pickle = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for name in ("pytorch_model.bin", "model.safetensors", "tokenizer.json", "config.json"):
        (path / name).write_bytes(held_pickle)
        held(path, *READERS)
        tried(4)
    assert not marker.exists()


@pytest.mark.mended("a fifo or /dev/zero as config.json, generation_config.json or "
                    "tokenizer_config.json hung the actors or took their memory; a link to any "
                    "file of the machine was read, and served as the chat template")
@pytest.mark.parametrize("name", OTHERS)
def test_files_that_are_something_else(tmp_path: Path, tried: Any, amount: Any,
                                       name: str) -> None:
    path = demo(tmp_path)
    if name.endswith("index.json"):
        (path / "model.safetensors").unlink()
    secret = tmp_path / "secret"
    secret.write_text("top secret")
    other = path / name

    def listen() -> None:
        # by a short name: addresses have 108 bytes
        with short_dir() as base, socket.socket(socket.AF_UNIX) as made:
            made.bind(str(base / "s"))
            os.rename(base / "s", other)

    kinds: list[Callable[[], None]] = [
        lambda: os.mkfifo(other), lambda: other.symlink_to("/dev/zero"),
        lambda: other.symlink_to(secret), other.mkdir, listen,
        lambda: other.symlink_to("/dev/tty"), lambda: other.symlink_to("../secret"),
        lambda: other.symlink_to(name)]
    readers = READERS[1::2] if amount(1, 0) else READERS
    for make in kinds[:amount(3, len(kinds))]:
        if other.is_file() and not other.is_symlink():
            other.unlink()
        make()
        lines = outcomes(readers, path)
        assert not any(line.startswith("BAD") or "secret\n" in line for line in lines), lines
        assert any(lines), "was read"
        tried(len(lines))
        if other.is_dir() and not other.is_symlink():
            other.rmdir()
        else:
            other.unlink()


def test_links_within_a_snapshot_of_the_cache(tmp_path: Path, tried: Any) -> None:
    """As huggingface_hub lays them out: to ../../blobs of the same repository, nowhere else."""
    repo = tmp_path / "models--org--name"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in DEMO_MODEL.iterdir():
        shutil.copy(file, blobs / f"{len(file.name)}-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/{len(file.name)}-{file.name}")
    assert outcomes(READERS, snapshot) == [""] * len(READERS)
    tried(len(READERS))
    beside = tmp_path / "models--org--other" / "blobs"
    beside.mkdir(parents=True)
    shutil.copy(DEMO_MODEL / "config.json", beside / "c")
    for target in ("../../../models--org--other/blobs/c", beside / "c"):
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        assert "config.json is a link that leads out" in outcome(text, snapshot)
        tried()


# --- safetensors ---------------------------------------------------------------------------------

def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + size]), data[8 + size:]


def write(file: Path, header: Any, body: bytes, size: int | None = None) -> None:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(head) if size is None else size) + head + body)


@pytest.mark.mended("an error named all 100,000 dimensions of a tensor, and printed control "
                    "characters of its name")
def test_headers_of_safetensors(tmp_path: Path, tried: Any, amount: Any) -> None:
    path = demo(tmp_path)
    file = path / "model.safetensors"
    header, body = header_of(file)
    name = "model.norm.weight"
    own = header[name]
    start, end = own["data_offsets"]
    sizes: list[Any] = [2**63, 2**64 - 1, 0, 1, 10**8, 10**8 + 1, len(body)]
    for size in sizes[:amount(4, len(sizes))]:
        write(file, header, body, size)
        refused(path, weights)
        tried()
    entries: list[dict[str, Any]] = [
        {"shape": own["shape"] + [1] * 100_000}, {"shape": [2**32, 2**32]},
        {"data_offsets": [start + 2, end + 2]}, {"data_offsets": [end, start]},
        {"data_offsets": [-1, end]}, {"data_offsets": [10**18, 10**18 + end - start]},
        {"shape": [0]}, {"shape": [-1]}, {"shape": "x"}, {"shape": []}, {"dtype": "I64"},
        {"dtype": "X"}, {"dtype": None}, {"dtype": "F8_E4M3"}, {"data_offsets": [0]},
        {"data_offsets": None}, {"shape": [2**63, 2]}]
    for entry in entries[:amount(4, len(entries))]:
        write(file, header | {name: own | entry}, body)
        refused(path, weights)
        tried()
    nothing = {"dtype": "BF16", "shape": [0], "data_offsets": [len(body)] * 2}
    whole: list[Any] = [
        b'{"a":' * 100_000, b"[]", header | {"__metadata__": 3},
        {key: value for key, value in header.items() if key != name}]
    for wrong in whole:
        write(file, wrong, body)
        refused(path, weights)
        tried()
    for odd in (header | {"a\n\x1b[31m": nothing}, header | {"x" * 10_000: nothing},
                header | {"__metadata__": {"format": "tf"}},
                header | {f"e{i}": nothing for i in range(amount(1000, 200_000))}):
        write(file, odd, body)
        held(path, weights)
        tried()


@pytest.mark.mended("a shard's name of 5,000 characters, or with half a surrogate, ended the "
                    "worker by an exception")
def test_indices(tmp_path: Path, tried: Any, amount: Any) -> None:
    path = demo(tmp_path)
    index = path / "model.safetensors.index.json"
    for file in ("../../etc/passwd", "/etc/passwd", "x", ".", "..", "", None, "a\0b", "x" * 5000,
                 "\ud800", "config.json", "model.safetensors.index.json", 5, ["x"]):
        index.write_text(json.dumps({"weight_map": {"a": file}, "metadata": {"total_size": -1}}))
        refused(path, weights)
        held(path, plan)
        tried(2)
    for wrong in ([], None, {}, {f"t{i}": f"s{i}" for i in range(amount(20_000, 300_000))}):
        index.write_text(json.dumps({"weight_map": wrong}))
        refused(path, weights)
        tried()
    for total in (-5, 10**400, 1.5, "x", True, None):
        index.write_text(json.dumps({"weight_map": {"a": "x"}, "metadata": {"total_size": total}}))
        held(path, plan)
        tried()


def test_a_file_that_shrinks_while_it_is_served(tmp_path: Path, tried: Any) -> None:
    """The worker has it mapped, where its tensors have addresses that torch's products want, and
    dies of SIGBUS; the engine ends by that in one line, at once."""
    path = demo(tmp_path)
    weights = path / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    more = -(8 + size) % 64
    weights.write_bytes((size + more).to_bytes(8, "little") + data[8:8 + size] + b" " * more
                        + data[8 + size:])
    with short_dir() as base:
        cli = Cli(str(base))
        with cli.serve(str(path), "--device", "cpu", "--kernels", "torch",
                       "--no-restart") as process:
            os.truncate(weights, 5000)
            with pytest.raises(EngineUnavailable), Client(str(base / cli.entries()[0])) as client:
                client.generate("hello", SamplingParams(max_tokens=8))
            _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and b"SIGBUS" in said.splitlines()[-1], said
    tried()


@pytest.mark.mended("lists of modules that are none, in quantization_config, ended plan and worker "
                    "by a TypeError")
def test_lies_about_quantisation(tmp_path: Path, tried: Any) -> None:
    path, config = demo(tmp_path), json_of("config.json")
    fp8 = {"quant_method": "fp8"}
    for lie in (fp8, fp8 | {"weight_block_size": [128, 128]}, fp8 | {"weight_block_size": [0, 0]},
                fp8 | {"weight_block_size": [128]}, fp8 | {"weight_block_size": "x"},
                fp8 | {"fmt": [1]}, fp8 | {"ignore": [1]}, fp8 | {"ignore": 5},
                fp8 | {"ignore": {}}, {"quant_method": [1]}, {"bits": 4}, [1], "x", 5,
                fp8 | {"ignore": ["x" * 10_000] * 1000}):
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": lie}))
        held(path, plan, weights, what=str(lie)[:60])
        tried(2)


# --- tokenizers ----------------------------------------------------------------------------------

def replace(content: str, pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(expression: str) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": expression},
                              "behavior": "Isolated", "invert": False}}


GROWS = {"type": "Sequence", "normalizers": [replace("a" * 10, {"String": "a"})] * 12}
SPECIAL = {"SpecialToken": {"id": "X", "type_id": 0}}
REFUSED: dict[str, dict[str, Any]] = {
    "a charsmap that is none": {"normalizer": {"type": "Precompiled",
                                               "precompiled_charsmap": "AAAA"}},
    "a charsmap of four gigabytes": {"normalizer": {"type": "Precompiled",
                                                    "precompiled_charsmap": "/////////////w=="}},
    "a terabyte of a word": {"normalizer": GROWS},
    "a prefix of ten megabytes": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**7}},
    "a catastrophic expression": split(r"(a+)+$"),
    "a catastrophic normalizer": {"normalizer": replace("b", {"Regex": r"(a+)+$"})},
    "an unknown token that is none": {"model": {"type": "WordLevel", "unk_token": "[UNK]",
                                                "vocab": {"a": 0}}},
    "a special token that is none": {"post_processor": {
        "type": "TemplateProcessing", "single": [SPECIAL], "pair": [], "special_tokens": {}}},
    "a decoder that grows": {"decoder": {
        "type": "Sequence", "decoders": [replace("a" * 10, {"String": "a"})] * 12}},
    "an added token of a megabyte": {"added_tokens": [{
        "id": 1919, "content": "a" * 10**6, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True}]},
}


@pytest.mark.mended("tokenizer.json could abort, panic or fill the memory of tokenizer and "
                    "detokenizer: a SentencePiece table with a false length, replacements that "
                    "grow a word to a terabyte, expressions that never end, an unknown token that "
                    "is none")
@pytest.mark.parametrize("what", REFUSED)
def test_tokenizers_that_are_refused(tmp_path: Path, tried: Any, what: str) -> None:
    path = demo(tmp_path)
    (path / "tokenizer.json").write_text(json.dumps(json_of("tokenizer.json") | REFUSED[what]))
    for line in outcomes((text, detokenize), path):
        assert "tokenizer.json" in line and not line.startswith("BAD"), line
        tried()


@pytest.mark.mended("a named list of templates whose name is a list ended the tokenizer by a "
                    "TypeError, a temperature of 10^400 by an OverflowError; a template of "
                    "megabytes was compiled for minutes")
@pytest.mark.slow
def test_values_of_the_other_files(tmp_path: Path, tried: Any, amount: Any) -> None:
    path, rng = demo(tmp_path), random.Random(2)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for name in names:
        whole = json_of(name)
        known = [replaced(whole, (at,), new) for at, new in {
            "chat_template": [{"name": [], "template": "x"}], "eos_token": "x" * 10**6,
            "eos_token_id": 99_999}.items()] if name == "tokenizer_config.json" else []
        if name == "generation_config.json":
            known += [whole | {"temperature": new} for new in (10**400, -10**400, 1e300)]
        found = list(places(whole))
        known += [replaced(whole, rng.choice(found), rng.choice((*ODD, KeyError)))
                  for _ in range(amount(4, 60))]
        for wrong in known:
            (path / name).write_text(json.dumps(wrong))
            held(path, text, detokenize, what=name)
            tried(2)
        shutil.copy(DEMO_MODEL / name, path / name)
    for template in ("{{ 'a' ~ 'b' }}" * 100_000, "x" * (20 << 20), "{{", "{% x %}", "(" * 10**5,
                     "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"):
        (path / "chat_template.jinja").write_text(template)
        held(path, text, what=template[:20])
        tried()


DOUBLED = "{% set n = namespace(s=%s) %}{% for i in range(50) %}{% set n.s = "
BOMBS = (
    *(DOUBLED.replace("%s", start) + step + " %}{% endfor %}" + end for start, step, end in (
        ("'aaaa'", "n.s ~ n.s", "{{ n.s|length }}"), ("'aaaa'", "n.s + n.s", "{{ n.s|length }}"),
        ("'a'", "[n.s, n.s]", "{{ n.s }}"), ("'a'", "[n.s, n.s]", "{{ n.s|tojson }}"),
        ("'a'", "{1: n.s, 2: n.s}", "{{ n.s|string }}"), ("9", "n.s * n.s", "{{ n.s }}"),
        ("'a'", "[n.s, n.s]", "{{ [n.s]|join }}"), ("[1]", "n.s + n.s", "{{ n.s|length }}"))),
    "{{ 'a'|center(10000000000) }}", "{{ messages[0].content.center(10000000000) }}",
    "{{ messages[0]['cont' ~ 'ent']['cen' ~ 'ter'](10000000000) }}",
    "{{ '%10000000000d' % 1 }}", "{{ '{:10000000000}'.format(1) }}",
    "{{ '%10000000000d'|format(1) }}", "{{ lipsum(n=1000000) }}", "{{ 'a'|indent(10000000000) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}", "{{ [1]|slice(1000000000)|list }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).join(['b'] * 100000) }}", "{{ (['b'] * 100000)|join('a' * 100000) }}",
    "{{ {'a': [1]}|tojson(indent=10000000000) }}", "{{ ['a']|map('center', 10000000000)|list }}",
    "{{ 'a'|attr('center')(10000000000) }}", "{{ 'a'.zfill(10000000000) }}",
    "{% for i in range(19000) %}{{ range(100000)|list|length }}{% endfor %}",
    "{{ range(100000)|list|length }}" * 4000, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}", "{{ raise_exception('no') }}",
    "{{ messages.append(1) }}", "{{ strftime_now('%1000000Y') }}")


@pytest.mark.mended("a model's chat template was rendered beside all requests with nothing but its "
                    "loops bounded: texts doubled by ~ or +, a width for center, format or indent, "
                    "took the tokenizer's memory, also while it was compiled")
def test_templates_that_take_all_memory_or_time(tmp_path: Path, tried: Any, amount: Any) -> None:
    """Within the actor; what is refused there, a process of its own tries, within its bounds."""
    path = demo(tmp_path)
    for template in BOMBS[::amount(4, 1)]:
        (path / "chat_template.jinja").write_text(template)
        held(path, chat, what=template[:80])
        tried()


def test_templates_mean_what_they_did() -> None:
    """The operators and filters that are looked after."""
    template = ChatTemplate(
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ loop.index ~ m.role"
        " + ':' ~ (m.content|replace('l', 'L', 1)) %}{% endfor %}{{ n.t }} {{ ['a', 1, none]|join("
        "'-') }} {{ '+'.join(['x', 'y']) }} {{ [{'a': {'b': 1}}]|join(',', attribute='a.b') }} "
        "{{ 'aaa'.replace('a', 'b', 2) }} {{ {'k': 'é'}|tojson }} {{ 3 * 4 + 1 }} {{ 'ab' * 2 }} "
        "{{ [1] + [2] }} {{ 'x' ~ undefined ~ 1.5 ~ [1] }} {{ 7 % 4 }} {{ 'a'|string }}", {})
    for ticks in (20_000, 200_000):
        assert template.render([ChatMessage("user", "hello")], {}, None, ticks) == (
            '1user:heLlo a-1-None x+y 1 bba {"k": "é"} 13 abab [1, 2] x1.5[1] 3 a')


def test_ends_of_sequence(tmp_path: Path, tried: Any) -> None:
    path = demo(tmp_path)
    for foreign in (99_999, [2, 5000], -1):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": foreign}))
        held(path, text)
        tried()
    for wrong in (list(range(1000)), 2**40, [None], "x", {"a": 1}, [[2]]):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        refused(path, text)
        tried()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2] * 10**6}))
    held(path, text)
    tried()


# --- any byte ------------------------------------------------------------------------------------

@pytest.mark.slow
def test_bytes_flipped_and_cut(tmp_path: Path, tried: Any, amount: Any) -> None:
    """Of each file; of the weights the header, since other numbers are other numbers."""
    path, rng = demo(tmp_path), random.Random(3)
    for file in sorted(DEMO_MODEL.iterdir()):
        data = file.read_bytes()
        head = min(len(data), 8 + int.from_bytes(data[:8], "little")) \
            if file.suffix == ".safetensors" else len(data)
        readers = [weights] if file.suffix == ".safetensors" else [text, detokenize]
        if file.name == "config.json":
            readers = [plan, text, weights]
        for _ in range(amount(4, 40)):
            wrong = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                wrong[rng.randrange(head)] = rng.randrange(256)
            if rng.random() < 0.2:
                del wrong[rng.randrange(len(wrong)):]
            (path / file.name).write_bytes(wrong)
            held(path, *readers, what=file.name)
            tried(len(readers))
        shutil.copy(file, path / file.name)


@pytest.mark.mended("weights of nan gave token 0 to everybody, as if it were an answer")
def test_weights_that_are_no_numbers(tmp_path: Path, tried: Any, amount: Any) -> None:
    for i, (number, name) in enumerate((
            (b"\xc0\x7f", "model.norm.weight"), (b"\x80\x7f", "model.norm.weight"),
            (b"\xc0\xff", "model.layers.0.mlp.up_proj.weight"),
            (b"\x80\xff", "model.embed_tokens.weight"))[:amount(2, 4)]):
        path = copy_of(DEMO_MODEL, tmp_path / str(i))
        header, body = header_of(path / "model.safetensors")
        start, end = header[name]["data_offsets"]
        wrong = body[:start] + number * ((end - start) // 2) + body[end:]
        write(path / "model.safetensors", header, wrong)
        line = outcome(opened, path)
        assert "nan or infinite" in line and not line.startswith("BAD"), line
        tried()


# --- whole engines -------------------------------------------------------------------------------

def test_serve_ends_in_one_line_with_code_2(tmp_path: Path, tried: Any, amount: Any) -> None:
    """As a user sees it, whichever actor finds it."""
    config, tokenizer = json_of("config.json"), json_of("tokenizer.json")
    wrong: list[tuple[str, Any]] = [
        ("config.json", config | {"num_hidden_layers": 10**9}),
        ("tokenizer.json", tokenizer | REFUSED["a charsmap of four gigabytes"]),
        ("config.json", config | {"max_position_embeddings": 2**31 - 1}),
        ("generation_config.json", {"eos_token_id": "end"}),
        ("tokenizer_config.json", {"chat_template": "{{"})]
    for i, (name, content) in enumerate(wrong[:amount(1, len(wrong))]):
        path = copy_of(DEMO_MODEL, tmp_path / str(i))
        (path / name).write_text(json.dumps(content))
        with short_dir() as base:
            done = Cli(str(base)).run("serve", str(path), "--no-http", "--device", "cpu")
        lines = done.stderr.decode().splitlines()
        assert done.returncode == 2 and "Traceback" not in lines, done.stderr
        keys = (name, "max_model_len", "eos_token_id", "chat_template")
        assert any(key in lines[-1] for key in keys), done.stderr
        tried()
