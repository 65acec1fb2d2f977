"""Which CUDA devices a replica takes. Pure."""

from __future__ import annotations

from actorium.actors.errors import BadConfig

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_devices(index: int, ranks: int, before: str | None) -> str:
    """The CUDA devices of a replica: the next `ranks` of those that the cluster may use. before:
    `CUDA_VISIBLE_DEVICES` of the cluster; one that shows none (empty, -1) stays as it is. Raises
    `BadConfig` where there are too few."""
    own = range(index * ranks, (index + 1) * ranks)
    if before is None:
        return ",".join(map(str, own))
    names = [name for name in before.split(",") if name]
    if names in ([], ["-1"]):
        return before
    if own.stop > len(names):
        raise BadConfig(f"replicas: replica {index} needs CUDA devices {own.start} to "
                        f"{own.stop - 1} of {VISIBLE_DEVICES}={before}", "cluster.replicas")
    return ",".join(names[i] for i in own)
