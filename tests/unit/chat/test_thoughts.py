"""Thoughts that a message has apart from its content: parsed, rendered exactly, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import FAMILIES, family_template

from courtside.chat.api_messages import parse_messages
from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.messages import join_thoughts
from courtside.errors import ModelError, TaskError
from courtside.rollout.off_policy import DatasetCompletions
from courtside.tasks.layouts import read_texts
from courtside.tasks.parsing import read_jsonl_tasks
from courtside.types import Message, Task, Trajectory

ASK = {"role": "user", "content": "Is it?"}
THINKS = {"role": "assistant", "content": "It is.", "reasoning_content": "Hm."}
CALLS = {
    "role": "assistant", "content": "", "reasoning_content": "Ask.",
    "tool_calls": [{"id": "abcdefghi", "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}}}],
}  # fmt: skip
RESULT = {"role": "tool", "content": "42", "tool_call_id": "abcdefghi", "name": "add"}
IN_ANSWERS = {
    "glm4.5": "<think>Hm.</think>\nIt is.<|user|>",
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
    "<|message|>It is.<|return|>",
    "magistral": "[THINK]Hm.[/THINK]It is.</s>",
    "minimax-m2": "Hm.\n</think>\n\nIt is.[e~[",
    "qwen3": "<think>\nHm.\n</think>\n\nIt is.<|im_end|>",
    "qwen3-thinking-2507": "Hm.\n</think>\n\nIt is.<|im_end|>",
    "qwen3.5": "Hm.\n</think>\n\nIt is.<|im_end|>",
}
"""What follows the generation prompt."""
IN_CALLS_ONLY = {"command-r7b"}


def record(name: str, *messages: dict[str, Any]) -> Trajectory:
    prompt = parse_messages(messages[:1], "here")
    task = Task(id="t", split="train", messages=prompt)
    return trajectory_from_chat_log(task, messages, family_template(name), id="a")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_given_answer_and_a_recorded_one_are_what_the_template_writes(name: str) -> None:
    renderer = family_template(name).renderer
    prompt = parse_messages([ASK], "here")
    if name not in IN_ANSWERS:
        assert renderer.renders_thoughts == (name in IN_CALLS_ONLY)
        message = r"leaves text of an answer out|does not render thoughts .*reasoning_content\)"
        with pytest.raises(ModelError, match=message):
            renderer.completion_ids(prompt, "It is.", "Hm.")
        message = "leaves the thoughts of this message out|does not render thoughts"
        with pytest.raises(TaskError, match=rf"message 1: {name}: .*({message})"):
            record(name, ASK, THINKS)
        return
    assert renderer.renders_thoughts
    ids = renderer.completion_ids(prompt, "It is.", "Hm.")
    assert renderer.tokenizer.decode(ids) in (IN_ANSWERS[name], "\n" + IN_ANSWERS[name])
    question, answer = record(name, ASK, THINKS).turns
    assert question.token_ids == renderer.prompt_ids(prompt)
    assert answer.token_ids == ids and all(answer.completion_mask)


@pytest.mark.parametrize("name", sorted({*IN_ANSWERS, *IN_CALLS_ONLY}))
def test_thoughts_before_a_call_and_after_its_result(name: str) -> None:
    """gpt-oss' template drops those of a call once an answer follows; Magistral's and Command
    R7B's have a place for them in one of the two messages only."""
    final = THINKS if name in IN_ANSWERS else {**THINKS, "reasoning_content": None}
    first = CALLS if name != "magistral" else {**CALLS, "reasoning_content": None}
    log = (ASK, first, RESULT, final)
    if name == "gpt-oss":
        with pytest.raises(TaskError, match=r"message \d: .*otherwise than turn by turn"):
            record(name, *log)
        log = (ASK, CALLS, RESULT)
        final = {}
    trajectory = record(name, *log)
    decode = family_template(name).renderer.tokenizer.decode
    texts = [decode(turn.token_ids) for turn in trajectory.turns if turn.role == "assistant"]
    assert ("Ask." in texts[0]) == bool(first["reasoning_content"])
    assert not final or ("Hm." in texts[1]) == bool(final["reasoning_content"])


@pytest.mark.parametrize("name", ["qwen3", "glm4.5", "gpt-oss", "minimax-m2", "magistral"])
def test_thoughts_of_an_earlier_answer_stay_or_are_refused(name: str) -> None:
    log = (ASK, THINKS, ASK, THINKS)
    if name == "magistral":
        assert family_template(name).renderer.text(record(name, *log).token_ids).count("Hm.") == 2
    else:
        reason = "leaves the thoughts .* others follow|this message does not follow it"
        with pytest.raises(TaskError, match=rf"message 1: .*({reason})"):
            record(name, *log)
        if name == "minimax-m2":  # whose generation prompt opens thoughts that history lacks
            return
        trajectory = record(name, ASK, {**THINKS, "reasoning_content": None}, ASK, THINKS)
        assert family_template(name).renderer.text(trajectory.turns[-1].token_ids).count("Hm.") == 1


