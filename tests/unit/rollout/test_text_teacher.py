"""What a chat server is shown of a conversation, and what its reply becomes: the student's ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.tiny_model import tiny_tokenizer

from courtside.chat.api_messages import attach_tools, parse_messages, parse_tools
from courtside.chat.api_requests import make_request_fields
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.model_client import Reply
from courtside.chat.openai_client import OpenAIClient
from courtside.chat.reply_failures import Failure
from courtside.chat.template import ChatTemplate
from courtside.errors import RunError
from courtside.recipe.context import SystemContext
from courtside.rollout.text_teacher import TextTeacher
from courtside.types import Message, Sample, Task, Turn

TEMPLATES = Path(__file__).parents[2] / "support" / "chat_templates"
SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASK = Message(role="user", content="Is it warm?")


def make_teacher(name: str | None = None, context: Any = None) -> TextTeacher:
    options = {} if name is None else {"template": (TEMPLATES / f"{name}.jinja").read_text()}
    template = ChatTemplate(tiny_tokenizer(**options), name=name or "tiny", eos_ids=[1])
    return TextTeacher(
        client=cast(OpenAIClient, None), context=context, template=IncrementalTemplate(template)
    )


def make_task(*messages: Message, with_tools: bool = False) -> Task:
    if with_tools:
        messages = attach_tools(messages, parse_tools([SCHEMA], "tools"))
    return Task(id="t", split="train", messages=messages)


def turn(role: Any, text: str, *messages: Message) -> Turn:
    return Turn(role=role, text=text, token_ids=(), completion_mask=(), messages=messages)


RESULT = turn("environment", "", Message(role="tool", content="18 degrees"),
              Message(role="user", content="And now?"))  # fmt: skip


def test_without_tools_of_the_protocol_everything_is_text() -> None:
    teacher, task = make_teacher(), make_task(Message(role="system", content="Tools: …"), ASK)
    fields = make_request_fields(teacher.make_prompt(task, [turn("assistant", CALL), RESULT]))
    assert fields == {
        "messages": [
            {"role": "system", "content": "Tools: …"},
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": CALL},
            {"role": "user", "content": "18 degrees\n\nAnd now?"},
        ]
    }


def test_tools_and_calls_are_those_of_the_protocol() -> None:
    teacher, task = make_teacher("qwen2.5"), make_task(ASK, with_tools=True)
    turns = [turn("assistant", f"I look.\n{CALL}"), RESULT, turn("assistant", "Warm."), RESULT]
    fields = make_request_fields(teacher.make_prompt(task, turns))
    assert fields["tools"] == [SCHEMA]
    _, asked_for, result, more, say, last = fields["messages"]
    (tool_call,) = asked_for["tool_calls"]
    assert asked_for["content"] == "I look." and result["tool_call_id"] == tool_call["id"]
    assert json.loads(tool_call["function"]["arguments"]) == {"city": "Rome"}
    assert result["role"] == "tool" and more == {"role": "user", "content": "And now?"}
    assert say == {"role": "assistant", "content": "Warm."}
    assert last == {"role": "user", "content": "18 degrees\n\nAnd now?"}, "no call before it"


@pytest.mark.parametrize(
    "text", ["<tool_call>{oops</tool_call>", f"{CALL}{CALL}", f"{CALL} done", "weather()"]
)
def test_what_is_no_single_call_stays_text(text: str) -> None:
    teacher, task = make_teacher("qwen2.5"), make_task(ASK, with_tools=True)
    fields = make_request_fields(teacher.make_prompt(task, [turn("assistant", text), RESULT]))
    assert fields["messages"][1] == {"role": "assistant", "content": text}
    assert fields["messages"][2]["role"] == "user"


def test_calls_of_a_recorded_prompt_get_ids() -> None:
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    log = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}] * 2,
         "reasoning_content": "hm"},
        {"role": "tool", "content": "18"},
        {"role": "tool", "content": "19"},
        {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]},
        {"role": "tool", "content": "20", "tool_call_id": "x"},
        {"role": "tool", "content": "21"},
    ]  # fmt: skip
    messages = make_request_fields(parse_messages(log, "log"))["messages"]
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert len({*ids}) == 2 and [m["tool_call_id"] for m in messages[2:4]] == ids
    assert "reasoning_content" not in messages[1]
    assert messages[5]["tool_call_id"] == "x"
    assert messages[6] == {"role": "user", "content": "21"}


def test_a_context_is_for_the_server_alone() -> None:
    teacher = make_teacher(context=SystemContext(kind="system", text="Be kind."))
    fields = make_request_fields(teacher.make_prompt(make_task(ASK), ()))
    assert fields["messages"][0] == {"role": "system", "content": "Be kind."}


# ── replies ──────────────────────────────────────────────────────────────────────────────────────


def read(teacher: TextTeacher, reply: Any, task: Task | None = None, **more: Any) -> Any:
    return teacher.read_reply(reply, task or make_task(ASK), more.pop("turns", ()), **more)


def make_call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "abc", "type": "function", "function": function}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_calls_of_the_protocol_become_what_the_template_renders(name: str) -> None:
    """As text the same call would be the same tokens."""
    teacher, task = make_teacher(name), make_task(ASK, with_tools=True)
    calls = [make_call('{"city": "Rome"}')]
    sample = read(teacher, Reply(text="", tool_calls=calls), task)
    assert isinstance(sample, Sample) and sample.token_ids[-1] == 1
    assert sample.text.endswith(CALL) and sample.text == teacher.template.renderer.text(
        sample.token_ids
    )


def test_a_template_without_calls_gets_their_text() -> None:
    sample = read(make_teacher(), Reply(text="I look.", tool_calls=[make_call({"city": "Rome"})]))
    assert sample.text == f"I look.\n{CALL}" and sample.token_ids[-1] == 1


def test_a_text_is_what_the_student_would_have_sampled() -> None:
    teacher, task = make_teacher(), make_task(ASK)
    renderer = teacher.template.renderer
    for turns in ((), (turn("assistant", "x"), RESULT)):
        sample = read(teacher, Reply(text="<think>hm</think>\n It is. "), turns=turns)
        assert sample.text == "It is." and sample.stop == "eos" and not sample.logp
        assert sample.token_ids == renderer.completion_ids(task.messages, "It is.")
    spelled = read(teacher, Reply(text="So <|im_end|> ends it"))
    assert spelled.token_ids.count(1) == 1, "special tokens in a text are plain text"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(text="It is.", thoughts=" 18 is warm.\n"),
        Reply(text="<think>\n18 is warm.\n</think>\n\nIt is."),
        Reply(text="18 is warm.</think>It is."),
    ],
)
def test_thoughts_train_where_the_recipe_says_so(reply: Reply) -> None:
    teacher = replace(make_teacher("qwen3"), keep_thoughts=True)
    sample = read(teacher, reply)
    assert sample.text == "<think>\n18 is warm.\n</think>\n\nIt is."
    assert sample.token_ids == teacher.template.renderer.completion_ids(
        (ASK,), "It is.", "18 is warm."
    )
    call = replace(reply, tool_calls=[make_call({"city": "Rome"})])
    assert read(teacher, call).text.startswith("<think>\n18 is warm.\n</think>")
    assert "18" not in read(make_teacher("qwen3"), reply).text
    failure = read(replace(make_teacher(), keep_thoughts=True), reply)
    assert failure.kind == "not_rendered" and "does not render thoughts" in failure.details


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (RunError("no route"), "no_answer"),
        (Reply(text="cut", is_truncated=True), "truncated"),
        (Reply(text=" \n"), "empty"),
        (Reply(text="[THINK]for ever"), "empty"),
        (Reply(text="\ud800"), "not_rendered"),
        (Reply(text="".join(map(chr, range(0xFDD0, 0xFDF0)))), "not_rendered"),
        (Reply(text="", tool_calls=["weather"]), "not_rendered"),
        (Reply(text="", tool_calls=[{"function": {"name": 3}}]), "not_rendered"),
    ],
)
def test_what_is_no_answer_is_a_failure(reply: Any, kind: str) -> None:
    failure = read(make_teacher(), reply)
    assert isinstance(failure, Failure) and failure.kind == kind and failure.details


def test_an_answer_goes_on() -> None:
    teacher = make_teacher()
    sample = read(teacher, Reply(text="It is. Quite"), prefix="It is")
    assert teacher.template.renderer.text(sample.token_ids) == ". Quite"
    anew = read(teacher, Reply(text="Quite"), prefix="It is")
    assert isinstance(anew, Failure) and anew.kind == "not_continued"
    assert read(teacher, Reply(text="It is"), prefix="It is").kind == "empty"
    whole = teacher.template.renderer.tokenizer("é")["input_ids"]
    assert teacher.find_prefix(whole) == "é" and teacher.find_prefix(()) == ""
    assert teacher.find_prefix(whole[:1]) is None, "half a character"
    assert teacher.find_prefix((*whole, 0)) is None, "a special token"
