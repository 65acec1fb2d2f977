"""Whether engines of several numbers of ranks can have the same bits (`--exact-ranks`), by a
model's shape alone. Nothing here needs torch."""

from __future__ import annotations

from actorium.actors.errors import BadConfig
from actorium.gpu.families.model_shape import MambaShape, ModelShape


def rank_faults(s: ModelShape, ranks: int) -> list[str]:
    """What keeps 1, 2, 4 ... `ranks` ranks from giving the same bits, in words; empty: nothing.

    s: of the whole model. ranks: a power of two.
    """
    try:
        part = s.split(ranks)
    except BadConfig as error:
        return [error.message.removeprefix("--tp: ")]
    found = []
    if s.dtype != "bfloat16":
        found.append(f"weights in {s.dtype}")
    if s.grouped is not None or s.fp8 is not None:
        found.append("weights in 4 to 8 bits, whose inputs are rounded together")
    widths = {} if len(s.sparse) == s.layers else {"MLPs": s.intermediate}
    if s.experts is not None:
        widths |= {"experts": s.experts.size, "an expert that all tokens go through":
                   s.experts.shared}
    if s.mtp_layers:
        widths["the product that joins what is drafted from"] = 2 * s.hidden
    found += [f"{ranks} parts of {what} of {width} are not equal"
              for what, width in widths.items() if width % ranks]
    if s.vision is not None and s.vision.deepstack:
        found.append("DeepStack's rows, which several ranks add before they round their sum")
    if isinstance(part.recurrence, MambaShape) and part.recurrence.shared_by > 1:
        found.append("the norm over a group of Mamba-2's heads, which ranks would share")
    return found


def require_rank_bits(s: ModelShape, ranks: int, passes: tuple[str, ...], native: bool) -> None:
    """Raise `BadConfig` where they cannot. passes: that are on; native: by kernels for the CPU."""
    if ranks == 1:
        return
    found = rank_faults(s, ranks)
    if not native:
        found.append("kernels that are not the CPU's own")
    if ("reduce_norm" in passes) != ("product_add" in passes):
        found.append("of the passes reduce_norm and product_add one alone")
    if found:
        raise BadConfig(f"exact_ranks: {ranks} ranks and fewer would not have the same bits: "
                        f"{'; '.join(found)}", "device.exact_ranks")