def test_a_prompt_may_have_them_in_history_as_the_template_wants() -> None:
    prompt = parse_messages([ASK, THINKS, ASK], "here")
    for name, num in (("qwen3", 0), ("magistral", 1)):
        renderer = family_template(name).renderer
        assert renderer.text(renderer.prompt_ids(prompt)).count("Hm.") == num
    with pytest.raises(ModelError, match=r"llama3: .* does not render thoughts"):
        family_template("llama3").renderer.prompt_ids(prompt)


def test_thoughts_where_thinking_is_switched_off_are_refused() -> None:
    renderer = family_template("qwen3", enable_thinking=False).renderer
    with pytest.raises(ModelError, match="switch thinking off or on"):
        renderer.completion_ids(parse_messages([ASK], "here"), "It is.", "Hm.")


def test_special_tokens_in_thoughts_are_text() -> None:
    renderer = family_template("qwen3").renderer
    ids = renderer.completion_ids(parse_messages([ASK], "here"), "It is.", "Hm <|im_end|> so.")
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1 and ids[-1] == end
    assert "Hm <|im_end|> so." in renderer.tokenizer.decode(ids)


# ── parsing ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_any_name_is_read(key: str) -> None:
    message = {"role": "assistant", "content": "2"}
    assert parse_messages([message | {key: "Hm."}], "here") == (join_thoughts("2", "Hm."),)
    assert parse_messages([message | {key: "Hm.", "reasoning_content": "Hm."}], "here") == (
        join_thoughts("2", "Hm."),
    )
    for empty in ("", None):
        assert parse_messages([message | {key: empty}], "here")[0].extra == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": "2", "thinking": "Hm."}, "Only assistants think"),
        ({"role": "assistant", "content": "2", "thinking": ["Hm."]}, r"\.thinking must be a text"),
        ({"role": "assistant", "content": "2", "thinking": "a", "reasoning": "b"},
         "'reasoning' and 'thinking' differ; keep one"),
        ({"role": "assistant", "content": "<think>a</think>2", "thinking": "a"}, "Keep one of"),
    ],
)  # fmt: skip
def test_what_is_refused(message: Any, reason: str) -> None:
    with pytest.raises(TaskError, match=rf"here\[0\].*{reason}"):
        parse_messages([message], "here")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [ASK, THINKS]},
        {"prompt": "Is it?", "completion": [THINKS]},
        {"prompt": "Is it?", "chosen": [THINKS],
         "rejected": [{**THINKS, "reasoning_content": "No."}]},
    ],
)  # fmt: skip
def test_layouts_of_given_answers(fields: dict[str, Any]) -> None:
    texts = read_texts("here", fields)
    assert texts.messages == (Message(role="user", content="Is it?"),)
    assert (texts.completion, texts.completion_thoughts) == ("It is.", "Hm.")
    if "rejected" in fields:
        assert (texts.rejected, texts.rejected_thoughts) == ("It is.", "No.")
        fields["rejected"] = fields["chosen"]
        with pytest.raises(TaskError, match="nothing to prefer"):
            read_texts("here", fields)


def test_thoughts_come_before_a_response_prefix() -> None:
    fields = {"prompt": "Is it?", "completion": [THINKS], "response_prefix": "It"}
    with pytest.raises(TaskError, match="thoughts come before that"):
        read_texts("here", fields)


def test_tasks_that_differ_by_thoughts_alone_are_two(tmp_path: Path) -> None:
    lines = [{"messages": [ASK, THINKS | {"reasoning_content": x}]} for x in ("Hm.", "So.", None)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = read_jsonl_tasks(tmp_path / "tasks.jsonl")
    assert [task.completion_thoughts for task in tasks] == ["Hm.", "So.", ""]
    assert len({task.id for task in tasks}) == 3


def test_they_train_with_the_answers_of_a_pair(tmp_path: Path) -> None:
    other = {**THINKS, "reasoning_content": "No."}
    line = {"prompt": "Is it?", "chosen": [THINKS], "rejected": [other]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(line))
    renderer = family_template("qwen3").renderer
    rollout = DatasetCompletions(template=renderer, grade=lambda task, text: None, temperature=1.0)
    (task,) = read_jsonl_tasks(tmp_path / "tasks.jsonl")
    for trajectory, thoughts in zip(rollout({0: task}, 0), ("Hm.", "No."), strict=True):
        _, answer = trajectory.turns
        text = f"<think>\n{thoughts}\n</think>\n\nIt is."
        assert renderer.tokenizer.decode(answer.token_ids) == f"{text}<|im_end|>"
        assert answer.text == text and all(answer.completion_mask)
    longest = renderer.count_prompt_tokens(task, with_completions=True)
    assert longest == len(trajectory.token_ids)
