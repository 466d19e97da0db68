import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.errors import TaskError
from courtside.recipe.tasks import JsonlTasks
from courtside.tasks.graders import grade
from courtside.tasks.loading import make_task_source
from courtside.tasks.parsing import Record, parse_tasks, read_jsonl_tasks


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def test_a_full_line(tmp_path: Path) -> None:
    line = {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Capital of France?"},
        ],
        "answer": "Paris",
        "completion": "It is Paris.",
        "rejected": "It is Rome.",
        "privileged": {"hint": "It is on the Seine."},
        "tags": ["geography"],
        "grader": "contains",
        "grader_args": {"ignore_case": True},
        "split": "test",
    }
    (task,) = read_jsonl_tasks(write(tmp_path, line))
    assert [(m.role, m.content) for m in task.messages] == [
        ("system", "Be short."),
        ("user", "Capital of France?"),
    ]
    assert (task.answer, task.completion, task.rejected) == (
        "Paris", "It is Paris.", "It is Rome.",
    )  # fmt: skip
    assert task.privileged == {"hint": "It is on the Seine."}
    assert (task.tags, task.split) == (("geography",), "test")
    graded = grade(task, "paris!")
    assert graded is not None and graded.passed


def test_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"prompt": "2+2?", "answer": 4}, "", {"prompt": "Hi"},
        {"prompt": "Colour?", "answer": "blue", "grader": None},
    )  # fmt: skip
    sum_, greeting, ungraded = read_jsonl_tasks(path)
    assert (sum_.answer, sum_.grader) == ("4", "math")
    assert (greeting.answer, greeting.grader, greeting.completion) == (None, None, None)
    assert (ungraded.answer, ungraded.grader) == ("blue", None)
    assert all(task.id.startswith("jsonl-") for task in (sum_, greeting))


def test_byte_order_marks_and_odd_separators_are_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    text = '{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [t.messages[0].content for t in read_jsonl_tasks(path)] == ["a\u2028b\u0085c", "d"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{'prompt': 1}", "not valid JSON: Expecting property name"),
        ('{"prompt": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["a"]', "must be a JSON object"),
        ({"answer": "4"}, "no `prompt`"),
        ({"prompt": 4}, "`prompt` must be a text .*not a number"),
        ({"prompt": " "}, "`prompt` is empty"),
        ({"prompt": "a", "messages": []}, "both `prompt` and `messages`"),
        ({"prompt": "a", "anwser": "4"}, "unknown key 'anwser'; a task has id, prompt, messages"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["a"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is null or missing"),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]},
         r"messages\[0\]: unknown key 'mood'; a message has role, content, tool_calls"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\].role = 'bot'"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content must be a text"),
        ({"messages": [{"role": "user", "content": ""}]}, "last message is empty"),
        (
            {"messages": [{"role": "user", "content": "a"},
                          {"role": "assistant", "content": "b"}], "completion": "c"},
            "the last message is the assistant's, and there is a `completion`",
        ),
        ({"prompt": "a", "answer": True}, "`answer` must be a text, not true or false"),
        ({"prompt": "a", "answer": "Paris"}, "'math' is the default grader"),
        ({"prompt": "a", "rejected": "b"}, "needs a better `completion`"),
        ({"prompt": "a", "privileged": "b"}, "`privileged` must be an object, not a text"),
        ({"prompt": "a", "privileged": {"b": 1}}, "privileged: `b` must be a text"),
        ({"prompt": "a", "privileged": {"b": None}}, "`privileged.b` is null"),
        ({"prompt": "a", "tags": "b"}, "`tags` must be a list of texts"),
        ({"prompt": "a", "grader": "best", "answer": "b"}, "grader = 'best' is not known"),
        ({"prompt": "a", "grader": "exact"}, "`answer`, which the task lacks"),
        ({"prompt": "a", "grader_args": {"b": 1}}, "without a `grader`"),
        ({"prompt": "a", "split": "dev"}, "split = 'dev' is not known; use one of"),
        ({"prompt": "a", "id": "\u202eb"}, "`id` has .* one that cannot be printed"),
        ({"prompt": "a", "id": "b" * 201}, "`id` has more than 200 characters"),
        ('{"prompt": "\\ud800"}', "surrogate"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(TaskError, match=reason) as caught:
        read_jsonl_tasks(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"tasks.path = .*no such file"):
        read_jsonl_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="cannot be read"):
        read_jsonl_tasks(tmp_path)
    with pytest.raises(TaskError, match="the file is empty"):
        read_jsonl_tasks(write(tmp_path, "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}')
    with pytest.raises(TaskError, match="line 2: not UTF-8"):
        read_jsonl_tasks(tmp_path / "latin.jsonl")
    only_test = JsonlTasks(kind="jsonl", path=write(tmp_path, {"prompt": "a", "split": "test"}))
    with pytest.raises(TaskError, match="none of its 1 tasks is in the train split"):
        make_task_source(only_test, seed=0)


def test_identical_lines_are_one_task(tmp_path: Path) -> None:
    line = {"prompt": "a", "answer": "4"}
    assert len(read_jsonl_tasks(write(tmp_path, line, line, {**line, "split": "train"}))) == 1


def test_one_prompt_is_never_in_two_splits(tmp_path: Path) -> None:
    first, second = {"prompt": "a", "split": "train"}, {"prompt": "a", "split": "test"}
    with pytest.raises(TaskError, match=r"line 2: split = 'test', but the same prompt.*line 1"):
        read_jsonl_tasks(write(tmp_path, first, second))
    for split in ("train", "validation", "test"):
        lines = [{"prompt": "a", "answer": "4"}, {"prompt": "a", "answer": "5", "split": split}]
        tasks = read_jsonl_tasks(write(tmp_path, *lines))
        assert [task.split for task in tasks] == [split, split]
        assert tasks[0].id != tasks[1].id


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3)), max_size=20))
def test_prompts_never_cross_splits(rows: list[tuple[str, int]]) -> None:
    tasks = parse_tasks(
        "test",
        [Record(where="here", fields={"prompt": text, "answer": n}) for text, n in rows],
    )
    assert len(tasks) == len(set(rows))
    by_prompt: dict[str, set[str]] = {}
    for task in tasks:
        by_prompt.setdefault(task.messages[0].content, set()).add(task.split)
    assert all(len(splits) == 1 for splits in by_prompt.values())


def test_source_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": f"Question {i}"} for i in range(100)))
    source = make_task_source(JsonlTasks(kind="jsonl", path=path, system_prompt="Be kind."), seed=0)
    train = len([t for t in read_jsonl_tasks(path) if t.split == "train"])
    epoch = source.batch(0, train)
    assert len({task.id for task in epoch}) == train
    assert {task.messages[0].content for task in epoch} == {"Be kind."}
    held = {t.id for split in ("validation", "test") for t in source.held_out(split, 1000)}
    assert len(held) == 100 - train and not held & {task.id for task in epoch}
    with pytest.raises(TaskError, match="already has a system message"):
        line = {"messages": [{"role": r, "content": "a"} for r in ("system", "user")]}
        path = write(tmp_path, {**line, "split": "train"})
        make_task_source(JsonlTasks(kind="jsonl", path=path, system_prompt="Be kind."), seed=0)
