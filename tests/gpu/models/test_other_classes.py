"""Classes for text generation of transformers that are none of ours: served by transformers' class,
logits as it has them, or refused at the start with the reason (`make parity`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import Seq, Stepper, oracle_logits
from test_transformers_model import BASE, CASES, load, prompts, write

from actorium.actors.errors import BadModel
from actorium.gpu.families.architectures import ARCHITECTURES, unsupported
from actorium.gpu.families.text_parts import WITH_TEXT_PART
from actorium.gpu.families.transformers_config import text_classes
from actorium.tools.models_table import GROUPS, PAGE, names_in

OTHERS = sorted(text_classes() - set(ARCHITECTURES) - WITH_TEXT_PART)
OPTIONS = dict(CASES)
SERVED = "served"
NO_FILES = "no model.safetensors"
"""What is said of a class that is not refused, without weights."""
MOST = 50_000_000
"""Numbers of a tiny checkpoint."""


def outcome(path: Path, name: str) -> str:
    """What the start says of a tiny checkpoint of the class, or of a config as it has it by
    default."""
    import transformers

    kind: Any = getattr(transformers, name)
    try:
        config, tiny = kind.config_class(**{**BASE, **OPTIONS.get(name, {})}), True
    except Exception:  # its fields have other types, or must fit each other
        try:
            config, tiny = kind.config_class(), False
        except Exception:
            return "not tried: no config could be made"
    (path / "config.json").write_text(json.dumps(
        {**config.to_dict(), "architectures": [name], "dtype": "float32"}, default=str))
    try:
        load(path)
    except BadModel as error:
        if NO_FILES not in str(error):
            return reason(str(error).removeprefix(f"{path / 'config.json'}: "), name)
    with torch.device("meta"):
        numbers = sum(own.numel() for own in kind(config).parameters())
    if not tiny or numbers > MOST:
        return "not tried: no tiny config could be made"
    theirs, ids = write(path, name, **OPTIONS.get(name, {})), prompts()[1]
    got = Stepper(load(path), 1000, 4).step([(Seq(ids), len(ids))], every_row=True)
    want = oracle_logits(theirs, ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    return SERVED


def reason(line: str, name: str) -> str:
    """What the line says that is not of this class alone."""
    heads = (f"{unsupported(name)}; nor is it by transformers' class (--model-impl)", ", which ",
             ": ", f"{name} is not served by transformers' class (--model-impl): ", f"{name} ")
    for head in heads:
        line = line.removeprefix(head)
    line = re.sub(r" \(\w*Error: .*|: transformers' classes are served .*", "", line)
    return f"refused: {line}".replace("|", "/")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_class(tmp_path: Path, name: str,
                     record_property: Callable[[str, object], None]) -> None:
    record_property("by_transformers", f"{name} {outcome(tmp_path, name)}")


def test_the_table_names_every_class() -> None:
    assert sorted(names_in(PAGE.read_text(), GROUPS["by_transformers"][0])) == OTHERS
