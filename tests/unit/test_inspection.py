"""`async-rl inspect` and its views of a trajectory."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.cli.inspection.show import show_trajectory
from async_rl.cli.inspection.trajectory_view import decoder, role_of, token_numbers, view_trajectory
from async_rl.cli.main import main
from async_rl.config import load_config
from async_rl.config.reference import resolved_yaml
from async_rl.data.chat_format import load_chat_format
from async_rl.errors import AgentLoopError
from async_rl.observability.text_console import TextConsole
from async_rl.store.archive import Archive, without_routing
from async_rl.store.ledger import Ledger
from async_rl.types import Context, Outcome, Sampled, Segment, Trajectory, TurnRecord
from tests.support.run_config import write_run
from tests.support.trajectories import archive_failure, archive_trajectory, make_trajectory

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'


def sampled(ids: np.ndarray, version: int, reason: str = "stop", low: float = -0.5) -> Sampled:
    log_probs = np.full(len(ids), -0.25, np.float32)
    log_probs[-1] = low
    return Sampled(
        token_ids=ids,
        rollout_log_probs=log_probs,
        weight_version=version,
        engine_id=f"engine-{version % 2}",
        finish_reason=reason,
    )


@pytest.fixture
def trajectory(calculator: Path) -> Trajectory:
    """A call of the calculator that a weight update interrupted, and an answer."""
    chat = load_chat_format(calculator / "model")

    def ids(text: str) -> np.ndarray:
        return np.array(chat.tokenizer.encode(text, add_special_tokens=False), np.int32)

    call, answer = ids(CALL + "<|im_end|>"), ids("2 + 2 = 4.<|im_end|>")
    segments: list[Segment] = [
        Context(token_ids=chat.prompt_ids([{"role": "user", "content": "What is 2 + 2?"}])),
        sampled(call[:9], 3, "abort"),
        sampled(call[9:], 4),
        Context(token_ids=chat.append_ids([{"role": "tool", "content": "4"}])),
        sampled(answer, 4, low=-7.0),
    ]
    return Trajectory(
        trajectory_id="0198aaaa" + "0" * 24,
        group_id="g",
        task_id="sum-1",
        segments=tuple(segments),
        trace=None,
        outcome=Outcome(
            stop_reason="completed",
            reward=1.0,
            reward_parts={"reward": 1.0, "format": 0.5},
            num_turns=2,
            num_tool_calls=1,
            num_interruptions=1,
            num_resumes=1,
        ),
    )


def printed(trajectory: Trajectory, calculator: Path, *, special: bool = False) -> str:
    decode = decoder(load_chat_format(calculator / "model"), special=special)
    out = io.StringIO()
    console = TextConsole(file=out, width=140, force_terminal=False, no_color=True)
    show_trajectory(console, view_trajectory(without_routing(trajectory), decode))
    return out.getvalue()


def test_turns_tools_and_versions_are_told_apart_in_words(trajectory: Trajectory, calculator: Path) -> None:
    text = printed(trajectory, calculator)
    lines = text.splitlines()
    headings = [line.split("·")[0].strip("─ ") for line in lines if " tokens, " in line and "·" in line]
    assert headings == ["prompt", "turn 1", "tool", "turn 2"]
    assert "⟨v3 engine-1⟩<tool_call>" in text
    assert "⟨abort → v4 engine-0⟩" in text
    assert "2 + 2 = 4.⟨stop⟩" in text
    assert "1.000 (format 0.500)" in text
    assert "masked" in next(line for line in lines if "── tool" in line or "tool ·" in line)
    assert "least -7.000 ('<|im_end|>')" not in text
    assert "<|im_start|>" not in text
    assert "<|im_start|>assistant" in printed(trajectory, calculator, special=True)
    assert "\x1b" not in text


def test_the_whole_text_is_there_once_when_a_character_is_cut_in_two(
    trajectory: Trajectory, calculator: Path
) -> None:
    chat = load_chat_format(calculator / "model")
    ids = np.array(chat.tokenizer.encode("a😀b", add_special_tokens=False), np.int32)
    assert len(ids) > 3, "the character is of several tokens"
    for cut in range(1, len(ids)):
        parts = (trajectory.segments[0], sampled(ids[:cut], 1, "abort"), sampled(ids[cut:], 2))
        _, policy = view_trajectory(
            without_routing(replace(trajectory, segments=parts)), decoder(chat)
        ).passages
        assert policy.text == "a😀b"
        assert "".join(call.text for call in policy.calls) == "a😀b"
        assert "\N{REPLACEMENT CHARACTER}" not in policy.calls[0].text


def test_tokens_that_grew_too_old_are_masked(trajectory: Trajectory) -> None:
    portrait = view_trajectory(without_routing(trajectory), token_numbers, oldest_trained=4)
    first = portrait.passages[1]
    assert [call.masked for call in first.calls] == [9, 0]
    assert portrait.trained_tokens == trajectory.num_sampled_tokens - 9
    assert portrait.weight_versions == (3, 4)


def test_a_branch_shows_what_it_inherits_and_what_was_noted_of_its_turns(
    trajectory: Trajectory, calculator: Path
) -> None:
    last = len(trajectory.segments) - 1
    start = trajectory.num_tokens - len(trajectory.segments[last].token_ids)
    record = TurnRecord(
        start=start, end=trajectory.num_tokens, finish_reason="stop", engine_s=1.5, metadata={"depth": 2}
    )
    branch = replace(trajectory, num_inherited=last, turns=(record,))
    portrait = view_trajectory(without_routing(branch), token_numbers)
    assert [(p.role, p.trained) for p in portrait.passages] == [
        ("prompt", False),
        ("policy", False),
        ("user", False),
        ("policy", True),
    ]
    assert portrait.trained_tokens == len(trajectory.segments[last].token_ids)
    text = printed(branch, calculator)
    assert "tokens, inherited" in text
    assert "1.50 s · depth=2" in text


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("\nuser\n<tool_response>\n4\n</tool_response>\nassistant\n", "tool"),
        ("<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n", "tool"),
        ("ipython\n\n4assistant\n\n", "tool"),
        ("<|observation|>\n4<|assistant|>", "tool"),
        ("<｜tool▁outputs▁begin｜>4", "tool"),
        ("\nuser\nYou wrote <tool_call>, why?\nassistant\n", "user"),
        ("<|im_start|>user\nToo long.<|im_end|>", "user"),
    ],
)
def test_who_spoke_is_told_by_how_templates_begin_it(text: str, role: str) -> None:
    assert role_of(text) == role


def test_log_probs_are_of_sampled_tokens_alone(trajectory: Trajectory) -> None:
    figures = view_trajectory(without_routing(trajectory), token_numbers).log_probs
    assert figures is not None
    values = trajectory.rollout_log_probs[trajectory.response_mask]
    assert figures.mean == pytest.approx(float(values.mean()))
    assert figures.min == -7.0


def test_an_attempt_that_wrote_nothing_can_be_shown(calculator: Path) -> None:
    empty = replace(
        make_trajectory("a", routing=False), segments=(), outcome=Outcome(stop_reason="error", error="x")
    )
    assert "0 tokens" not in printed(empty, calculator)
    assert "error" in printed(empty, calculator)


@pytest.fixture
def run_dir(tmp_path: Path, trajectory: Trajectory, calculator: Path) -> Path:
    """The folder of a run that trained one trajectory, dropped one and failed another."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    config = load_config(write_run(tmp_path), [f"model.path={calculator / 'model'}"])
    (folder / "config.yaml").write_text(resolved_yaml(config))
    archive = Archive(folder / "trajectories.sqlite", keep=10)
    archive_trajectory(archive, trajectory)
    archive.trained([trajectory.trajectory_id], 5)
    archive_trajectory(archive, make_trajectory("0198bbbb1", sampled=[(30, 1)], reward=0.0))
    archive.dropped(["0198bbbb1"], "too_stale")
    archive_failure(
        archive, make_trajectory("0198bbbb2", reward=None), AgentLoopError("agent loop x raised KeyError")
    )
    archive.close()
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.record_dispatch("g", "sum-1", 7, [trajectory.trajectory_id], 3)
    ledger.close()
    return folder


