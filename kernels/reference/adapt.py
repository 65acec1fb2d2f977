"""What adapters add to some rows of a product."""

from __future__ import annotations

from torch import Tensor

from actorium.kernels.adapter_rows import AdapterRows, AdapterStack


def adapt(x: Tensor, y: Tensor, rows: AdapterRows, stack: AdapterStack) -> Tensor:
    """y, in its memory, with scale * B(A x) added to each row that has an adapter; in f32, and
    rounded once. x: [T, K], what the product took; y: [T, N], what it gave."""
    for slot, first, count in rows.blocks.tolist():
        if not count:
            break
        at = rows.rows[first:first + count].long()
        taken, start = x.index_select(0, at).float(), 0
        for module, width in enumerate(stack.widths):
            if rank := int(stack.ranks[slot, module]):
                top = module * stack.rank
                low = taken @ stack.a[slot, top:top + rank].float().t() * stack.scales[slot, module]
                added = low @ stack.b[slot, :rank, start:start + width].float()
                columns = y[:, start:start + width]
                columns[at] = (columns[at].float() + added).to(y.dtype)
            start += width
    return y
