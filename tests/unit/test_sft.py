"""Conversations as tokens and masks, the order of steps, and the driver on ranks that only record calls."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from async_rl.cli.main import main
from async_rl.config import SftConfig, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.errors import ConfigError
from async_rl.observability.page.charts import sft_sections
from async_rl.observability.page.html_report import read_run
from async_rl.observability.page.tiles import sft_tiles
from async_rl.observability.sft_record import sft_record_log
from async_rl.sft import sft_run as sft_run
from async_rl.sft.examples import load_conversations
from async_rl.sft.schedule import SftBatch, learning_rate, plan_batches
from async_rl.sft.sft_run import sft
from async_rl.trainer_protocol import Saved, StepResult, TrainerState
from tests.support.run_config import MOE, write_weights
from tests.support.templates_of_models import chat_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
MESSAGES = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path, name: str = "ours", **changes: Any):
    return load_conversations(str(path), "sft.path", SftConfig(path=str(path), **changes), chat_of(name))


def by_mask(row, chat) -> list[tuple[bool, str]]:
    """Return the text of each run of equal mask."""
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(int))) + 1
    decode = chat.tokenizer.decode
    return [
        (bool(row.loss_mask[part[0]]), decode(row.token_ids[part].tolist(), skip_special_tokens=False))
        for part in np.split(np.arange(len(row.token_ids)), edges)
    ]


def test_mask_of_two_turns_with_a_tool_call_is_that_written_by_hand(tmp_path):
    ((row,), _) = rows_of(write(tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS}))
    (not_prompt, prompt), *rest = by_mask(row, chat_of("ours"))
    assert not not_prompt
    assert prompt.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "add"' in prompt
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
    result = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert rest == [(True, call), (False, result), (True, "It is 4.<|im_end|>")]


def test_only_the_last_turn_is_trained_on_when_asked_and_turns_of_weight_0_never_are(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": MESSAGES})
    ((last,), _) = rows_of(path, loss_on="last_assistant")
    assert [text for trained, text in by_mask(last, chat_of("ours")) if trained] == ["It is 4.<|im_end|>"]
    weighted = [*MESSAGES[:3], MESSAGES[3] | {"weight": 0}]
    ((first,), _) = rows_of(write(tmp_path / "b.jsonl", {"messages": weighted}))
    (told,) = [text for trained, text in by_mask(first, chat_of("ours")) if trained]
    assert told.startswith("<tool_call>")


def test_what_roles_of_a_list_say_is_trained_on_when_there_is_one(tmp_path):
    messages = [{"role": "user", "content": "2 + 2?"}, *MESSAGES[1:3], {"role": "user", "content": "Well?"}]
    path = write(tmp_path / "a.jsonl", {"messages": [*messages, MESSAGES[3]]})
    chat = chat_of("ours")
    ((plain,), _), ((row,), _) = rows_of(path), rows_of(path, loss_on=["assistant", "user"])
    text = [chat.tokenizer.decode(r.token_ids.tolist(), skip_special_tokens=False) for r in (plain, row)]
    assert text[0] == text[1]
    trained = [text for mask, text in by_mask(row, chat) if mask]
    call = next(text for mask, text in by_mask(plain, chat) if mask)
    assert trained == ["2 + 2?<|im_end|>", call, "Well?<|im_end|>", "It is 4.<|im_end|>"]
    ((asked,), _) = rows_of(path, loss_on=["user"])
    assert [text for mask, text in by_mask(asked, chat) if mask] == ["2 + 2?<|im_end|>", "Well?<|im_end|>"]


def test_conversations_and_tools_are_read_from_the_keys_that_the_config_names(tmp_path):
    ((usual,), _) = rows_of(write(tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS}))
    path = write(tmp_path / "b.jsonl", {"talk": MESSAGES, "functions": TOOLS})
    ((named,), _) = rows_of(path, keys={"messages": "talk", "tools": "functions"})
    assert named.token_ids.tolist() == usual.token_ids.tolist()
    ((without,), _) = rows_of(path, keys={"messages": "talk"})
    assert len(without.token_ids) < len(usual.token_ids)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x"}, "expected a list of messages; its keys are 'prompt'"),
        ({"messages": [{"content": "x"}]}, "has no role"),
        ({"messages": MESSAGES[:3]}, "does not end with an assistant message"),
        ({"messages": [MESSAGES[0], MESSAGES[3] | {"weight": 0}]}, "messages of assistant have weight 0"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"tool_calls": [{"id": "1"}]}]}, "names no function"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"tool_calls": ["add"]}]}, "names no function"),
        ({"messages": MESSAGES, "tools": {"name": "add"}}, "'tools' is an object; expected a list"),
        ({"token_ids": [1, 2, 3], "loss_mask": [0, 1]}, "3 token_ids and 2 loss_mask"),
        ({"token_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}, "trains on no token"),
    ],
)
def test_file_and_line_are_named_when_a_row_cannot_be_used(tmp_path, row, words):
    path = write(tmp_path / "a.jsonl", {"messages": MESSAGES}, row)
    with pytest.raises(ConfigError, match=r"a\.jsonl:2") as caught:
        rows_of(path)
    assert words in str(caught.value)


CALLED = "m.tool_calls[0].id + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | tojson"


@pytest.mark.parametrize(
    ("content", "num_calls", "shown", "lost"),
    [
        ("I add.", 1, f"m.content + ({CALLED} if m.tool_calls else '')", None),
        ("", 1, "m.content", "add"),
        ("I add.", 1, "m.content", "add"),
        ("", 2, f"m.content + ({CALLED} if m.tool_calls else '')", "add"),
        ("I add.", 1, f"({CALLED} if m.tool_calls else m.content)", "I add."),
        ("<think>?</think>I add.", 1, f"({CALLED} if m.tool_calls else m.content)", "I add."),
    ],
)
def test_calls_keep_their_ids_and_nothing_is_left_out(tmp_path, content, num_calls, shown, lost):
    call = {"id": "call_7", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call] * num_calls}
    path = write(tmp_path / "a.jsonl", {"messages": [MESSAGES[0], turn]})
    tokenizer = copy.copy(chat_of("ours").tokenizer)
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + {shown} + '<|im_end|>\\n' }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat, config = ChatFormat(tokenizer), SftConfig(path=str(path))
    if lost is None:
        ((example,), _) = load_conversations(str(path), "sft.path", config, chat)
        assert 'I add.call_7add{"a": 1}' in chat.decode(example.token_ids)
    else:
        with pytest.raises(ConfigError, match=f"leaves out '{lost}' of an assistant message with tool calls"):
            load_conversations(str(path), "sft.path", config, chat)


def test_file_and_line_are_named_when_a_role_is_not_known(tmp_path):
    messages = [MESSAGES[0], {"role": "critic", "content": "Really?"}, MESSAGES[3]]
    path = write(tmp_path / "a.jsonl", {"messages": MESSAGES}, {"messages": messages})
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the chat template leaves out .* role 'critic'"):
        rows_of(path, "qwen3")
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*'asistant'\]: its roles are user, assistant, tool"):
        rows_of(path, loss_on=["asistant"])


def test_long_conversations_are_refused_or_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", {"token_ids": [1] * 9, "loss_mask": [1] * 9}, {"messages": MESSAGES})
    with pytest.raises(ConfigError, match=r"a\.jsonl:2.*long_rows=filter"):
        rows_of(path, max_tokens=10)
    rows, left_out = rows_of(path, max_tokens=10, long_rows="filter")
    assert (len(rows), left_out) == (1, 1)


def test_every_row_comes_once_an_epoch_in_batches_of_so_many_tokens():
    lengths = [3, 5, 2, 9, 4, 4, 1]
    plan = plan_batches(lengths, batch_tokens=8, epochs=3, seed=1)
    for epoch in range(3):
        mine = [b for b, number in zip(plan.batches, plan.epochs, strict=True) if number == epoch]
        assert sorted(row for batch in mine for row in batch) == list(range(7))
    orders = [
        [r for b, n in zip(plan.batches, plan.epochs, strict=True) if n == e for r in b] for e in (0, 1)
    ]
    assert orders[0] != orders[1]
    assert all(sum(lengths[r] for r in batch) <= 8 or batch == (3,) for batch in plan.batches)
    assert plan == plan_batches(lengths, batch_tokens=8, epochs=3, seed=1)
    longer = plan_batches(lengths, batch_tokens=8, epochs=4, seed=1)
    assert longer.batches[: len(plan.batches)] == plan.batches


@pytest.mark.parametrize(
    ("decay", "middle", "last"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_learning_rate_rises_and_falls_as_computed_by_hand(decay, middle, last):
    rates = [learning_rate(step, 12, peak=1.0, warmup_steps=2, decay=decay) for step in range(13)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert (rates[7], rates[12]) == pytest.approx((middle, last))
    assert rates[1:] == sorted(rates[1:], reverse=True)


class RecordingRanks:
    """Record their input; the loss is the mean of the trained tokens' ids."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, list[int]]] = []
        self.published: list[tuple[str, int]] = []
        self.at_step: dict[int, Any] = {}
        self.step = 0

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        path = Path(checkpoint_dir or "") / "state.json"
        return TrainerState(**json.loads(path.read_text())) if path.exists() else TrainerState(step=0)

    async def train_step(self, batch: SftBatch, step: int) -> StepResult:
        trained = batch.rows.token_ids[batch.rows.loss_mask]
        if batch.train:
            self.steps.append((step, batch.learning_rate, batch.rows.token_ids.tolist()))
            self.step = step
            if (act := self.at_step.get(step)) is not None:
                act()
                for _ in range(3):  # the event loop handles a signal in its next turns
                    await asyncio.sleep(0)
        figures = {"loss": float(trained.mean()), "grad_norm": 1.0, "updates_skipped": 0.0}
        figures |= {"tokens": float(batch.rows.num_tokens), "trained_tokens": float(len(trained))}
        return StepResult(step=step, metrics=figures)

    async def publish(self, directory: str, weight_version: int) -> None:
        Path(directory).mkdir(exist_ok=True)
        (Path(directory) / "config.json").write_text("{}")
        self.published.append((directory, weight_version))

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        (Path(directory) / "state.json").write_text(json.dumps({"step": self.step, "extra": extra}))

    async def saved_checkpoint(self, wait: bool) -> Saved:
        return Saved(step=self.step)

    async def close(self) -> None: ...


