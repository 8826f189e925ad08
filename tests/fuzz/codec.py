"""Coverage-guided fuzzing of frames with atheris.

    python tests/fuzz/codec.py -runs=1000000 [a folder for what it finds]

The first byte of an input chooses: a whole frame, or the header of one whose checksums are then made right,
to reach the decoder behind them. A crash is whatever comes of it but a passed frame, `CorruptFrame` or
`AlignmentError`. Options are libFuzzer's (`-runs=`, `-max_total_time=`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["async_rl"]):
    from tests.support.frames import VALID, read, seal, split

PARTS = [split(obj) for obj in VALID]
KINDS = [type(obj) for obj in VALID]


def feed(data: bytes) -> None:
    """Read one input."""
    if not data:
        return
    which, resealed = divmod(data[0], 2)
    which %= len(KINDS)
    frame = seal(data[1:], PARTS[which][1]) if resealed else data[1:]
    read(frame, KINDS[which])


def main() -> None:
    """Fuzz from the valid frames on."""
    with tempfile.TemporaryDirectory() as seeds:
        for which, (header, payload) in enumerate(PARTS):
            Path(seeds, f"frame-{which}").write_bytes(bytes([2 * which]) + seal(header, payload))
            Path(seeds, f"header-{which}").write_bytes(bytes([2 * which + 1]) + header)
        folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or [seeds + "/new"]
        Path(folders[0]).mkdir(parents=True, exist_ok=True)
        options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        atheris.Setup([sys.argv[0], "-max_len=4096", *options, *folders, seeds], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
