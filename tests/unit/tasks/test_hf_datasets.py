import json
import sys
from pathlib import Path
from typing import Any

import pytest

from courtside.errors import TaskError, UserError
from courtside.recipe.tasks import DatasetTasks
from courtside.tasks.graders import grade
from courtside.tasks.hf_datasets import load_dataset_tasks
from courtside.tasks.loading import make_task_source

ROWS = {
    "question": [f"What is {i} + 1?" for i in range(40)],
    "result": list(range(1, 41)),
    "worked": [f"{i} and one more" if i else None for i in range(40)],
}


def config(path: Path | str, **more: Any) -> DatasetTasks:
    columns = {"prompt": "question", "answer": "result", "privileged.solution": "worked"}
    return DatasetTasks.model_validate(
        {"kind": "datasets", "path": str(path), "columns": columns, **more}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("sets")
    rows = datasets.Dataset.from_dict(ROWS)
    rows.save_to_disk(root / "single")
    datasets.DatasetDict({"train": rows, "extra": rows.select(range(3))}).save_to_disk(
        root / "several"
    )
    chats = [
        [{"role": "user", "content": f"Hi {i}", "name": None},
         {"role": "tool", "content": "42", "name": "bot" if i else None}]
        for i in range(2)
    ]  # fmt: skip
    datasets.Dataset.from_dict({"chat": chats}).save_to_disk(root / "chats")
    datasets.Dataset.from_dict({"chat": chats[:1]}).save_to_disk(root / "plain chats")
    rows.select([]).save_to_disk(root / "empty")
    return root


def test_rows_become_tasks(folder: Path) -> None:
    tasks = load_dataset_tasks(config(folder / "single"))
    assert len(tasks) == 40
    task = next(task for task in tasks if task.answer == "8")
    assert task.messages[0].content == "What is 7 + 1?"
    assert task.privileged == {"solution": "7 and one more"}
    assert task.grader == "math" and task.id.startswith("datasets-")
    assert next(task for task in tasks if task.answer == "1").privileged == {}
    assert load_dataset_tasks(config(folder / "single", grader="number"))[0].grader == "number"


def test_a_grader_of_the_users(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub_graders.py").write_text(
        "def is_long(response, task): return len(response) > 3"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_dataset_tasks(config(folder / "single", grader="hub_graders:is_long"))[0]
    grades = [grade(task, text) for text in ("No.", "Yes, it is.")]
    assert [g is not None and g.passed for g in grades] == [False, True]


def test_splits_of_a_folder(folder: Path) -> None:
    assert len(load_dataset_tasks(config(folder / "several", split="extra"))) == 3
    with pytest.raises(TaskError, match=r"tasks.split = 'dev'.*\['extra', 'train'\]"):
        load_dataset_tasks(config(folder / "several", split="dev"))
    with pytest.raises(TaskError, match=r"tasks.split = 'dev'.*holds only 'train'"):
        load_dataset_tasks(config(folder / "single", split="dev"))
    with pytest.raises(TaskError, match=r"tasks.name = 'main'.*remove tasks.name"):
        load_dataset_tasks(config(folder / "single", name="main"))


def test_wrong_columns_are_named(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"no such column. It has question, result, worked"):
        load_dataset_tasks(config(folder / "single", columns={"prompt": "text"}))
    with pytest.raises(TaskError, match=r"tasks.columns.reward: no such field"):
        load_dataset_tasks(config(folder / "single", columns={"prompt": "question", "reward": "x"}))
    with pytest.raises(TaskError, match="names none of prompt, messages, conversations"):
        load_dataset_tasks(config(folder / "single", columns={"answer": "result"}))
    with pytest.raises(TaskError, match=r"row 0: `prompt` must be a text .*not a number"):
        load_dataset_tasks(config(folder / "single", columns={"prompt": "result"}))


def test_messages_column(folder: Path) -> None:
    columns = {"messages": "chat"}
    (task,) = load_dataset_tasks(config(folder / "plain chats", columns=columns))
    assert [m.role for m in task.messages] == ["user", "tool"]
    first, second = load_dataset_tasks(config(folder / "chats", columns=columns))
    assert first.messages[1].extra == "" and second.messages[1].extra == '{"name": "bot"}'


HI = {"role": "user", "content": "Hi"}
HELLO, WHAT = ({"role": "assistant", "content": text} for text in ("Hello.", "What?"))
LAYOUTS = {
    "prompt and completion": {"prompt": ["Hi"], "completion": ["Hello."], "score": [1]},
    "conversational": {
        "prompt": [[HI]],
        "completion": [[HELLO]],
    },
    "messages": {
        "prompt": ["Hi"],
        "messages": [
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
        ],
    },
    "conversations": {
        "conversations": [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]]
    },
    "preference": {"prompt": ["Hi"], "chosen": ["Hello."], "rejected": ["What?"]},
    "implicit prompt": {
        "chosen": [[HI, HELLO]],
        "rejected": [
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "What?"}]
        ],
        "messages": [[HI]],
    },
}


@pytest.mark.parametrize("columns", LAYOUTS.values(), ids=LAYOUTS)
def test_columns_of_known_layouts_need_no_names(tmp_path: Path, columns: Any) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
    (task,) = load_dataset_tasks(DatasetTasks(kind="datasets", path=str(tmp_path / "set")))
    assert [(m.role, m.content) for m in task.messages] == [("user", "Hi")]
    assert task.completion == "Hello."
    assert task.rejected == ("What?" if "rejected" in columns else None)


def test_tool_schemas_come_without_the_nulls_that_arrow_adds(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = ("add", "find")
    tools = [
        [{"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {name: {"type": "string"}}}}}]
        for name in names
    ]  # fmt: skip
    messages = [[{"role": "user", "content": name}] for name in names]
    rows = datasets.Dataset.from_dict({"messages": messages, "tools": tools})
    rows.save_to_disk(tmp_path / "set")
    tasks = load_dataset_tasks(DatasetTasks(kind="datasets", path=str(tmp_path / "set")))
    for task, expected in zip(tasks, tools, strict=True):
        assert json.loads(task.messages[0].tools) == expected


def test_a_set_of_other_columns_asks_for_names(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"has the columns question, result, worked, none of which"):
        load_dataset_tasks(DatasetTasks(kind="datasets", path=str(folder / "single")))


def test_nothing_to_load(folder: Path) -> None:
    with pytest.raises(TaskError, match="cannot be loaded; correct"):
        load_dataset_tasks(config(folder / "empty"))
    with pytest.raises(TaskError, match=r"tasks.path = .*nowhere.*cannot be loaded"):
        load_dataset_tasks(config(folder / "nowhere"))


def test_json_files_load_through_the_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    # Keeps the prepared copy out of the user's cache.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"question": "Hi"}\n{"question": "Ho"}\n')
    tasks = load_dataset_tasks(config(tmp_path / "data", columns={"prompt": "question"}))
    assert [task.messages[0].content for task in tasks] == ["Hi", "Ho"]


def test_source(folder: Path) -> None:
    source = make_task_source(config(folder / "single", limit=2), seed=0)
    assert len({task.id for task in source.batch(0, 10)}) == 2


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[datasets\]'"):
        load_dataset_tasks(config("somewhere"))