def make_run(tmp_path: Path, monkeypatch, **settings: Any) -> Path:
    monkeypatch.setattr(sft_run, "load_chat_format", lambda *_: chat_of("ours"))
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MOE))
    write_weights(tmp_path / "model")
    rows = [{"token_ids": [n, n, n], "loss_mask": [0, 1, 1]} for n in range(6)]
    path = write(tmp_path / "data.jsonl", *rows)
    held_out = [
        {"token_ids": [10, 20], "loss_mask": [0, 1]},
        {"token_ids": [1, 40, 40, 40], "loss_mask": [0, 1, 1, 1]},
    ]
    tree = {
        "run": {"name": "warm", "dir": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model")},
        "trainer": {"checkpoint_every": 2},
        "sft": {
            "path": str(path),
            "validation": str(write(tmp_path / "held_out.jsonl", *held_out)),
            "max_tokens": 16,
            "batch_tokens": 3,
            "decay": "constant",
            "lr": 1.0,
            "validate_every": 4,
            **settings,
        },
    }
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def opened(ranks: RecordingRanks):
    @asynccontextmanager
    async def open_ranks(config, run_dir):
        assert config.trainer.worker == "trainer.sft:SftWorker"
        assert config.routing.replay == "off"
        yield ranks

    return open_ranks


def test_all_steps_are_taken_and_the_model_is_written(tmp_path, monkeypatch, capsys):
    ranks = RecordingRanks()
    config = make_run(tmp_path, monkeypatch)
    assert sft(config, (), opened(ranks)) == 0
    assert sorted(ids[0] for _, _, ids in ranks.steps) == list(range(6))
    run_dir = tmp_path / "runs" / "warm"
    records = sft_record_log(run_dir / "metrics.jsonl").read()
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.loss for r in records] == [float(ids[0]) for _, _, ids in ranks.steps]
    # Of all tokens alike, though one is in a batch of its own: (20 + 3 * 40) / 4.
    assert [r.validation_loss for r in records] == [None, None, None, 35.0, None, 35.0]
    assert ranks.published == [(str(run_dir / "hf"), 6)]
    out = capsys.readouterr().out
    assert "6 conversations, 18 tokens, 67% of them trained on" in out
    assert "sft: 6 of 6 steps after" in out
    assert sft(config, (), opened(RecordingRanks())) == 0
    assert "is complete" in capsys.readouterr().out