def table(run_dir: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert main(["inspect", str(run_dir), "--json", *options]) == 0
    return [row["trajectory_id"] for row in json.loads(capsys.readouterr().out)]


def test_the_table_is_filtered_and_sorted(
    run_dir: Path, trajectory: Trajectory, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trajectory.trajectory_id
    assert table(run_dir, capsys) == ["0198bbbb2", "0198bbbb1", whole]
    assert table(run_dir, capsys, "--status", "dropped", "--reason", "STALE") == ["0198bbbb1"]
    assert table(run_dir, capsys, "--min-reward", "0.5") == [whole]
    assert table(run_dir, capsys, "--max-reward", "0.5") == ["0198bbbb1"]
    assert table(run_dir, capsys, "--sort", "longest", "--limit", "1") == [whole]
    assert table(run_dir, capsys, "--sort", "most-interrupted")[0] == whole
    assert table(run_dir, capsys, "--task", "sum-1", "--reason", "KeyError") == []


def test_one_of_the_table_is_shown_with_its_history_when_its_id_is_begun(
    run_dir: Path,
    trajectory: Trajectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(run_dir)]) == 0
    out = capsys.readouterr().out
    for shown in ("trained in step 5", "dropped: too_stale", "in flight 1, queued 0"):
        assert shown in out
    assert main(["inspect", str(run_dir), "0198a"]) == 0
    out = capsys.readouterr().out
    assert "trained in step 5" in out
    assert "in the ledger: in_flight; task at position 7" in out
    assert main(["inspect", str(run_dir), "0198a", "--json"]) == 0
    portrait = json.loads(capsys.readouterr().out)
    assert [passage["role"] for passage in portrait["passages"]] == ["prompt", "policy", "tool", "policy"]
    assert portrait["passages"][1]["calls"][0]["finish_reason"] == "abort"
    segments = iter(trajectory.segments)
    for passage in portrait["passages"]:  # a turn of the policy is one segment per engine call
        its = list(islice(segments, max(1, len(passage["calls"]))))
        assert passage["token_ids"] == [token for each in its for token in each.token_ids.tolist()]
        sampled = [each for each in its if isinstance(each, Sampled)]
        log_probs = [value for each in sampled for value in each.rollout_log_probs.tolist()]
        assert passage["rollout_log_probs"] == log_probs
    assert sum(len(passage["rollout_log_probs"]) for passage in portrait["passages"]) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["0198"], "several trajectories begin with '0198'"),
        (["ffff"], "no trajectory begins with 'ffff' among the 3"),
    ],
)
def test_one_sentence_when_an_id_names_not_exactly_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["inspect", str(run_dir), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_token_numbers_are_shown_when_the_model_is_gone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "config.yaml").unlink()
    assert main(["inspect", str(run_dir), "0198bbbb1"]) == 0
    assert "tokens are shown as numbers" in capsys.readouterr().out
