import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from async_rl.config import DataConfig
from async_rl.errors import ConfigError
from async_rl.rollout.dataset import TaskOrder, load_tasks

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


def write_jsonl(folder: Path, *lines: Any) -> Path:
    path = folder / "tasks.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_row_becomes_a_task_when_it_is_jsonl(tmp_path: Path):
    path = write_jsonl(
        tmp_path,
        {"id": 7, "messages": MESSAGES, "answer": 4, "level": "easy", "agent_loop": "mine:Loop"},
        "",
        {"messages": "Say hi."},
        {"prompt": "Say ho."},
    )
    first, second, third = load_tasks(DataConfig(path=str(path)))
    assert (first.task_id, first.messages, first.answer) == ("7", MESSAGES, 4)
    assert (first.metadata, first.agent_loop) == ({"level": "easy"}, "mine:Loop")
    assert second.messages == [{"role": "user", "content": "Say hi."}]
    assert (second.task_id, second.answer, second.metadata, second.agent_loop) == ("row-1", None, {}, None)
    assert third.messages == [{"role": "user", "content": "Say ho."}]


def test_keys_are_the_configs_when_it_names_others(tmp_path: Path):
    path = write_jsonl(tmp_path, {"q": "Hi?", "a": 1, "key": "x", "answer": "kept"})
    config = DataConfig(path=str(path), messages_key="q", answer_key="a", id_key="key")
    (task,) = load_tasks(config)
    assert (task.task_id, task.answer, task.metadata) == ("x", 1, {"answer": "kept"})


def test_tasks_are_equal_when_the_same_rows_are_parquet(tmp_path: Path):
    call = {"function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"id": "a", "messages": MESSAGES, "answer": "4", "level": 1},
        {
            "id": "b",
            "messages": [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "4"},
            ],
            "answer": "5",
            "level": 2,
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    from_parquet = load_tasks(DataConfig(path=str(tmp_path / "tasks.parquet")))
    assert from_parquet == load_tasks(DataConfig(path=str(write_jsonl(tmp_path, *rows))))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("{", "not a JSON object"),
        ("[1, 2]", "the row is a list; expected an object with 'messages'"),
        ({}, "'messages' is missing; expected a list of chat messages or a prompt string"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ""}, "'messages' is empty"),
        ({"messages": {"role": "user"}}, "'messages' is an object"),
        ({"messages": ["hi"]}, r"'messages'\[0\] is a string; expected an object with 'role' and 'content'"),
        ({"messages": [{"content": "hi"}]}, r"'messages'\[0\] has no 'role'"),
        ({"messages": [{"role": "user"}]}, r"'messages'\[0\]: 'content' is missing; expected a string"),
        ({"messages": [{"role": "user", "content": 3}]}, r"'content' is int 3; expected a string"),
        ({"messages": "hi", "id": 1.5}, "'id' is float 1.5; expected a string or an integer"),
        ({"messages": "hi", "id": True}, "'id' is a boolean"),
        ({"messages": "hi", "agent_loop": 3}, "'agent_loop' is int 3; expected `module:Class` or null"),
    ],
)
def test_config_error_names_file_and_line_when_a_row_is_malformed(tmp_path: Path, row: Any, error: str):
    path = write_jsonl(tmp_path, {"messages": "fine"}, "", row)
    with pytest.raises(ConfigError, match=error) as raised:
        load_tasks(DataConfig(path=str(path)))
    assert str(raised.value).startswith(f"{path}:3: ")


def test_config_error_names_both_lines_when_an_id_is_used_twice(tmp_path: Path):
    path = write_jsonl(tmp_path, {"id": "a", "messages": "1"}, {"id": "a", "messages": "2"})
    with pytest.raises(ConfigError, match=f"{path}:2: the 'id' 'a' was used before, at {path}:1"):
        load_tasks(DataConfig(path=str(path)))


def test_config_error_names_the_row_when_parquet_has_a_bad_one(tmp_path: Path):
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"messages": ["fine", None]}), path)
    with pytest.raises(ConfigError, match=f"{path} row 2: 'messages' is missing"):
        load_tasks(DataConfig(path=str(path)))


def test_config_error_when_a_parquet_file_is_not_one(tmp_path: Path):
    path = tmp_path / "tasks.parquet"
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        load_tasks(DataConfig(path=str(path)))


def test_config_error_when_a_line_is_not_utf8(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(ConfigError, match=f"{path}:1: not "):
        load_tasks(DataConfig(path=str(path)))


def test_config_error_when_there_is_nothing_to_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no file"):
        load_tasks(DataConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match="has no rows"):
        load_tasks(DataConfig(path=str(write_jsonl(tmp_path, ""))))
    (tmp_path / "tasks.csv").touch()
    with pytest.raises(ConfigError, match=r"ends in '\.csv'; expected \.jsonl or \.parquet"):
        load_tasks(DataConfig(path=str(tmp_path / "tasks.csv")))


def test_every_epoch_has_every_task_once_in_its_own_order_when_shuffled():
    order = TaskOrder(50, seed=3, shuffle=True)
    epochs = [[order.task_at(epoch * 50 + i) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.epoch_at(149) == 2


def test_order_depends_on_seed_and_position_alone():
    order = TaskOrder(20, seed=1, shuffle=True)
    forwards = [order.task_at(position) for position in range(100)]
    again = TaskOrder(20, seed=1, shuffle=True)
    assert [again.task_at(position) for position in reversed(range(100))] == forwards[::-1]
    other = TaskOrder(20, seed=2, shuffle=True)
    assert [other.task_at(position) for position in range(100)] != forwards


def test_order_is_the_files_when_not_shuffled():
    order = TaskOrder(3, seed=1, shuffle=False)
    assert [order.task_at(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="expected at least 1"):
        TaskOrder(0, seed=1, shuffle=True)
