import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from async_rl.config import DataConfig, DatasetConfig, SourceConfig
from async_rl.data import dataset as dataset_module
from async_rl.data.dataset import PromptRule, load_tasks, load_validation, prompt_rule
from async_rl.errors import ConfigError
from async_rl.types import Task
from tests.support.run_config import config_with

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


NAMED_FIELDS: dict[str, tuple[Any, Callable[[Task], Any]]] = {
    "messages": (MESSAGES, lambda task: task.messages),
    "answer": ("4", lambda task: task.answer),
    "id": ("x", lambda task: task.task_id.rpartition("/")[2]),
    "agent_loop": ("mine:Loop", lambda task: task.agent_loop),
    "reward": ("mine:reward", lambda task: task.reward),
    "data_source": ("gsm8k", lambda task: task.data_source),
    "tools": ([{"type": "function", "function": {"name": "f"}}], lambda task: task.tools),
    "metadata": ({"level": 3}, lambda task: task.metadata),
}


def tasks_of(section: str, path: Path, **settings: Any) -> list[Task]:
    """The tasks of one file, which a section of the config names together with other settings."""
    if section == "data":
        return list(load_tasks(DataConfig(path=str(path), **settings)))
    if section == "datasets":
        return list(load_tasks(DataConfig(datasets=[DatasetConfig(path=str(path), **settings)])))
    source = SourceConfig(path=str(path), **settings)
    (found,) = load_validation(DataConfig(path="x", validation=[source]))
    return list(found.tasks)


@pytest.mark.parametrize("section", ["data", "datasets", "validation"])
@pytest.mark.parametrize("key", NAMED_FIELDS)
def test_a_field_is_read_from_the_key_that_its_section_names(tmp_path: Path, section: str, key: str):
    value, field = NAMED_FIELDS[key]
    path = write_jsonl(tmp_path, {"messages": "hi", "own": value})
    (plain,), (named,) = tasks_of(section, path), tasks_of(section, path, keys={key: "own"})
    assert field(named) == value != field(plain)


@pytest.mark.parametrize("section", ["data", "datasets", "validation"])
def test_a_section_names_the_schema_of_its_file(tmp_path: Path, section: str):
    verl = {"prompt": MESSAGES, "reward_model": {"ground_truth": "4"}, "data_source": "gsm8k"}
    path = write_jsonl(tmp_path, verl)
    (found,), (plain,) = tasks_of(section, path), tasks_of(section, path, schema="plain")
    assert (found.answer, plain.answer) == ("4", None)


@pytest.mark.parametrize("section", ["datasets", "validation"])
def test_a_file_has_the_name_that_its_section_gives_it(tmp_path: Path, section: str):
    path = write_jsonl(tmp_path, {"id": 1, "messages": "hi"})
    source = {"path": str(path), "name": "mine"}
    if section == "datasets":
        config = DataConfig(datasets=[DatasetConfig(**source), *several(tmp_path, None).datasets])
        assert load_tasks(config)[0].task_id == "mine/1"
    else:
        (found,) = load_validation(DataConfig(path="x", validation=[SourceConfig(**source)]))
        assert found.name == "mine"


QUESTIONS = [
    {"question": 'Say "a,\nb".', "final": "4"},
    {"question": "Ünï", "final": "5"},
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tasks.json", json.dumps(QUESTIONS, indent=1)),
        ("tasks.json", "".join(json.dumps(each) + "\n" for each in QUESTIONS)),
        ("tasks.json", "\ufeff" + json.dumps(QUESTIONS)),
        ("tasks.csv", 'question,final\r\n"Say ""a,\nb"".",4\r\n\r\nÜnï,5\r\n'),
        ("tasks.csv", '\ufeffquestion,final\n"Say ""a,\nb"".",4\nÜnï,5'),
    ],
    ids=["list", "lines", "list with a byte-order mark", "csv of Windows", "csv with a byte-order mark"],
)
def test_tasks_are_equal_when_the_same_rows_are_json_or_csv(tmp_path: Path, name: str, content: str):
    keys = {"messages": "question", "answer": "final"}
    expected = list(load_tasks(DataConfig(path=str(write_jsonl(tmp_path, *QUESTIONS)), keys=keys)))
    (tmp_path / name).write_bytes(content.encode())
    assert list(load_tasks(DataConfig(path=str(tmp_path / name), keys=keys))) == expected


