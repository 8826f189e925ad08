"""Write a stand-in of NVIDIA's driver library: python scripts/driver_stand_in.py FOLDER.

Packages that are linked with libcuda.so.1 cannot be loaded on a machine without a driver. Here its functions,
all that installed packages name, answer that there is no device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE of cuda.h."""
_FUNCTION = re.compile(r"\bcu[A-Z]\w+")


def functions() -> set[str]:
    """Return the functions of the driver that libraries of this environment are linked with."""
    found = {"cuInit"}
    for library in Path(sysconfig.get_path("platlib")).rglob("*.so*"):
        if library.is_symlink() or "libcuda.so" not in _output("readelf", "-d", library):
            continue
        found.update(_FUNCTION.findall(_output("nm", "-D", "--undefined-only", library)))
    return found


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def main() -> None:
    """Write and compile the library."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "cuda.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in sorted(functions()))
    )
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
