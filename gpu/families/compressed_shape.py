"""What `config.json` says of weights in FP8 in the format of compressed-tensors (llm-compressor's,
vLLM's): `quant_method: compressed-tensors`, `format: float-quantized`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel, shown

METHOD, FORMAT = "compressed-tensors", "float-quantized"
PATTERN = re.compile(r"re:\.\*([A-Za-z_][\w\\.]{0,100})(\$?)")
"""Of names of modules: those that this one ends, or is a part of. No other is read: patterns of a
file are not run."""
BLOCK = [128, 128]


def is_served(found: dict[str, Any]) -> bool:
    """Whether this is the format of FP8."""
    return found.get("quant_method") == METHOD and found.get("format") == FORMAT


def compressed_shape(found: dict[str, Any], where: Path) -> tuple[int, list[str]]:
    """(rows and columns of a block that shares a scale, 0 where none does; modules that are not in
    FP8, `*` before and perhaps `$` behind what their names have or end with).

    found: `quantization_config`. Raises `BadModel` naming the field that is not served.
    """
    at = f"{where}: quantization_config"

    def bad(field: str, want: str, value: Any) -> BadModel:
        return BadModel(f"{at}.{field}: must be {want}, got {shown(value)}")

    if found.get("format") != FORMAT:
        raise bad("format", f"{FORMAT} (of {METHOD} checkpoints no other is supported)",
                  found.get("format"))
    if found.get("quantization_status", "compressed") != "compressed":
        raise bad("quantization_status", "compressed", found["quantization_status"])
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise bad("config_groups", "one group, of all Linear modules", groups)
    (name, group), = groups.items()
    where_in = f"config_groups.{shown(name)}"
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise bad(f"{where_in}.targets", "Linear alone",
                  group.get("targets") if isinstance(group, dict) else group)
    weights, inputs = group.get("weights"), group.get("input_activations")
    for field, one in (("weights", weights), ("input_activations", inputs)):
        if not (isinstance(one, dict) and one.get("type") == "float" and one.get("num_bits") == 8
                and one.get("symmetric", True) is True):
            raise bad(f"{where_in}.{field}", "float with 8 bits, symmetric", one)
    assert isinstance(weights, dict)
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block") or (
            strategy == "block" and weights.get("block_structure") != BLOCK):
        raise bad(f"{where_in}.weights.strategy", f"tensor, channel, or block of {BLOCK}", weights)
    ignored = found.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(one, str) for one in ignored):
        raise bad("ignore", "a list of names", ignored)
    return BLOCK[0] if strategy == "block" else 0, [_ignored(one, bad) for one in ignored]


def _ignored(name: str, bad: Any) -> str:
    if not name.startswith("re:"):
        return name
    found = PATTERN.fullmatch(name)
    if found is None or "layers." in found[1]:
        refusal: BadModel = bad("ignore", "names, or re:.*NAME or re:.*NAME$ without a layer's "
                                "number", name)
        raise refusal
    return f"*{found[1].replace(chr(92), '')}{found[2]}"
