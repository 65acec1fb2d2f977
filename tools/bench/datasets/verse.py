"""Sonnet-like text, made by rules from a seed: lines of some ten syllables about nothing much."""

from __future__ import annotations

import random
from collections.abc import Iterable

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.options import DatasetOptions
from actorium.tools.bench.datasets.sample import LocalTokenizer, SampleRequest, Tokens

TASK = "Here are some lines of verse. Write more lines in the same manner.\n\n"
POOL = 400
"""Different lines that the prompts are made of."""

_WORDS = {
    "N": ("moon", "stone", "tide", "lamp", "field", "wing", "bell", "road", "frost", "sail",
          "clock", "leaf", "bridge", "rain", "door", "smoke", "shore", "thread", "crow", "glass"),
    "M": ("river", "garden", "window", "candle", "meadow", "harbour", "winter", "orchard",
          "pocket", "shepherd", "mountain", "silence", "letter", "morning", "kettle", "thunder"),
    "A": ("pale", "slow", "bright", "cold", "small", "old", "soft", "deep", "strange", "brown"),
    "B": ("gentle", "hollow", "silver", "crooked", "quiet", "distant", "broken", "golden"),
    "V": ("turns", "waits", "falls", "sings", "leans", "burns", "drifts", "sleeps", "calls",
          "climbs"),
    "P": ("near", "past", "down", "by", "through", "toward"),
}
"""Nouns of one and two syllables, adjectives of one and two, verbs, prepositions."""
_LINES = (
    "the A N V P the B M N",
    "and P the M every N now V",
    "a B N that V P A N and N",
    "where A N V the M V alone",
    "so V the N P all the B M",
    "no M V P any N I knew",
    "the N, the M and the N still V",
    "I keep the B N P your A M",
)


def line(rng: random.Random) -> str:
    """One line, with its end of line."""
    words = [rng.choice(_WORDS[word.rstrip(",")]) + word[1:] if word.rstrip(",") in _WORDS else word
             for word in rng.choice(_LINES).split()]
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}{rng.choice((',', ',', ';', '.'))}\n"


def sonnet_requests(options: DatasetOptions, tokens: Tokens) -> list[SampleRequest]:
    """Prompts of at most --sonnet-input-len tokens; the first --sonnet-prefix-len of them (the
    task included) are the same in all."""
    tokenizer = tokens.need("--dataset-name sonnet")
    limit = options.input_len or options.sonnet_input_len
    rng = random.Random(options.seed)
    pool = [line(rng) for _ in range(POOL)]
    prefix = _filled(TASK, pool, options.sonnet_prefix_len, tokenizer)
    if max(options.sonnet_prefix_len, len(tokenizer.encode(prefix))) >= limit:
        raise BadConfig(f"--sonnet-input-len: {limit} tokens leave no room for lines after those "
                        f"of the prefix (--sonnet-prefix-len {options.sonnet_prefix_len})",
                        "sonnet_input_len")
    found = []
    for _ in range(options.requests):
        text = _filled(prefix, rng.choices(pool, k=limit), limit, tokenizer)
        found.append(SampleRequest(text, None, options.output_len or options.sonnet_output_len,
                                   len(tokenizer.encode(text))))
    return found


def _filled(text: str, lines: Iterable[str], limit: int, tokenizer: LocalTokenizer) -> str:
    """The text with as many of the lines as `limit` tokens have room for."""
    size, taken = len(tokenizer.encode(text)), []
    for each in lines:
        size += len(tokenizer.encode(each))
        if size > limit:
            break
        taken.append(each)
    while taken and len(tokenizer.encode(text + "".join(taken))) > limit:
        taken.pop()  # the whole may have a token more than its lines
    return text + "".join(taken)