def test_a_cell_of_csv_may_be_longer_than_pythons_default(tmp_path: Path):
    (tmp_path / "long.csv").write_text(f"prompt\n{'x' * 200_000}\n")
    (task,) = load_tasks(DataConfig(path=str(tmp_path / "long.csv")))
    assert len(task.messages[0]["content"]) == 200_000


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
    assert list(from_parquet) == list(load_tasks(DataConfig(path=str(write_jsonl(tmp_path, *rows)))))


def test_objects_have_no_nulls_of_other_rows_when_they_are_parquet(tmp_path: Path):
    """A column of objects has the keys of all of its rows: missing ones are null."""
    tools = [
        {"name": "now", "parameters": {"tz": {"type": "string"}}},
        {"name": "add", "parameters": {"a": {"type": "number"}}},
    ]
    rows = [
        {"messages": MESSAGES, "answer": {"x": 1}, "tools": tools[:1], "metadata": {"level": {"of": 1}}},
        {"messages": MESSAGES, "answer": {"y": [2]}, "tools": tools, "metadata": {"source": None}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    first, second = load_tasks(DataConfig(path=str(tmp_path / "tasks.parquet")))
    assert first.tools == [{"name": "now", "parameters": {"tz": {"type": "string"}}}]
    assert (first.answer, second.answer) == ({"x": 1}, {"y": [2]})
    assert "null" not in str(first.metadata)
    assert "None" not in str((first.metadata, second.tools))


def test_a_parquet_map_is_an_object(tmp_path: Path):
    schema = pa.map_(pa.string(), pa.struct([("type", pa.string()), ("unit", pa.string())]))
    places = pa.array([[[("city", {"type": "string", "unit": None}), ("at", None)]], [[]]], pa.list_(schema))
    rows = {"messages": pa.array([MESSAGES] * 2), "places": places}
    pq.write_table(pa.table(rows), tmp_path / "tasks.parquet")
    first, second = load_tasks(DataConfig(path=str(tmp_path / "tasks.parquet")))
    assert first.metadata["places"] == [{"city": {"type": "string"}}]
    assert second.metadata["places"] == [{}]


def test_tools_and_calls_have_no_nulls_that_cannot_be_meant(tmp_path: Path):
    """As in lines that were written from parquet."""
    properties = {
        "at": {"type": "string", "enum": None, "default": None},
        "default": {"type": ["string", "null"]},
        "range": {"type": "object", "properties": {"from": {"type": "string"}}},
        "any": {"type": "object"},
        "properties": {"properties": {"const": {"const": None}}},
        "odd": True,
    }
    given = {"default": None, "range": {"from": "1", "to": None}, "any": {"a": None}, "odd": None}
    tools = [{"name": "now", "strict": None, "parameters": {"properties": {**properties, "tz": None}}}]
    calls = [
        {"id": None, "function": {"name": "now", "arguments": {"at": None, **given, "tz": None}}},
        {"name": "other", "arguments": {"a": 1, "b": None}},
        {"function": {"name": "now", "arguments": '{"at": null}'}},
    ]
    said = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]
    (task,) = load_tasks(DataConfig(path=str(write_jsonl(tmp_path, {"messages": said, "tools": tools}))))
    at = {"type": "string", "default": None}
    assert task.tools == [{"name": "now", "parameters": {"properties": {**properties, "at": at}}}]
    assert task.messages[1]["tool_calls"] == [
        {"function": {"name": "now", "arguments": {**given, "range": {"from": "1"}}}},
        {"name": "other", "arguments": {"a": 1}},
        calls[2],
    ]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("{", "not a JSON object"),
        ("[" * 5000 + "]" * 5000, "not a JSON object: maximum recursion depth"),
        ("[1, 2]", "the example is a list; expected an object with 'messages'"),
        ({}, "'messages' is missing; the example has the keys none: set data.keys.messages to the one"),
        (
            {"question": "2 + 2?", "x": None},
            "'messages' is missing; the example has the keys 'question': set",
        ),
        ({str(i): i for i in range(30)}, "the keys '0', .*, '19', 10 more: set data.keys.messages"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": {"role": "user"}}, "'messages' is an object"),
        ({"messages": ["hi"]}, r"'messages'\[0\] is a string; expected an object with 'role' and 'content'"),
        ({"messages": [{"content": "hi"}]}, r"'messages'\[0\] has no 'role'"),
        ({"messages": [{"role": "user"}]}, r"'messages'\[0\]: 'content' is missing; expected a string"),
        ({"messages": [{"role": "user", "content": 3}]}, r"'content' is int 3; expected a string"),
        ({"messages": "hi", "id": 1.5}, "'id' is float 1.5; expected a string or an integer"),
        (
            {"messages": "hi", "agent_loop": 3},
            "'agent_loop' is int 3; expected a name of rollout.agent_loops",
        ),
        (
            {"messages": "hi", "reward_function": 3},
            "'reward_function' is int 3; expected a name of rollout.rewards",
        ),
        ({"messages": "hi", "data_source": ["a"]}, "'data_source' is a list; expected a name or null"),
        ({"messages": "hi", "tools": "search"}, "'tools' is a string; expected a list of JSON schemas"),
    ],
)
def test_config_error_names_file_and_line_when_a_row_is_malformed(tmp_path: Path, row: Any, error: str):
    path = write_jsonl(tmp_path, {"messages": "fine"}, "", row)
    with pytest.raises(ConfigError, match=error) as raised:
        load_tasks(DataConfig(path=str(path)))
    assert str(raised.value).startswith(f"{path}:3: ")


