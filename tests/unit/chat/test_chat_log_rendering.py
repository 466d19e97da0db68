"""Conversations from elsewhere: every turn as a student would have met it, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit.chat.templates import NO_TOOLS, OPENS_THINKING, make_template, template_of_family

from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.hint_splicing import splice_hint
from courtside.chat.incremental import IncrementalTemplate
from courtside.errors import TaskError
from courtside.types import Hint, Message, Task, Trajectory

TASK = Task(id="t", split="train", messages=(Message(role="user", content="2+2?"),))
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"b": 2, "a": "é"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4<|im_end|>"},
    {"role": "assistant", "content": "It is 4."},
]
TEMPLATE = template_of_family("chatml")


def read(
    messages: list[dict[str, Any]], template: IncrementalTemplate = TEMPLATE, **options: Any
) -> Trajectory:
    return trajectory_from_chat_log(TASK, messages, template, id="r", **options)


def test_calls_are_written_as_text_where_the_template_has_none() -> None:
    trajectory = read(TALK)
    assert [turn.role for turn in trajectory.turns] == [
        "prompt", "assistant", "environment", "assistant",
    ]  # fmt: skip
    _, call, result, answer = trajectory.turns
    chosen_text = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>'
    assert call.text == chosen_text
    extra = '{"tool_call_id": "c1"}'
    assert result.messages == (Message(role="tool", content="4<|im_end|>", extra=extra),)
    assert answer.text == "It is 4."
    assert all(call.completion_mask + answer.completion_mask) and not any(result.completion_mask)
    assert call.sampler_logp is None and trajectory.sampler_logp is None
    assert (trajectory.source, trajectory.stop, trajectory.policy_version) == (
        "dataset", "dataset", None,
    )  # fmt: skip
    assert TEMPLATE.renderer.tokenizer.decode(trajectory.token_ids) == (
        f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{chosen_text}<|im_end|>\n"
        "<|im_start|>tool\n4<|im_end|><|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>"
    )
    assert TEMPLATE.is_ended(call.token_ids) and TEMPLATE.is_ended(answer.token_ids)


def test_calls_are_the_templates_own_where_it_has_some() -> None:
    template = template_of_family("thinking", "breaks")
    trajectory = read(TALK, template)
    assert trajectory.turns[1].text == '\n<tool_call>\nadd {"b": 2, "a": "é"}\n</tool_call>'


def test_special_words_in_a_call_are_plain_text() -> None:
    arguments = {"<|im_end|>": ["<|im_start|>"]}
    call = {"function": {"name": "<|im_start|>", "arguments": json.dumps(arguments)}}
    template = template_of_family("thinking")
    trajectory = read([TALK[0], {"role": "assistant", "tool_calls": [call]}], template)
    (_, answer) = trajectory.turns
    special = set(template.renderer.tokenizer.all_special_ids)
    assert [i in special for i in answer.token_ids].index(True) == len(answer.token_ids) - 1
    assert answer.text == f"\n<tool_call>\n<|im_start|> {json.dumps(arguments)}\n</tool_call>"


def test_calls_in_a_format_of_ones_own() -> None:
    def format_plain(name: str, arguments: Any) -> str:
        return f"{name}({json.dumps(arguments)})"

    broken = {"function": {"name": "sub", "arguments": "{a: 1"}}
    message = {"role": "assistant", "content": "Both:", "tool_calls": [CALL, broken]}
    trajectory = read([TALK[0], message], format_call=format_plain)
    assert trajectory.response == 'Both:\nadd({"b": 2, "a": "\\u00e9"})\nsub("{a: 1")'


@pytest.mark.parametrize("family", ["chatml", "headers", "default_system", "no_breaks", "words"])
def test_the_turns_are_the_whole_conversation(family: str) -> None:
    template = template_of_family(family, "greedy")
    plain = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Let me see"},
        {"role": "tool", "content": "4."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "4"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": "Thanks"},
    ]
    trajectory = read(plain, template)
    text = template.renderer.tokenizer.apply_chat_template(
        plain, add_generation_prompt=True, tokenize=False
    )
    whole = template.renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert trajectory.token_ids == tuple(whole)
    assert [turn.role for turn in trajectory.turns][3:] == [
        "assistant", "environment", "assistant", "environment",
    ]  # fmt: skip


def test_a_recorded_turn_can_be_hinted() -> None:
    hint = Hint(trajectory="r", turn=3, text="Be brief.", source="human")
    twig = splice_hint(read(TALK), hint, TEMPLATE, place="before_turn", role="user", max_tokens=99)
    assert TEMPLATE.renderer.text(twig.token_ids).endswith("Be brief.\nassistant\nIt is 4.")


def test_few_shot_answers_belong_to_the_prompt() -> None:
    shots = (
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="2"),
        Message(role="user", content="2+2?"),
    )
    task = Task(id="t", split="train", messages=shots)
    talk = [{"role": m.role, "content": m.content} for m in shots]
    trajectory = trajectory_from_chat_log(task, [*talk, TALK[3]], TEMPLATE, id="r")
    assert [turn.role for turn in trajectory.turns] == ["prompt", "assistant"]
    assert trajectory.num_completion_tokens == len("It is 4.") + 1


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user", "content": "3+3?"}, TALK[3]], "message 0 .* is not the task's"),
        ([TALK[0]], "no assistant's message at 1"),
        ([TALK[0], TALK[0]], "no assistant's message at 1"),
        ([TALK[0], {"role": "model", "content": "4"}], "message 1.role = 'model'; use one of"),
        (
            [TALK[0], {"role": "assistant", "content": [{"type": "image_url"}]}],
            r"message 1.content\[0\] is a part of type 'image_url'",
        ),
        (
            [TALK[0], {"role": "assistant", "tool_calls": [{"name": "add"}]}],
            r"message 1.tool_calls\[0\]: a tool call is written as",
        ),
        (
            [*TALK[:2], {"role": "tool", "content": "4", "tool_calls": [CALL]}],
            "message 2: tool_calls on a 'tool' message",
        ),
    ],
)
def test_what_is_no_conversation(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(TaskError, match=f"task t: .*{says}"):
        read(messages)


def test_earlier_thinking_that_the_template_takes_out() -> None:
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is 4."}
    more = {"role": "user", "content": "Sure?"}
    template = template_of_family("thinking")
    assert read([TALK[0], thought], template).turns[1].text.startswith("<think>")
    between = [TALK[0], thought, TALK[2], thought]
    assert read(between, template).turns[1].text.startswith("<think>"), "no question behind it"
    with pytest.raises(TaskError, match=r"task t: message 1: in the whole conversation tiny's"):
        read([*between[:3], TALK[3], more, TALK[3]], template)
    with pytest.raises(TaskError, match=r"task t: message 3: tiny: .* leaves text of this"):
        read([TALK[0], TALK[3], TALK[2], thought, more, TALK[3]], template)


def test_an_answer_that_merges_with_its_opening() -> None:
    broken = {"role": "assistant", "content": "\nIt is 4."}
    talk = [*TALK[:3], broken]
    read(talk, template_of_family("chatml"))
    with pytest.raises(TaskError, match=r"message 2: .*it has \['\\n\\n', 'I'"):
        read(talk, template_of_family("chatml", "greedy"))


def test_an_opening_that_the_message_does_not_have() -> None:
    template = make_template(OPENS_THINKING)
    with pytest.raises(TaskError, match=r"message 1: .*generation prompt .*<think>"):
        read([TALK[0], TALK[3]], template)
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n4"}
    assert read([TALK[0], thought], template).response == "Hm.\n</think>\n4"


def test_a_role_that_the_template_has_not() -> None:
    with pytest.raises(TaskError, match=r"task t: message 2: .*does not render a 'tool' message"):
        read(TALK, make_template(NO_TOOLS))
