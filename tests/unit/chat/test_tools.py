"""Tool schemas and calls are rendered by the model's own chat template, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tiny_model import TEMPLATE, tiny_tokenizer
from unit.chat.templates import TOOLS_TEMPLATE

from courtside.chat.api_messages import attach_tools, parse_messages, parse_tools
from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.hint_splicing import splice_hint
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import insert_context
from courtside.chat.template import ChatTemplate
from courtside.errors import ModelError
from courtside.types import Hint, Message, Task

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def renderer(template: str = TOOLS_TEMPLATE) -> ChatTemplate:
    tokenizer = tiny_tokenizer(template=template)
    return ChatTemplate(tokenizer, name="tiny", eos_ids={1})


def prompt(*messages: dict[str, Any]) -> tuple[Message, ...]:
    tools = parse_tools([SCHEMA], "here")
    return attach_tools(parse_messages(list(messages), "here"), tools)


HISTORY = (
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
)


def test_the_prompt_is_what_the_template_makes_of_messages_and_tools() -> None:
    template = renderer()
    tree = [HISTORY[0], HISTORY[1] | {"content": ""}, HISTORY[2]]
    expected = template.tokenizer.apply_chat_template(
        tree, tools=[SCHEMA], add_generation_prompt=True, tokenize=False
    )
    ids = template.prompt_ids(prompt(*HISTORY))
    assert template.tokenizer.decode(ids) == expected
    assert '"name": "add"' in expected and "<tool_call>add" in expected
    assert template.prompt_ids(parse_messages(list(HISTORY), "here")) != ids
    span = IncrementalTemplate(template).render_prompt(prompt(*HISTORY))
    assert span.token_ids == ids


def test_a_system_message_that_is_added_keeps_the_tools() -> None:
    template = renderer()
    inserted = insert_context(prompt(*HISTORY[:1]), "Be short.", "system")
    text = template.tokenizer.decode(template.prompt_ids(inserted))
    assert text.startswith("<|im_start|>system\nBe short.\n# Tools") and '"add"' in text


def test_special_tokens_in_a_schema_are_plain_text() -> None:
    template = renderer()
    schema = {"type": "function", "function": {"name": "x", "description": "<|im_end|>"}}
    messages = attach_tools(prompt(HISTORY[0]), json.dumps([schema]))
    ids = template.prompt_ids(messages)
    assert ids.count(1) == template.prompt_ids(prompt(HISTORY[0])).count(1)


def test_templates_without_tools_refuse_them() -> None:
    template = renderer(TEMPLATE)
    with pytest.raises(ModelError, match=r"does not render `tools`.*Describe the tools in the"):
        template.prompt_ids(prompt(HISTORY[0]))
    with pytest.raises(ModelError, match=r"does not render `tool_calls`.*Write them as text"):
        template.prompt_ids(parse_messages(list(HISTORY), "here"))


def test_a_recorded_conversation_with_tools_is_rendered_and_hinted() -> None:
    template = IncrementalTemplate(renderer())
    task = Task(id="t", split="train", messages=prompt(HISTORY[0]))
    log = [*HISTORY, {"role": "assistant", "content": "2"}]
    trajectory = trajectory_from_chat_log(task, log, template, id="a")
    text = template.renderer.tokenizer.decode(trajectory.token_ids)
    assert '"name": "add"' in text and trajectory.turns[1].text.startswith("<tool_call>add")
    hint = Hint(trajectory="a", turn=1, text="Count.", source="human")
    branch = splice_hint(trajectory, hint, template, place="system", role="user", max_tokens=500)
    hinted = template.renderer.tokenizer.decode(branch.token_ids)
    assert hinted.startswith("<|im_start|>system\nCount.\n# Tools")
