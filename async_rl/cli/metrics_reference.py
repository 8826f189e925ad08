"""Writes `docs/reference/metrics.md` from the declarations of metrics and the names in trackers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from async_rl.observability.figures import Description
from async_rl.observability.metrics import PREFIX, Metrics, StepMetrics, declared
from async_rl.observability.trackers.names import DERIVED, FIELDS, OWN, OWN_BY_KEY
from async_rl.runtime.waits import WAIT_KINDS

_PACKAGE: Final = Path(__file__).parents[1]

_HEAD = f"""# Metrics

Every metric of a run with its type, unit, labels, observer and the meaning of a bad value. `make docs`
generates this page from `figures.py`, `metrics.py` and `trackers/names.py` in `async_rl/observability/`;
change it there. [Watching a run](../guide/watching.md) explains which metrics answer which question.

Prometheus scrapes them from the driver's `/metrics`; names there begin with `{PREFIX}`. A histogram `x` is
the series `x_bucket`, `x_sum` and `x_count`. A figure that does not exist (a mean over no tokens) is NaN
there, and null in `metrics.jsonl`.
"""

_TRACKERS = """
## Names in trackers

`metrics.trackers` sends the figures of each step (`StepRecord` in `async_rl/observability/records.py`, one
line of `metrics.jsonl`) to `wandb`, `mlflow`, `swanlab`, `trackio`, `tensorboard` (the folder `tensorboard/`
of the run), `jsonl` (its file `tracker.jsonl`), `console`, or a class of your own: `module:Class`, created
with the config and the run folder, with the two methods of `Tracker` in
`async_rl/observability/trackers/tracker.py`.

All trackers use the same names: verl's, where verl has one for the same figure. The x axis is the trainer
step. A figure that does not exist in a step is omitted. `response_length/*` counts the tokens that the policy
wrote, not what tools returned.

Each tracker has its own thread and queue. One that fails or is too slow loses steps; the log reports this
once and `async_rl_tracker_steps_lost_total` counts it. Training does not wait for trackers. A resumed run
continues the same run of a service, TensorBoard folder and file. Steps that it repeats replace the old ones,
except in services, which keep the first ones.

The package of a service comes with `pip install -e '.[mlflow]'` in the checkout (or `swanlab`, `trackio`,
`wandb`; the last comes with `make setup`). Where its server is, and its key, are what its own settings say:

- `wandb` (project `metrics.wandb_project`): `wandb login` or WANDB_API_KEY, and WANDB_ENTITY.
  `WANDB_MODE=offline` writes files below the run folder; `wandb sync` in that folder uploads them.
- `mlflow` (experiment `metrics.project`): MLFLOW_TRACKING_URI; without it `mlflow.db` in the current folder,
  which `mlflow ui` there shows. Characters that MLflow refuses in a name become `_`: `pass_8`.
- `swanlab` (project `metrics.project`): `swanlab login` or SWANLAB_API_KEY. `SWANLAB_MODE=offline` writes
  files into `swanlab/` of the run folder; `swanlab sync` uploads them.
- `trackio` (project `metrics.project`, a run of the name of ours and eight characters): TRACKIO_DIR, which
  `trackio show` shows; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL send the figures elsewhere.

| name | field of the record |
|---|---|
"""

_WAITS = """
## Waits

The label `awaited` of metrics, `/health` and the chains of `async-rl doctor` name waits by these kinds
(`async_rl/runtime/waits.py`).

| kind | the doctor says | open while |
|---|---|---|
"""


def markdown() -> str:
    """Return the whole page."""
    return "".join([_HEAD, *_sections(), _WAITS, *_waits(), _TRACKERS, *_names()])


def _waits() -> Iterator[str]:
    for name, kind in WAIT_KINDS.items():
        yield f"| `{name}` | {kind.fault.format('…')} | {kind.meaning} |\n"


def _sections() -> Iterator[str]:
    observers, described = _observers(), declared(Metrics)
    head = "| metric | what it is, and who observes it | a bad value, and what to do |\n|---|---|---|\n"
    for part in Metrics.__mro__:
        names = [name for name in described if name in vars(part)]
        if names:
            yield f"\n## {(part.__doc__ or '').splitlines()[0].rstrip('.')}\n\n{head}"
        for name in names:
            by = "each trainer step" if part is StepMetrics else ", ".join(observers[name])
            what = f"{_cell(described[name].help)}<br>*{by}*"
            yield f"| {_signature(name, described[name])} | {what} | {_cell(described[name].bad)} |\n"


def _observers() -> dict[str, dict[str, None]]:
    """Return the modules that use each attribute of metrics, in order."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for file in sorted(_PACKAGE.rglob("*.py")):
        module = str(file.relative_to(_PACKAGE).with_suffix("")).replace("/", ".")
        for name in re.findall(r"\b(?=(?:_?metrics|m|self)\.(\w+))", file.read_text(encoding="utf-8")):
            found[name][module] = None
    return found


def _signature(name: str, described: Description) -> str:
    labels = f"{{{','.join(described.labels)}}}" if described.labels else ""
    unit = f", {described.unit}" if described.unit else ""
    return f"`{name}{labels}`<br>{described.kind}{unit}"


def _names() -> Iterator[str]:
    yield from (f"| `{name}` | `{field}` |\n" for name, field in FIELDS.items())
    yield from (f"| `{name}` | {derived.says} |\n" for name, derived in DERIVED.items())
    yield from (f"| `async_rl/{field}/<key>` | each entry of `{field}` |\n" for field in OWN_BY_KEY)
    yield f"| `async_rl/<field>` | {', '.join(f'`{field}`' for field in OWN)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
