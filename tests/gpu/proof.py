"""Turns the reports of the suite's cases into a table, a file and an exit code. Independent of GPUs."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console
from rich.table import Table

from async_rl.errors import EnvironmentNotReady

_OWN_OVERHEAD_GIB = 2.5
"""Memory that a process may hold outside torch's allocator: the CUDA context, kernels, buffers of NCCL."""

Verdict = Literal["held", "failed", "did not run", "needs more GPUs"]

_STYLES: dict[Verdict, str] = {
    "held": "green",
    "failed": "bold red",
    "did not run": "red",
    "needs more GPUs": "dim",
}


@dataclass
class Case:
    """One test of the suite and its measurements."""

    name: str
    title: str
    """The claim that the case proves, in a sentence."""
    num_gpus: int = 1
    verdict: Verdict = "did not run"
    seconds: float = 0.0
    figures: dict[str, str] = field(default_factory=dict)
    """Figures with their unit, by the name of the measurement."""
    why: str = ""
    """The reason, for a case that did not pass."""


class Recorder:
    """A pytest plugin that records the result of each case, in order."""

    def __init__(self, num_gpus: int) -> None:
        self.cases: dict[str, Case] = {}
        self._num_gpus = num_gpus

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("gpus")
        needed = mark.args[0] if mark is not None else 1
        text = getattr(getattr(item, "function", None), "__doc__", None) or item.name
        case = Case(item.name, " ".join(text.split("\n\n")[0].split()), needed)
        if needed > self._num_gpus:
            case.verdict = "needs more GPUs"
        self.cases[item.nodeid] = case

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records a file that cannot be imported as a failed case: its tests are missing from the table."""
        if report.failed:
            name = Path(report.nodeid).name
            self.cases[report.nodeid] = Case(
                name, "The file's cases can be collected.", verdict="failed", why=_reason(report.longrepr)
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.cases[report.nodeid]
        case.seconds += report.duration
        case.figures |= {name: str(value) for name, value in report.user_properties}
        if case.verdict == "needs more GPUs":
            return
        if report.failed:
            case.verdict, case.why = "failed", _reason(report.longrepr)
        elif report.skipped:
            case.why = _reason(report.longrepr)
        elif report.when == "call":
            case.verdict = "held"


def _reason(text: Any) -> str:
    """Return the last line of pytest's report, which is the error itself."""
    words = text[2] if isinstance(text, tuple) else str(getattr(text, "reprcrash", text) or text)
    return str(words).strip().splitlines()[-1][:300]


def absent(names: Sequence[str]) -> list[str]:
    """Return those of some distributions that are not installed."""
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


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


def exit_code(cases: Sequence[Case]) -> int:
    """Return 0 only if every case for which there are enough GPUs passed, and there was at least one."""
    wanted = [case for case in cases if case.verdict != "needs more GPUs"]
    return 0 if wanted and all(case.verdict == "held" for case in wanted) else 1


def show(cases: Sequence[Case], machine: str, console: Console) -> None:
    """Print the table, and the reasons of failures."""
    table = Table("case", "what was measured", "figure", "verdict", title=machine, show_lines=True)
    for case in cases:
        table.add_row(
            f"{case.title}\n[dim]{case.name}, {case.seconds:.1f} s[/dim]",
            "\n".join(case.figures),
            "\n".join(case.figures.values()),
            f"[{_STYLES[case.verdict]}]{case.verdict}[/]",
        )
    console.print(table)
    for case in cases:
        if case.why and case.verdict in ("failed", "did not run"):
            console.print(f"{case.name} {case.verdict}: {case.why}", markup=False)
    held = sum(case.verdict == "held" for case in cases)
    more = sum(case.verdict == "needs more GPUs" for case in cases)
    left = f"; {more} need more GPUs than there are here" if more else ""
    console.print(f"{held} of {len(cases) - more} cases held{left}")


def write(cases: Sequence[Case], machine: dict[str, str], path: Path) -> None:
    """Write the same results as JSON."""
    document = {"machine": machine, "cases": [asdict(case) for case in cases], "exit_code": exit_code(cases)}
    path.write_text(json.dumps(document, indent=2) + "\n")