def test_end_and_place_of_a_run_are_those_of_its_config(tmp_path, monkeypatch):
    ranks, out = RecordingRanks(), str(tmp_path / "mine")
    config = make_run(tmp_path, monkeypatch, max_steps=4, out=out)
    assert sft(config, (), opened(ranks)) == 0
    assert len(ranks.steps) == 4
    assert ranks.published == [(out, 4)]


def test_learning_rates_of_a_run_are_those_of_its_config(tmp_path, monkeypatch):
    ranks = RecordingRanks()
    config = make_run(tmp_path, monkeypatch, warmup_steps=2, decay="linear", lr=8.0)
    assert sft(config, (), opened(ranks)) == 0
    expected = [learning_rate(step, 6, peak=8.0, warmup_steps=2, decay="linear") for step in range(6)]
    assert [rate for _, rate, _ in ranks.steps] == expected


def test_the_ranks_run_the_worker_that_the_config_names():
    tree = {"model": {"path": "m"}, "sft": {"path": "x.jsonl", "worker": "mine:Worker"}}
    assert sft_run.sft_config(parse_config(tree)).trainer.worker == "mine:Worker"


def test_no_reference_and_no_critic_are_built():
    trainer = {"loss": {"advantages": "gae", "kl": {"coefficient": 0.1}}, "critic": {"lr": 1e-3}}
    found = sft_run.sft_config(
        parse_config({"model": {"path": "m"}, "sft": {"path": "x.jsonl"}, "trainer": trainer})
    ).trainer
    assert (found.loss.advantages, found.loss.kl.coefficient, found.critic.lr) == ("reinforce++", 0, 1e-5)