def test_the_keys_found_and_the_setting_are_named_when_no_example_has_an_answer(tmp_path: Path):
    rows = [{"messages": "1", "solution": {"text": "4"}}, {"messages": "2", "hint": "add"}]
    path = write_jsonl(tmp_path, *rows)
    (dataset,) = load_tasks(DataConfig(path=str(path))).datasets
    (sentence,) = dataset.absent_keys
    assert sentence == (
        "no example has the key 'answer' (data.keys.answer); the keys of the first one are 'messages', "
        "'solution'"
    )
    for right in ("solution.text", "hint"):  # also where only some have it
        assert not load_tasks(DataConfig(path=str(path), keys={"answer": right})).datasets[0].absent_keys
    for wrong in ("anwser", "solution.txt", "solution.text.more"):
        with pytest.raises(ConfigError, match=f"'{wrong}' \\(data.keys.answer\\); the keys .* 'solution'"):
            load_tasks(DataConfig(path=str(path), keys={"answer": wrong}))
        with pytest.raises(ConfigError, match=f"'{wrong}'"):
            load_tasks(DataConfig(datasets=[DatasetConfig(path=str(path), keys={"answer": wrong})]))


def test_other_keys_that_are_set_and_absent_are_told_when_no_example_has_them(tmp_path: Path):
    path = write_jsonl(tmp_path, {"messages": "1", "answer": "4"})
    named = DataConfig(path=str(path), keys={"id": "uid", "tools": "functions"})
    sentences = load_tasks(named).datasets[0].absent_keys
    assert ["'uid' (data.keys.id)" in sentences[0], "'functions' (data.keys.tools)" in sentences[1]] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tasks.parquet", b"nonsense", "not a readable parquet file"),
        ("tasks.jsonl", b'{"messages": "\xff"}\n', "tasks.jsonl:1: not "),
        (
            "tasks.jsonl",
            b'{"id": "a", "messages": "1"}\n' * 2,
            "jsonl:2: the 'id' 'a' was used .* at .*jsonl:1",
        ),
        ("tasks.jsonl", b"\n", "has no examples"),
        ("tasks.jsonl", None, "there is no file"),
        (
            "tasks.txt",
            b"",
            r"ends in '\.txt'; expected \.jsonl, \.json, \.csv, \.parquet, a folder or hub:NAME",
        ),
        ("tasks.json", b'[{"prompt": "1"},', "tasks.json' is not a readable list"),
        ("tasks.json", b'[{"prompt": "1"}, 2]', "tasks.json example 2: the example is int 2"),
        ("tasks.json", b'{"prompt": "1"}\n{\n', "tasks.json:2: not a JSON object"),
        ("tasks.json", "[]".encode("utf-16"), "UTF-16"),
        ("tasks.csv", b"", "has no examples"),
        ("tasks.csv", b"prompt,prompt\n1,2\n", "first line of .*tasks.csv' is 'prompt,prompt'"),
        ("tasks.csv", b'prompt,answer\n"1\n1",2\n1\n', "tasks.csv:4: 1 cells; expected 2"),
        ("tasks.csv", b"prompt,answer\n,2\n", "tasks.csv:2: 'messages' is missing"),
        ("tasks.csv", b'prompt\n"1\n', "tasks.csv' is not readable CSV at line 2"),
        ("tasks.csv", b"prompt\n\xff\n", "tasks.csv' is not UTF-8"),
        ("hub:", None, "expected hub:OWNER/NAME"),
        (
            "hub:a/b?splits=test",
            None,
            r"'splits=test' is no option of it; expected config=…, split=…, revision=…",
        ),
    ],
)
def test_config_error_when_a_file_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, error: str
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        load_tasks(DataConfig(path=name if name.startswith("hub:") else str(tmp_path / name)))


