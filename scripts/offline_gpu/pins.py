"""Writes versions and hashes into a list of what a bundle has: after a change of requirements/.

    PYTHON -m scripts.offline_gpu.pins scripts/offline_gpu/python3.12.txt

PYTHON has the list's version, torch, setuptools, wheel and pybind11, without which TransformerEngine's source
does not tell its name. Versions are those of requirements/; packages that are not there keep theirs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from scripts.hashes import FOLDER, LISTS, canonical, chosen_files, with_hashes, without_hashes

PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def main(file: Path) -> None:
    """Rewrite the list."""
    text = "".join((FOLDER / name).read_text() for name in LISTS)
    known = {canonical(name): version for name, version in PIN.findall(text)}
    text = PIN.sub(
        lambda pin: f"{pin[1]}=={known.get(canonical(pin[1]), pin[2])}", without_hashes(file.read_text())
    )
    plain = file.with_suffix(".plain")
    try:
        plain.write_text(text)
        source = ("--no-build-isolation", "--no-binary", "transformer-engine-torch")
        file.write_text(with_hashes(text, chosen_files("--no-deps", *source, "-r", str(plain.resolve()))))
    finally:
        plain.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
