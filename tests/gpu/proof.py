"""The cases of the proof and what became of them: table, file, exit code. Independent of GPUs.

```
session.py, a process    case begins ─► case ends, with its verdict ─┐   one after the other
slices.py                ends a process that exceeds a limit ────────┴─► a line, and the file ─► the table
```
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.files import replace_file

_OWN_OVERHEAD_GIB = 2.5
"""Memory that a process may hold outside torch's allocator: the CUDA context, kernels, buffers of NCCL."""

Verdict = Literal[
    "held", "rehearsed", "failed", "did not run", "no time left", "not rehearsed", "needs more GPUs"
]

_STYLES: dict[Verdict, str] = {
    "held": "green",
    "rehearsed": "green",
    "failed": "bold red",
    "did not run": "red",
    "no time left": "yellow",
    "not rehearsed": "dim",
    "needs more GPUs": "dim",
}
_DONE: tuple[Verdict, ...] = ("held", "rehearsed", "not rehearsed")
"""What is not run again."""

NEEDS = ("trainer", "engine", "ray", "two-gpus")


@dataclass
class Case:
    """One test of the suite and its measurements."""

    node: str
    """pytest's id."""
    title: str
    """The claim that the case proves, in a sentence."""
    needs: list[str]
    longest_s: float
    """It is ended when it takes longer, and not begun when less is left."""
    value: float
    """Of what can run, the most valuable case runs first."""
    verdict: Verdict = "did not run"
    seconds: float = 0.0
    figures: dict[str, str] = field(default_factory=dict)
    """Figures with their unit, by the name of the measurement."""
    why: str = ""
    """The reason, for a case that did not pass."""

    @property
    def name(self) -> str:
        """The test's name."""
        return self.node.rpartition("::")[2]

    @property
    def is_done(self) -> bool:
        """Whether it is not run again."""
        return self.verdict in _DONE

    def line(self) -> str:
        """Return what is printed when it has ended."""
        said = [f"{name} {figure}" for name, figure in self.figures.items()]
        if self.verdict != "rehearsed":
            said.append(self.why)
        return " | ".join([f"{self.verdict:<13} {self.seconds:6.1f} s  {self.name}", *filter(None, said)])


def check_idle(in_use: int, own: int) -> None:
    """Check that other processes use no device memory, so that the device's figures are those of the case.

    Args:
        in_use: Bytes of the device in use by all processes.
        own: Bytes that this process's allocator holds.

    Raises:
        EnvironmentNotReady: When more is in use than this process can account for.
    """
    others = (in_use - own) / 2**30
    if others > _OWN_OVERHEAD_GIB:
        raise EnvironmentNotReady(
            f"{others:.1f} GiB of the device are in use besides this process's {own / 2**30:.1f} GiB; this "
            f"case measures the whole device and allows {_OWN_OVERHEAD_GIB} GiB for CUDA: stop the other "
            "processes (nvidia-smi lists them) and run it again"
        )


def exit_code(cases: Collection[Case], needs: Collection[str] = NEEDS) -> int:
    """Return 0 only if every case of these needs that has enough GPUs has passed, and there is one."""
    wanted = [case for case in cases if case.verdict != "needs more GPUs" and set(case.needs) <= set(needs)]
    return 0 if wanted and all(case.is_done for case in wanted) else 1


def show(cases: Sequence[Case], machine: str, console: Console) -> None:
    """Print the table, and the reasons of failures."""
    table = Table("case", "what was measured", "figure", "verdict", title=machine, show_lines=True)
    for case in cases:
        table.add_row(
            f"{case.title}\n[dim]{case.name}, {case.seconds:.1f} of {case.longest_s:.0f} s[/dim]",
            "\n".join(case.figures),
            "\n".join(case.figures.values()),
            f"[{_STYLES[case.verdict]}]{case.verdict}[/]",
        )
    console.print(table)
    for case in cases:
        if case.verdict in ("failed", "did not run", "not rehearsed"):
            console.print(f"{case.name} {case.verdict}: {case.why}", markup=False)
    counts = {verdict: sum(case.verdict == verdict for case in cases) for verdict in _STYLES}
    console.print(f"{len(cases)} cases: " + ", ".join(f"{n} {word}" for word, n in counts.items() if n))


def write(cases: Collection[Case], machine: dict[str, str], code: dict[str, str], path: Path) -> None:
    """Write the same as JSON, so that a reader finds a whole file at any time."""
    document = {"machine": machine, "code": code, "cases": [asdict(case) for case in cases]}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(document, indent=2) + "\n").encode())


def read(machine: dict[str, str], code: dict[str, str], path: Path) -> dict[str, Case]:
    """Return the cases of such a file, by id; none if it is of another kind of machine or of other code."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    if document["machine"] != machine or document["code"]["digest"] != code["digest"]:
        return {}
    return {each["node"]: Case(**each) for each in document["cases"]}
