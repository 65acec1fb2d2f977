"""Triton's kernels compiled without a device: what a launch would run, and what that takes.

A stand-in for Triton's driver says what to compile for; a launch then compiles and does nothing.
What the assembler made of a kernel is read from the binary itself, by the tools of Triton's wheel.
Needs a process that does not interpret (TRITON_INTERPRET unset).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Arch(NamedTuple):
    """What programs share on one multiprocessor (CUDA C++ Programming Guide, table of technical
    specifications by compute capability)."""

    shared: int
    """Bytes of shared memory that one program may have."""
    of_sm: int
    """Bytes that all programs of an SM may have; each takes 1 KiB more than it asks for."""
    threads: int
    programs: int
    sms: int
    """The devices compiled for: A100, L4, H100, B200."""


KIB = 1024
ARCHS = {
    80: Arch(163 * KIB, 164 * KIB, 2048, 32, 108),
    89: Arch(99 * KIB, 100 * KIB, 1536, 24, 58),
    90: Arch(227 * KIB, 228 * KIB, 2048, 32, 132),
    100: Arch(227 * KIB, 228 * KIB, 2048, 32, 148),
}
"""Names by compute capability."""


@dataclass
class Standin:
    """Stands for triton's driver; `kernels` collects what was launched, in that order."""

    capability: int = 90
    kernels: list[Any] = field(default_factory=list)

    @property
    def utils(self) -> Standin:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        arch = ARCHS[self.capability]
        return {"max_shared_mem": arch.shared, "multiprocessor_count": arch.sms}

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Triton keeps kernels by device: every capability is one of its own."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """Nothing is launched."""

    def become(self, capability: int) -> None:
        from actorium.kernels.triton.device_limits import device_limits

        self.capability = capability
        device_limits.cache_clear()

    def install(self) -> Standin:
        """Makes launches compile and do nothing else."""
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        compiled = JITFunction.run

        def run(this: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.kernels.append(compiled(this, *args, grid=grid, warmup=True, **options))

        JITFunction.run = run
        driver.set_active(self)
        return self

    @contextmanager
    def launches(self) -> Iterator[list[Any]]:
        before, self.kernels = self.kernels, []
        try:
            yield self.kernels
        finally:
            self.kernels = before


class Facts(NamedTuple):
    kernel: str
    warps: int
    registers: int
    """Registers of a thread."""
    spills: tuple[int, int]
    """Bytes that a thread's spilling instructions store, and load, each counted once."""
    stack: int
    shared: int
    """Bytes of a program."""
    programs: int
    """Programs an SM holds at once; 0 = it does not fit."""
    products: str
    """On the tensor cores: wgmma, mma (one warp's), tcgen05; `fma` where there is a product but
    not on these; empty where there is none."""
    doubles: int
    """Instructions of fp64."""


def programs(capability: int, warps: int, registers: int, shared: int) -> int:
    """How many an SM holds at once. Registers are dealt out to a warp in 256s, by four equal parts
    of an SM; shared memory to a program in 128 bytes (CUDA's occupancy calculator)."""
    arch = ARCHS[capability]
    if shared > arch.shared:
        return 0
    each = -(-registers * 32 // 256) * 256
    room = 4 * (16384 // each) // warps
    memory = arch.of_sm // (-(-(shared + KIB) // 128) * 128)
    return min(room, memory, arch.threads // (32 * warps), arch.programs)


PRODUCTS = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}
"""What they are called in PTX."""
DOUBLE = re.compile(r"^\s*(?:@\S+\s+)?\w+(?:\.\w+)*\.f64\b", re.M)
SPILLS = re.compile(r"\bSTL(?:\.\w+)*"), re.compile(r"\bLDL(?:\.\w+)*")
"""Stores and loads in the assembler's own code."""
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def dump(cubin: bytes, what: str) -> str:
    """What Triton's copy of cuobjdump says of a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], text=True, capture_output=True,
                              check=True).stdout


def moved(instruction: str) -> int:
    """Bytes that a load or store moves."""
    sizes = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
    return next((sizes[part] for part in instruction.split(".") if part in sizes), 4)


def spilled(sass: str) -> tuple[int, int]:
    """Bytes stored and loaded, each instruction counted once."""
    stored, loaded = (sum(map(moved, pattern.findall(sass))) for pattern in SPILLS)
    return stored, loaded


def facts(kernel: Any, capability: int) -> Facts:
    """What triton's compiler made for this capability."""
    usage, meta, ptx = USAGE.search(dump(kernel.asm["cubin"], "-res-usage")), kernel.metadata, \
        kernel.asm["ptx"]
    assert usage, meta.name
    registers, stack = int(usage[1]), int(usage[2])
    spills = spilled(dump(kernel.asm["cubin"], "-sass")) if stack else (0, 0)
    products = next((name for name, of in PRODUCTS.items() if of in ptx), "")
    if not products and "tt.dot" in kernel.asm["ttir"]:
        products = "fma"
    return Facts(meta.name, meta.num_warps, registers, spills, stack, meta.shared,
                 programs(capability, meta.num_warps, registers, meta.shared), products,
                 len(DOUBLE.findall(ptx)))