def test_the_report_of_a_finished_run_has_its_figures(tmp_path, monkeypatch, capsys):
    config = make_run(tmp_path, monkeypatch)
    assert sft(config, (), opened(RecordingRanks())) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["report", "warm"]) == 0
    report = (tmp_path / capsys.readouterr().out.strip()).read_text()
    run = read_run(tmp_path / "runs" / "warm")
    assert run.state == "finished"
    assert "step <b>6</b> of 6" in report
    values = {tile.name: tile.value for tile in sft_tiles(run.sft_records)}
    assert values["validation-loss"] == "35"
    charts = {chart.name for section in sft_sections(run.sft_records) for chart in section.charts}
    assert all(name in report for name in charts)
    assert "Where the trajectories went" not in report


def test_a_run_goes_on_where_its_checkpoint_was_written(tmp_path, monkeypatch):
    whole, first, second = RecordingRanks(), RecordingRanks(), RecordingRanks()
    config = make_run(tmp_path, monkeypatch)
    assert sft(config, ["run.name=whole"], opened(whole)) == 0

    def fail() -> None:
        raise RuntimeError("out of memory")

    first.at_step[5] = fail
    assert sft(config, (), opened(first)) == 1
    assert sft(config, (), opened(second)) == 0
    assert first.steps[:4] + second.steps == whole.steps
    records = sft_record_log(tmp_path / "runs" / "warm" / "metrics.jsonl").read()
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_of_other_batches_is_refused(tmp_path, monkeypatch):
    config = make_run(tmp_path, monkeypatch)
    assert sft(config, (), opened(RecordingRanks())) == 0
    with pytest.raises(ConfigError, match=r"has consumed 6 batches .* set back sft\.path, sft\.batch_tokens"):
        sft(config, ["sft.batch_tokens=6", "sft.epochs=4"], opened(RecordingRanks()))
    assert sft(config, ["sft.epochs=2"], opened(more := RecordingRanks())) == 0
    assert [step for step, _, _ in more.steps] == [7, 8, 9, 10, 11, 12]


def test_the_first_signal_ends_a_run_with_a_checkpoint(tmp_path, monkeypatch):
    ranks = RecordingRanks()

    ranks.at_step[3] = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert sft(make_run(tmp_path, monkeypatch), (), opened(ranks)) == 130
    assert (len(ranks.steps), ranks.published) == (3, [])
    state = json.loads((tmp_path / "runs" / "warm" / "checkpoints" / "state.json").read_text())
    assert state["step"] == 3
    assert read_run(tmp_path / "runs" / "warm").state == "stopped"


def test_what_is_missing_is_said():
    tree: dict[str, Any] = {"model": {"path": "m"}}
    config = parse_config(tree | {"sft": {"path": "x.jsonl"}})
    with pytest.raises(ConfigError, match=r"sft\.path is missing"):
        sft_run.sft_config(parse_config(tree | {"data": {"path": "x.jsonl"}}))
    assert sft_run.sft_config(config).trainer.optimizer.lr == 1e-5
