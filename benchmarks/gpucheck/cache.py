"""Triton's cache of kernels as one file that can be carried: `python benchmarks/gpucheck/cache.py
pack FOLDER ARCHIVE [MIB]`, `unpack ARCHIVE FOLDER`.

Of each kernel only what is launched is kept, the binary and its description: Triton finds it by the
hash of its source, its arguments, the compiler's and the driver's versions, and does without the
steps on the way to it. Each group of files names them with their folder, so they get the new one.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

KEPT = (".cubin", ".json", ".so")
MOST_MIB = 15.0
"""A larger file would not come back from where it is packed."""


def pack(folder: Path, archive: Path, most_mib: float = MOST_MIB) -> str:
    """Write the archive (.tar.gz); what there is to say of it. Nothing is written where there is
    nothing, or too much."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in KEPT and path.is_file())
    if not files:
        return "the kernels' cache is empty: nothing to pack"
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        for path in files:
            tar.add(path, path.relative_to(folder).as_posix())
    size = archive.stat().st_size / 2**20
    if size > most_mib:
        archive.unlink()
        return f"the kernels' cache is left out: {size:.1f} MiB packed, {most_mib:g} are the most"
    kernels = sum(path.suffix == ".cubin" for path in files)
    return f"{kernels} kernels packed, {size:.1f} MiB: {archive.name}"


def unpack(archive: Path, folder: Path) -> int:
    """Kernels that are in the folder now. Raises `tarfile.TarError` or `OSError`."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    for path in folder.rglob("__grp__*.json"):
        group = json.loads(path.read_text())
        group["child_paths"] = {name: str(path.parent / name) for name in group["child_paths"]}
        path.write_text(json.dumps(group))
    return len(list(folder.rglob("*.cubin")))


def main() -> int:
    what, first, second, *most = sys.argv[1:]
    try:
        if what == "pack":
            print(pack(Path(first), Path(second), *map(float, most)))
        else:
            print(f"{unpack(Path(first), Path(second))} kernels carried here")
    except (OSError, ValueError, tarfile.TarError) as error:
        print(f"{what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
