"""What configs say of layers that draft (MTP)."""

from __future__ import annotations

from actorium.gpu.families.config_fields import Fields

MTP_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


def mtp_layers(get: Fields) -> int:
    """1 where the config promises a layer that drafts, else 0. Of several the first is used, and
    chained. Qwen3-Next's checkpoints hold one that their config does not tell of.

    Raises `BadModel` naming the field that is wrong.
    """
    for name in MTP_FIELDS:
        if get.raw.get(name):
            return min(1, get.int(name))
    return int(get.raw.get("model_type") == "qwen3_next" and MTP_FIELDS[0] not in get.raw)
