"""`async-rl report RUN`: writes one self-contained HTML file about a run from the files in its folder.

It works at any time, also before the first step and after a crash, because it reads only files that the
driver has written so far: `config.yaml`, `metrics.jsonl`, `summary.json`, `versions.json` and the log. The
charts are those of the live page: their data, uPlot and the script that draws them are inside the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
from jinja2 import Environment
from markupsafe import Markup

from async_rl import __version__
from async_rl.config import changed_fields, load_config
from async_rl.errors import ConfigError
from async_rl.observability.console_report import REPORT_FILE
from async_rl.observability.evaluation_record import FILE as EVALUATIONS
from async_rl.observability.evaluation_record import EvaluationRecord, evaluation_record_log
from async_rl.observability.failures import FailureRow
from async_rl.observability.formatting import compact, format_duration
from async_rl.observability.page import CHART_SCRIPTS, STATIC, STYLES
from async_rl.observability.page.charts import sections, sft_sections
from async_rl.observability.page.tiles import FlowStage, sft_tiles, stages, tiles
from async_rl.observability.panels import RECENT, SFT_COLUMNS, STEP_COLUMNS
from async_rl.observability.records import Figure, StepRecord, TrajectoryCounts, mean, step_record_log
from async_rl.observability.sft_record import SftRecord, holds_sft_records, sft_record_log
from async_rl.runtime import yaml12
from async_rl.runtime.files import is_locked, replace_file
from async_rl.runtime.processes import private_files

T = TypeVar("T")

State = Literal["running", "finished", "failed", "stopped"]

_MAX_EVENTS: Final = 200
_MAX_LOG_BYTES: Final = 8 << 20
"""The number of bytes that are read from the log's end; earlier ones are skipped."""

_LOG_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (\w+) +([\w.]+): (.*)")

_SECRET: Final = re.compile(
    r"(^|[._-])(?i:api_?key|secret|password|passwd|token|authorization|credentials?)$|[A-Z]_(KEY|PAT)$"
)
"""Names of settings whose value is secret: people share reports."""

_FAILED: Final = "the run failed"
"""The beginning of the driver's last log message after an error, see `train`."""

_OWN: Final = "run"
"""The package whose log messages concern the whole run."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the driver's log that the report shows."""

    time: str
    level: str
    source: str
    """The module that logged it."""
    text: str


class _Ended(msgspec.Struct, frozen=True):
    """The part of `summary.json` that the report uses; the other fields differ between releases."""

    trajectories: TrajectoryCounts


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a run folder."""

    name: str
    state: State
    config: Mapping[str, Any]
    changed: Mapping[str, Any]
    """The settings that differ from their defaults."""
    records: Sequence[StepRecord]
    sft_records: Sequence[SftRecord]
    """The steps of a supervised run, which has no others."""
    evaluations: Sequence[EvaluationRecord]
    summary: _Ended | None
    """The summary of the newest incarnation that ended normally."""
    events: Sequence[Event]
    versions: Mapping[str, str]


def write_report(run_dir: Path, out: Path | None = None, failures: Sequence[FailureRow] = ()) -> Path:
    """Write a run's report, readable by the run's user only, like all files of a run.

    Args:
        run_dir: The run folder.
        out: The file to write; None takes `report.html` in the folder.
        failures: Why attempts did not succeed, from the run's ledger.

    Returns:
        The path of the report.

    Raises:
        ConfigError: The folder is no run's, its files are not ours, or the report cannot be written.
    """
    page = render(read_run(run_dir), datetime.now(UTC), failures)
    path = run_dir / REPORT_FILE if out is None else out
    try:
        with private_files():
            replace_file(path, page.encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {path}: {error.strerror}; choose --out FILE"
        ) from error
    return path


def read_run(run_dir: Path) -> RunFiles:
    """Read the files that a run has written so far.

    Raises:
        ConfigError: The folder is no run's, or its files are not ours.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(
            f"{run_dir} is no run folder: there is no config.yaml in it; expected <run.dir>/<run.name> of "
            f"`async-rl train`"
        )
    tree = _undamaged(config_file, _read_config)
    metrics = run_dir / "metrics.jsonl"
    supervised = _is_supervised(tree, metrics)
    records = [] if supervised else step_record_log(metrics).read()
    sft_records = sft_record_log(metrics).read() if supervised else []
    versions = _undamaged(run_dir / "versions.json", lambda file: _decoded(file, dict[str, str]))
    events = list(read_events(run_dir / "logs" / "driver.log"))
    return RunFiles(
        name=str(tree.get("run", {}).get("name", run_dir.resolve().name)),
        state=_state(run_dir, _progress(records, sft_records, tree), events),
        config=redacted(tree),
        changed=_changed(config_file),
        records=records,
        sft_records=sft_records,
        evaluations=evaluation_record_log(run_dir / EVALUATIONS).read(),
        summary=_undamaged(run_dir / "summary.json", lambda file: _decoded(file, _Ended)),
        events=events,
        versions=versions or {},
    )


