"""What GGUF files say of encoders beside their keys."""

from __future__ import annotations

from actorium.actors.models.gguf_fields import layer_types
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_keys import Config


def bert_fields(file: GgufFile, at: str, _: Config) -> Config:
    types = file.tensors.get("token_types.weight")
    return {"type_vocab_size": types.shape[0] if types else 0, **_scores(file, "Bert")}


def modernbert_fields(file: GgufFile, at: str, config: Config) -> Config:
    found = layer_types(file, at, config, 3)
    return {"layer_types": found["layer_types"], **_scores(file, "ModernBert")} if found else {}


def _scores(file: GgufFile, family: str) -> Config:
    """Of a file with a head for scores, which comes behind the first token's row."""
    head = file.tensors.get("cls.output.weight")
    if head is None:
        return {}
    if "cls.weight" not in file.tensors:
        raise file.bad("tensor cls.output.weight", "is served behind cls.weight alone")
    return {"architectures": [f"{family}ForSequenceClassification"], "num_labels": head.shape[0],
            "classifier_bias": "cls.bias" in file.tensors}
