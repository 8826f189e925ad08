"""Records what Prometheus would scrape of a run, and plays it to the alerts.

`python -m tests.support.recorded_series URL FILE` scrapes a running job every 5 s, until it ends.
"""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.environment import program

INTERVAL_S = 5
"""The scrape interval of `monitoring/prometheus.yml`."""

RULES = Path(__file__).parents[2] / "monitoring" / "rules" / "async_rl.yml"


class RecordedSeries:
    """All series of one run, a value per scrape.

    Example:
        >>> recorded = RecordedSeries()
        >>> recorded.add_scrape('# TYPE x gauge\\nx{a="b"} 3')
        >>> recorded.values
        {'x{a="b",instance="recorded",job="async_rl",run="recorded"}': [3.0]}
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float | None]] = {}
        self.scrapes = 0

    def add_scrape(self, text: str) -> None:
        """Add the text of `/metrics`."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    self._add(sample.name, sample.labels, sample.value)
        self._add("up", {}, 1.0)
        self.scrapes += 1
        for values in self.values.values():
            values += [None] * (self.scrapes - len(values))

    def _add(self, name: str, labels: dict[str, str], value: float) -> None:
        labels = labels | {"instance": "recorded", "job": "async_rl", "run": "recorded"}
        text = ",".join(f"{key}={json.dumps(label)}" for key, label in sorted(labels.items()))
        values = self.values.setdefault(f"{name}{{{text}}}", [])
        values += [None] * (self.scrapes - len(values))
        values.append(value)

    def write(self, path: Path) -> None:
        """Write all series to a compressed file, the same bytes for the same series."""
        path.write_bytes(gzip.compress(json.dumps(self.values).encode(), mtime=0))

    @classmethod
    def read(cls, path: Path) -> RecordedSeries:
        """Read what `write` wrote."""
        recorded = cls()
        recorded.values = json.loads(gzip.decompress(path.read_bytes()))
        recorded.scrapes = len(next(iter(recorded.values.values())))
        return recorded

    def alerts(self, folder: Path) -> str:
        """Return what promtool says about alerts that fire at any time; empty if none does."""
        length_s = INTERVAL_S * (self.scrapes - 1)
        firing = f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{length_s + 60}s]))'
        test = {
            "interval": f"{INTERVAL_S}s",
            "input_series": [
                {"series": series, "values": _as_promtool(values)} for series, values in self.values.items()
            ],
            "promql_expr_test": [{"expr": firing, "eval_time": f"{length_s}s", "exp_samples": []}],
        }
        tests = {"rule_files": [str(RULES)], "evaluation_interval": f"{INTERVAL_S}s", "tests": [test]}
        path = folder / "recorded.yml"
        path.write_text(yaml.safe_dump(tests))
        done = subprocess.run(
            [program("promtool"), "test", "rules", path],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return "" if done.returncode == 0 else done.stdout + done.stderr


def _as_promtool(values: list[float | None]) -> str:
    """Return values in promtool's notation: `1+0x3` is 1 1 1 1, `_x2` are two missing ones."""
    parts = []
    for text, run in itertools.groupby("_" if value is None else f"{value:.10g}" for value in values):
        more = len(list(run)) - 1
        parts.append(f"_x{more + 1}" if text == "_" else f"{text}+0x{more}" if more else text)
    return " ".join(parts).replace("nan", "NaN").replace("inf", "Inf")


def main(url: str, path: Path) -> None:
    """Scrape a job until it ends."""
    recorded = RecordedSeries()
    while True:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
                recorded.add_scrape(response.read().decode())
        except OSError:
            return
        recorded.write(path)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
