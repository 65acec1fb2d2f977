"""A tiny random cross-encoder, served as users serve one, and the same model in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from wire import Server


class Ranker(NamedTuple):
    server: Server
    oracle: Any
    tokenizer: Any

    def score(self, query: str, document: str) -> float:
        """By transformers: the sigmoid of the one logit of the pair."""
        import torch

        ids = torch.tensor([self.tokenizer.encode(query, document).ids])
        with torch.no_grad():
            return float(torch.sigmoid(self.oracle(ids).logits[0, 0]))


@contextmanager
def serving_ranker(folder: Path) -> Iterator[Ranker]:
    """Writes the model, and serves it."""
    import torch
    from conftest import DEMO, MODELS, serving
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    torch.manual_seed(1)
    oracle = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_labels=1,
        max_position_embeddings=512, initializer_range=0.4, pad_token_id=None)).eval()
    oracle.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    MODELS["ranker"] = str(folder)
    with serving("ranker", "--dtype", "float32") as served:
        yield Ranker(served, oracle, tokenizer)
