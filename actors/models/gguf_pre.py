"""How texts are cut before byte-level BPE, by the name that a GGUF file gives for it
(`tokenizer.ggml.pre`): data of the models' own tokenizers. llama.cpp's `src/llama-vocab.cpp` has
the list of names, and expressions of which some are adapted to its own matcher."""

from __future__ import annotations

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """What a name stands for."""

    cuts: tuple[str, ...]
    """Each expression cuts the parts that those before it have left."""
    whole: bool = False
    """A word that is a token stays one, whatever its merges say."""
    bos: bool = False
    """Texts begin with bos, where the metadata does not say."""
    bytes: bool = True
    """Tokens are spelt in GPT-2's letters for bytes; else as they are, with a mark for a space."""


_APOSTROPHE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (f"{_UPPER}*{_LOWER}+{_APOSTROPHE}?|{_UPPER}+{_LOWER}*{_APOSTROPHE}?")
_SIGNS_AND_WORDS = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
_KANJI_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters that have a case, of the scripts that DeepSeek LLM knows."""
_HAN = r"\p{Han}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_APOSTROPHE}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_APOSTROPHE}|{_WORD}|\p{{N}}|{_REST}"
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}|{_REST_SLASH}"
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANJI_KANA,
              rf"{_SIGNS_AND_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_KIMI_K2 = (
    rf"{_HAN}+|{_CASED}|\p{{N}}{{1,3}}|{_REST}".replace(_UPPER, f"{_UPPER[:-1]}&&[^{_HAN}]]")
    .replace(_LOWER, f"{_LOWER[:-1]}&&[^{_HAN}]]"))
_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

_FORMS = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
     "a.x-4.0", "mellum", "roberta-bpe", "modern-bert", "jina-es", "jina-de", "jina-v1-en",
     "jina-v2-es", "jina-v2-de", "jina-v2-code"): PreTokenizer((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
     "mellum2"): PreTokenizer((r"\p{N}", _GPT2)),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("chameleon",): PreTokenizer(
        ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )",
         r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2), bos=True),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano"): PreTokenizer((_LLAMA3,), whole=True, bos=True),
    ("glm4", "glm5"): PreTokenizer((_LLAMA3,), whole=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("jais-2",): PreTokenizer((_LLAMA3.replace(r"\s+(?!\S)|\s+", rf"{_SPACES}|\s{{1}}"),)),
    ("minicpm5",): PreTokenizer(
        (r"\p{N}{1,3}", rf"{_APOSTROPHE}|{_WORD}|\p{{N}}+|{_REST}"), whole=True),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "f2llmv2", "megrez", "hunyuan",
     "solar-open", "grok-2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((
        rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    ("ufakzeka",): PreTokenizer((rf"{_WORD}|\p{{N}}|{_REST}",)),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    ("seed-coder",): PreTokenizer((
        rf"{_APOSTROPHE}|{_WORD}|\p{{N}}{{1}}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ("exaone-moe",): PreTokenizer((
        rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ("tekken",): PreTokenizer(
        (rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}",), whole=True, bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"): PreTokenizer((_GPT4O,)),
    ("granite-embed-multi-97m",): PreTokenizer((_GPT4O,), whole=True),
    ("tiny_aya", "cohere2moe"): PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("youtu",): PreTokenizer((
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
        "\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANJI_KANA,
        rf"{_CASED}|\p{{N}}|{_REST_SLASH}"), whole=True),
    ("kimi-k2",): PreTokenizer((_KIMI_K2,)),
    ("deepseek-llm",): PreTokenizer((
        "[\\r\\n]", rf"\s?[{_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _EAST,
        r"\p{N}+")),
    ("deepseek-coder",): PreTokenizer((
        "[\\r\\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(_DEEPSEEK3),
    ("spark2_5",): PreTokenizer((
        r"\p{N}{1,3}", _KANJI_KANA,
        rf"{_SIGNS_AND_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ("afmoe",): PreTokenizer((
        # Of a number's digits the first one or two by themselves, as many as are left of threes.
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
        "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
        "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+", _DEEPSEEK3[2])),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((_SENTENCE,)),
    ("viking",): PreTokenizer((_SENTENCE, r"\p{N}")),
    ("superbpe",): PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("gemma4", "granite-embed-multi-311m"): PreTokenizer((), bos=True, bytes=False),
    ("sarvam-moe",): PreTokenizer((), bytes=False),
}
PRE_TOKENIZERS = {name: form for names, form in _FORMS.items() for name in names}
"""By name."""
