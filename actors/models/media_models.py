"""Which models take images and videos beside text."""

from __future__ import annotations

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel
from actorium.actors.models import model_dir

WITH_TOWER = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
              "Qwen3VLMoeForConditionalGeneration")
"""Architectures with a vision tower (`gpu/families/qwen_vl_config.py`)."""
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""One of them says how images are prepared; without one they cannot be."""
TEXT_BODY, MEDIA_BODY = 4 << 20, 32 << 20
"""Bytes of the largest body of a request, by default: a photo of a telephone has 3 to 8 MB, and a
third more in base64."""


def takes_media(config: Config) -> bool:
    """Whether the engine of this configuration takes images and videos. What is wrong with a model
    is left to those who read all of it."""
    own = config.model
    if own.language_model_only or own.skip_tokenizer:
        return False
    try:
        path = model_dir.resolve(own.model)
        name = model_dir.architecture(model_dir.read_config(path))
    except BadModel:
        return False
    return name in WITH_TOWER and any((path / file).is_file() for file in PREPROCESSORS)


def body_limit(config: Config) -> int:
    """Bytes that the body of an HTTP request may have."""
    wanted = config.gateway.max_body_bytes
    if wanted is not None:
        return wanted
    return MEDIA_BODY if takes_media(config) else TEXT_BODY


def bodies_limit(limit: int) -> int:
    """Bytes of all large bodies together, while they come. limit: of one."""
    return 64 * limit if limit <= TEXT_BODY else max(64 * TEXT_BODY, 8 * limit)