def _undamaged(file: Path, read: Callable[[Path], T]) -> T:
    """Return what a function reads from a file of the run, or raise ConfigError because it is damaged."""
    try:
        return read(file)
    except (msgspec.MsgspecError, ValueError, OSError, yaml12.YAMLError) as error:
        why = yaml12.describe_error(error) if isinstance(error, yaml12.YAMLError) else str(error)
        remedy = "" if file.name == "config.yaml" else ", or remove it: the report then goes without it"
        raise ConfigError(f"{file} is not what a run writes ({why}): restore it{remedy}") from error


def _read_config(file: Path) -> dict[str, dict[str, Any]]:
    return msgspec.convert(yaml12.load(file.read_text(encoding="utf-8")), dict[str, dict[str, Any]])


def _is_supervised(tree: Mapping[str, Mapping[str, Any]], metrics: Path) -> bool:
    """Return whether a folder belongs to a run of `async-rl sft`, by the first step, else by the config."""
    if (supervised := holds_sft_records(metrics)) is not None:
        return supervised
    data, sft = (tree.get(name, {}) for name in ("data", "sft"))
    return bool(sft.get("path")) and not data.get("path") and not data.get("datasets")


def _progress(
    records: Sequence[StepRecord], sft_records: Sequence[SftRecord], tree: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Return the last step and the number of steps of the whole run, None if it is unknown."""
    if sft_records:
        return sft_records[-1].step, sft_records[-1].num_steps or None
    max_steps = tree.get("run", {}).get("max_steps")
    return records[-1].step if records else 0, max_steps if isinstance(max_steps, int) else None


def read_events(log_file: Path) -> Iterator[Event]:
    """Return the newest warnings, errors and messages about engines and weights of a driver's log."""
    if not log_file.exists():
        return
    with log_file.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _MAX_LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept: deque[Event] = deque(maxlen=_MAX_EVENTS)
    for line in lines:
        if (found := _LOG_LINE.fullmatch(line)) is None:
            continue  # a line of a traceback
        time, level, source, text = found.groups()
        if level in ("WARNING", "ERROR", "CRITICAL") or source.startswith(
            ("async_rl.engines", "async_rl.weights", "async_rl.run")
        ):
            kept.append(Event(time=time, level=level, source=source.removeprefix("async_rl."), text=text))
    yield from kept


def redacted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the values of secret settings, which it knows by their names."""

    def shown(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: shown(str(name), inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [shown(key, inner) for inner in value]
        if isinstance(value, str) and value:
            if _SECRET.search(key):
                return "(hidden)"
            return re.sub(r"(\w://)[^/@\s]+@", r"\1(hidden)@", value)
        return value

    return {str(key): shown(str(key), value) for key, value in tree.items()}


def render(run: RunFiles, now: datetime, failures: Sequence[FailureRow] = ()) -> str:
    """Return the report as HTML."""
    records = run.records
    step, max_steps = _progress(records, run.sft_records, run.config)
    bound = run.config.get("rollout", {}).get("max_staleness")
    max_staleness = bound if isinstance(bound, int) else None
    script = _static(CHART_SCRIPTS)
    drawn = (
        sft_sections(run.sft_records)
        if run.sft_records
        else sections(records, max_staleness, run.evaluations)
    )
    charts = msgspec.json.encode(drawn).decode()
    names, rows = _recent(run)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((STATIC.parent / "report.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        run=run,
        step=step,
        max_steps=max_steps,
        style=_static(STYLES),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        written=now.strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        tiles=sft_tiles(run.sft_records) or tiles(records, max_staleness),
        stages=_stages(run),
        # "<" could end the element that holds the data; in JSON it stands in strings only.
        charts=Markup(charts.replace("<", "\\u003c")),
        facts=_facts(run),
        recent_names=names,
        recent=rows,
        extremes=records[-1].extremes if records else (),
        failures=failures,
        cause=_cause(run),
        config_text=yaml12.dump(run.config),
        compact=compact,
    )


def _static(names: Sequence[str]) -> Markup:
    return Markup("\n").join(Markup((STATIC / name).read_text(encoding="utf-8")) for name in names)


def _stages(run: RunFiles) -> list[FlowStage]:
    """Return where the trajectories are: at the end of the run by its summary, else at the last step."""
    if not run.records:
        return []
    last = run.records[-1]
    trained = sum(record.trajectories for record in run.records)
    if run.summary is not None and run.summary.trajectories.trained == trained:  # none was trained since
        counts = run.summary.trajectories
        return stages(
            trained=trained, dropped=counts.dropped, queued=counts.queued, in_flight=counts.in_flight
        )
    return stages(
        trained=trained,
        dropped=last.dropped_reasons,
        queued=last.queued,
        in_flight=last.in_flight,
    )


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    """Return the run's key figures, from its records."""
    if run.sft_records:
        return _sft_facts(run.sft_records)
    records = run.records
    if not records:
        return []
    last = records[-1]
    trained = sum(record.trajectories for record in records)
    interrupted = sum(record.interrupted for record in records)
    rows = sum(record.routing_rows for record in records)
    invalid = sum(record.routing_rows_invalid for record in records)
    waited = sum(record.wait_s for record in records)
    dropped = sum(stage.count for stage in _stages(run) if stage.label.startswith("dropped"))
    facts = [
        ("time of training", format_duration(last.time_s)),
        ("weight version", str(last.weight_version)),
        ("trajectories trained", f"{trained:,}, {interrupted / max(trained, 1):.0%} interrupted and resumed"),
        ("dropped", f"{dropped:,}"),
        ("tokens trained", f"{sum(record.trained_tokens for record in records):,}"),
        ("throughput", f"{compact(mean(record.tokens_per_s for record in records))} tokens/s, mean"),
        ("staleness", f"at most {max(record.staleness_max for record in records)} versions"),
        ("trainer idle", f"{waited / max(last.time_s, 1e-9):.0%}"),
        ("weight sync", f"{compact(mean(record.sync_s for record in records))} s, mean"),
        ("routing rows", f"{rows:,} checked, {invalid:,} invalid"),
    ]
    if run.summary is not None and run.summary.trajectories.unaccounted:
        facts.append(("unaccounted for", f"{run.summary.trajectories.unaccounted:,} trajectories"))
    return facts


def _sft_facts(records: Sequence[SftRecord]) -> list[tuple[str, str]]:
    last = records[-1]
    return [
        ("time of training", format_duration(last.time_s)),
        ("epochs", str(last.epoch + 1)),
        ("tokens", f"{sum(record.tokens for record in records):,}"),
        ("tokens trained on", f"{sum(record.trained_tokens for record in records):,}"),
        ("throughput", f"{compact(mean(record.tokens_per_s for record in records))} tokens/s, mean"),
        ("updates skipped", f"{sum(record.updates_skipped for record in records):,}"),
    ]


def _recent(run: RunFiles) -> tuple[list[str], list[list[str]]]:
    """Return the table of the latest steps: names of its columns, and its rows, the newest first."""
    columns = SFT_COLUMNS if run.sft_records else STEP_COLUMNS
    records = run.sft_records or run.records
    rows = [[_cell(getattr(record, name)) for name in columns] for record in records[-RECENT:]]
    return list(columns.values()), rows[::-1]


def _cell(value: Figure) -> str:
    return str(value) if isinstance(value, int) else compact(value)


def _state(run_dir: Path, progress: tuple[int, int | None], events: Sequence[Event]) -> State:
    if is_locked(run_dir / ".lock"):
        return "running"
    said = [event.text for event in events if event.source.startswith(_OWN)]
    if said and said[-1].startswith(_FAILED):
        return "failed"
    step, max_steps = progress
    return "finished" if step and step == max_steps else "stopped"


def _cause(run: RunFiles) -> str:
    """Return why a failed run ended; empty for other runs."""
    if run.state != "failed":
        return ""
    last = next(event for event in reversed(run.events) if event.text.startswith(_FAILED))
    return last.text.removeprefix(_FAILED).removeprefix(": ") or "see logs/driver.log in the run's folder"


def describe_end(run_dir: Path) -> str | None:
    """Return when and how the newest incarnation of a run ended; None while it runs, or before it has begun.

    Raises:
        ConfigError: The folder is no run's, or its files are not ours.
    """
    log_file = run_dir / "logs" / "driver.log"
    if is_locked(run_dir / ".lock") or not log_file.exists():
        return None
    run = read_run(run_dir)
    how = {"finished": "it had finished", "failed": f"it failed: {_cause(run)}"}
    ended = datetime.fromtimestamp(log_file.stat().st_mtime).astimezone()
    records = run.sft_records or run.records
    return (
        f"{run_dir} ended at {ended:%Y-%m-%d %H:%M:%S}, after step {records[-1].step if records else 0}: "
        f"{how.get(run.state, 'it was stopped or killed')}"
    )


def _changed(config_file: Path) -> Mapping[str, Any]:
    try:
        changed = changed_fields(load_config(config_file))
    except ConfigError:  # written by another release of async-rl: the report shows the file unchanged
        return {}
    return {key: redacted({key: value})[key] for key, value in changed.items()}


def _decoded(path: Path, kind: type[T]) -> T | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None