def test_config_error_names_the_hub_when_a_path_looks_like_a_name_on_it(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no file 'openai/gsm8k' .*write hub:openai/gsm8k"):
        load_tasks(DataConfig(path="openai/gsm8k"))


def test_config_error_names_the_row_when_parquet_has_a_bad_one(tmp_path: Path):
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"messages": ["fine", None]}), path)
    with pytest.raises(ConfigError, match=f"{path} row 2: 'messages' is missing"):
        load_tasks(DataConfig(path=str(path)))


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": MESSAGES,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
    "agent_name": "tool_agent",
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
SLIME_ROW = {"prompt": MESSAGES, "label": "4", "metadata": {"level": 2}, "tools": TOOLS}


def test_verls_row_is_a_task_as_it_is_when_it_is_parquet(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([VERL_ROW]), tmp_path / "train.parquet")
    tasks = load_tasks(DataConfig(path=str(tmp_path / "train.parquet")))
    (task,) = tasks
    assert (task.messages, task.answer) == (MESSAGES, "4")
    assert (task.agent_loop, task.data_source) == ("tool_agent", "openai/gsm8k")
    assert task.metadata == {  # without the answer, which agents would see there
        "ability": "math",
        "reward_model": {"style": "rule"},
        "extra_info": VERL_ROW["extra_info"],
    }
    assert (tasks.datasets[0].schema, tasks.datasets[0].detected) == ("verl", True)


@pytest.mark.parametrize("text", [False, True])
def test_slimes_row_is_a_task_as_it_is_when_tools_are_objects_or_text(tmp_path: Path, text: bool):
    row = SLIME_ROW | ({"tools": json.dumps(TOOLS), "metadata": '{"level": 2}'} if text else {})
    tasks = load_tasks(DataConfig(path=str(write_jsonl(tmp_path, row))))
    (task,) = tasks
    assert (task.messages, task.answer, task.metadata) == (MESSAGES, "4", {"level": 2})
    assert task.tools == TOOLS
    assert tasks.datasets[0].schema == "slime"


def test_ten_malformed_examples_are_named_when_a_file_has_more(tmp_path: Path):
    rows = [{"messages": "fine"}, *([{}] * 12), {"messages": "fine"}, "{"]
    path = write_jsonl(tmp_path, *rows)
    with pytest.raises(ConfigError) as raised:
        load_tasks(DataConfig(path=str(path)))
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{path} has 13 malformed examples:"
    assert [line.split(": ")[0].strip() for line in lines[1:11]] == [f"{path}:{n}" for n in range(2, 12)]
    assert [line.strip() for line in lines[11:]] == ["and 3 more"]


def rule(policy: str, limit: int = 3) -> PromptRule:
    """A token a word."""

    def num_tokens(task: Task) -> int:
        return len(task.messages[0]["content"].split())

    def render(task: Task) -> str:
        return task.messages[0]["content"]

    return PromptRule(render=render, count=num_tokens, limit=limit, policy=policy)  # type: ignore[arg-type]


def test_long_prompts_are_left_out_and_counted_when_the_config_says_filter(tmp_path: Path):
    path = write_jsonl(tmp_path, {"messages": "a"}, {"messages": "a b c d"}, {"messages": "a b c"})
    (dataset,) = load_tasks(DataConfig(path=str(path)), rule("filter")).datasets
    assert [task.task_id for task in dataset.tasks] == ["row-0", "row-2"]
    assert (dataset.num_filtered, dataset.longest_prompt) == (1, 3)
    with pytest.raises(ConfigError, match=r"all 3 examples .* have prompts of more than 0 tokens"):
        load_tasks(DataConfig(path=str(path)), rule("filter", limit=0))


