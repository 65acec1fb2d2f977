"""In how many bits the weights of projections are held, module by module: what the memory plan
counts, and what the loader makes. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ONLINE = "online"
"""The source of weights that are quantised when they are read."""


class WeightFormat(NamedTuple):
    """How one weight is held; see `kernels/grouped_rows.py`."""

    bits: int
    """Of a code: 4, 5, 6 or 8."""
    group: int
    """Columns that share a scale; 0: all of a row do."""
    mins: bool
    """Each group has a min beside its scale."""
    fp4: bool = False
    """MXFP4: codes are numbers in e2m1, the scale of a group a power of two, in a byte."""

    def __str__(self) -> str:
        if self.fp4:
            return f"mxfp4 (groups of {self.group})"
        of = f"groups of {self.group}" if self.group else "a scale a row"
        return f"int{self.bits} ({of}{', with mins' * self.mins})"

    def takes(self, columns: int) -> bool:
        """Whether a weight of so many columns can be held so: kernels step by 32."""
        return columns % max(self.group, 32) == 0

    def fitting(self, columns: int) -> WeightFormat | None:
        """This format, or with the largest smaller group in which a weight of so many columns can
        be held; None: with none."""
        form: WeightFormat | None = self
        while form is not None and not form.takes(columns):
            form = form._replace(group=form.group // 2) if form.group > 32 else None
        return form

    def held_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight: codes, and scales (and mins) in two bytes a group, in one of MXFP4, or
        in four where a row has one. Kernels take rows by 16: the last are filled up."""
        rows = -(-rows // 16) * 16
        count, each = (columns // self.group, 2 - self.fp4) if self.group else (1, 4)
        return rows * (columns * self.bits // 8 + count * each * (1 + self.mins))


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Which weights of a model are held in which format."""

    source: str
    """Where they come from: "online" (quantised when they are read), "gguf", "awq", "gptq",
    "compressed-tensors" or "mxfp4"."""
    default: WeightFormat | None = None
    """Of modules that `modules` does not name; None: they stay as they are."""
    modules: tuple[tuple[str, WeightFormat | None], ...] = ()
    """(name of a module as checkpoints of the language model alone call it, its format). Embedding
    and head are quantised only where they are named here."""
    ordered: bool = False
    """Each module has its columns in an order of its own (GPTQ's act-order), which is held with
    it."""

    _by_name: dict[str, WeightFormat | None] = field(init=False, repr=False, compare=False)
    """Made once: mixtures have tens of thousands of modules."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", dict(self.modules))

    @property
    def step(self) -> int:
        """What the inner width of experts is shared out in multiples of: of MXFP4, whose scales
        cannot be made anew, columns that share one."""
        return 32 if self.source == "mxfp4" else 1

    def format(self, module: str) -> WeightFormat | None:
        """That of this module's weight; None: it is not quantised."""
        return self._by_name.get(module, self.default)

    def names(self, module: str) -> bool:
        """Whether `modules` names this one."""
        return module in self._by_name
