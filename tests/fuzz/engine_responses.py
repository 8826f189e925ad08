"""Coverage-guided fuzzing of the reader of engine responses with atheris.

    python tests/fuzz/engine_responses.py -runs=1000000 [a folder for what it finds]

The first byte of an input chooses how many bytes a network read has. A crash is whatever comes of it but
tokens or the documented errors, a read that blocks the event loop for 50 ms, and more than 1 GiB of memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["async_rl.engines.sglang"]):
    from tests.support.engine_responses import VALID, SlowRead, read_stream


def feed(data: bytes) -> None:
    """Read one input; three times before it is called slow, as a machine that is busy may be slow once."""
    for attempt in range(3 if data else 0):
        try:
            read_stream(data[1:], 1 + 16 * data[0], max_step_s=0.05)
            return
        except SlowRead:
            if attempt == 2:
                raise


def main() -> None:
    """Fuzz from valid streams on."""
    with tempfile.TemporaryDirectory() as seeds:
        for number, stream in enumerate(VALID):
            Path(seeds, f"stream-{number}").write_bytes(bytes([16 * number]) + stream)
        folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or [seeds + "/new"]
        Path(folders[0]).mkdir(parents=True, exist_ok=True)
        options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        limits = ["-max_len=4096", "-rss_limit_mb=1024"]
        atheris.Setup([sys.argv[0], *limits, *options, *folders, seeds], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
