"""The vocabulary that grammars of a model are compiled against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorium.actors.config.tree import Config
from actorium.actors.errors import InvalidRequest
from actorium.actors.tokenizer.text_model import TextModel

if TYPE_CHECKING:
    from actorium.actors.structured.grammar import GrammarVocabulary


def vocabulary_of(config: Config) -> GrammarVocabulary:
    """Returns the model's grammar vocabulary, the same for tokenizer and scheduler: a grammar that
    passes in one compiles in the other. Takes more than a second where there are many tokens.
    Raises `InvalidRequest`, `BadModel`."""
    from actorium.actors.structured.grammar import GrammarVocabulary

    if config.model.skip_tokenizer:
        raise InvalidRequest("structured: the engine runs without a tokenizer (skip_tokenizer)",
                             "structured")
    model = TextModel(config)
    return GrammarVocabulary(model.path / "tokenizer.json", model.facts.vocab_size,
                             model.facts.eos_ids)