def test_only_prompts_that_may_be_too_long_are_tokenised(tmp_path: Path):
    short, long = ["a b", "a b c d", *["a"] * 100], ["a " * 200, "ä b", "a " * 101]
    path = write_jsonl(tmp_path, *({"messages": text} for text in (*short, *long)))
    counted: list[str] = []
    words = rule("filter", limit=100)

    def count(task: Task) -> int:
        counted.append(task.messages[0]["content"])
        return words.count(task)

    prompts = PromptRule(render=words.render, count=count, limit=100, policy="filter")
    (dataset,) = load_tasks(DataConfig(path=str(path)), prompts).datasets
    assert (dataset.num_filtered, dataset.longest_prompt) == (2, 4)
    assert counted[:3] == long
    assert len(counted) == 3 + 64


def test_long_prompts_are_refused_by_line_when_the_config_says_so(tmp_path: Path):
    path = write_jsonl(tmp_path, {"messages": "a"}, {"messages": "a b c d"})
    with pytest.raises(ConfigError, match=f"{path}:2: the prompt has 4 tokens, and 3 are allowed; set data"):
        load_tasks(DataConfig(path=str(path)), rule("refuse"))


def test_the_limit_of_prompts_is_the_configs_when_it_names_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset_module, "load_chat_format", lambda *_: None)
    for overrides, limit in (([], 1999), (["data.max_prompt_tokens=7"], 7)):
        rule = prompt_rule(config_with("rollout.max_context_tokens=2000", *overrides))
        assert rule is not None
        assert rule.limit == limit


def several(tmp_path: Path, *weights: float | None) -> DataConfig:
    datasets = []
    for index, weight in enumerate(weights):
        path = tmp_path / f"set{index}.jsonl"
        path.write_text("".join(json.dumps({"id": n, "messages": "hi"}) + "\n" for n in range(4 + index)))
        datasets.append(DatasetConfig(path=str(path), weight=weight))
    return DataConfig(datasets=datasets)


def test_datasets_are_one_when_there_are_several(tmp_path: Path):
    tasks = load_tasks(several(tmp_path, None, None))
    assert [task.task_id for task in tasks][3:6] == ["set0/3", "set1/0", "set1/1"]
    order = tasks.order(seed=0, shuffle=True)
    for epoch in range(2):
        assert sorted(order.task_at(9 * epoch + n) for n in range(9)) == list(range(9))


def test_tasks_come_by_weight_when_datasets_have_one(tmp_path: Path):
    order = load_tasks(several(tmp_path, 3.0, 1.0)).order(seed=0, shuffle=False)
    assert [order.task_at(position) < 4 for position in range(8)] == [True, True, False, True] * 2


def test_a_validation_set_is_not_called_as_the_scores_of_all_sets_are(tmp_path: Path):
    (tmp_path / "all.jsonl").write_text(json.dumps({"messages": MESSAGES, "answer": "4"}) + "\n")
    sets = [DatasetConfig(path=str(tmp_path / "all.jsonl"))]
    with pytest.raises(ConfigError, match=r"all\.jsonl is called 'all'.*; set a name"):
        load_validation(DataConfig(path="train.jsonl", validation=sets))


@pytest.mark.parametrize("key", ["solution.final", "solution"])
def test_metadata_does_not_have_the_answer_wherever_that_is(tmp_path: Path, key: str):
    row = {"messages": MESSAGES, "solution": {"final": "4", "steps": ["2 + 2"]}, "level": 1}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (task,) = load_tasks(DataConfig(path=str(path), keys={"answer": key}))
    expected = {"solution": {"steps": ["2 + 2"]}} if "." in key else {}
    assert task.metadata == {"level": 1, **expected}
    assert task.answer == ("4" if "." in key else row["solution"])


def test_config_error_when_two_datasets_have_one_name(tmp_path: Path):
    first = several(tmp_path, None).datasets[0]
    with pytest.raises(ConfigError, match="are both called 'set0'; set a name"):
        load_tasks(DataConfig(datasets=[first, first]))
    with pytest.raises(ConfigError, match=r"data\.validation\[0\]\.path: there is no file"):
        load_validation(DataConfig(path="x", validation=[SourceConfig(path="none.jsonl")]))
