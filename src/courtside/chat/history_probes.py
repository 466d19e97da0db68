"""Whether a template renders a conversation, when it is over, as it was rendered turn by turn.

Templates drop earlier thinking, move tools to the last question, or end the last answer with
another token. Short conversations of three answers show it: plain ones, ones that begin with
thoughts, ones with calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from courtside.chat.answer_boundary import PROBE_PROMPT, common_prefix_length
from courtside.chat.messages import unused_noncharacters
from courtside.chat.template import PROBE_CALL, PROBE_TOOL, ChatTemplate
from courtside.errors import ModelError
from courtside.types import Message

if TYPE_CHECKING:
    from courtside.chat.incremental import IncrementalTemplate

THOUGHTS = "<think>\nHm.\n</think>\n\n"
SPECIAL_THOUGHTS = (
    THOUGHTS,
    "[THINK]Hm.[/THINK]",
    "<|channel>thought\nHm.<channel|>",
)
"""Thoughts between special tokens, for tokenizers that have those."""

ANSWERS = ("It is.", "It was.", "It will.")


Answers = Literal["answers", "answers with thoughts", "calls"]
Conversation = Sequence[Message]


class HistoryChange(NamedTuple):
    answers: Answers
    """Of the conversation that shows it."""
    difference: str
    drops_thoughts: bool


def find_history_change(template: IncrementalTemplate) -> HistoryChange | None:
    """The first difference, of those that drop thoughts if there are such; None: there is none."""
    changes = []
    for answers, conversation in _conversations(template.renderer):
        try:
            changes.append(_compare(template, answers, conversation))
        except ModelError:
            continue  # not a conversation that a rollout could have
    differences = [change for change in changes if change is not None]
    return min(differences, key=lambda change: not change.drops_thoughts, default=None)


def _conversations(renderer: ChatTemplate) -> Iterator[tuple[Answers, Conversation]]:
    yield "answers", _talk(renderer, "")
    yield "answers with thoughts", _talk(renderer, THOUGHTS)
    for thoughts in SPECIAL_THOUGHTS:
        if any(thoughts.startswith(token) for token in renderer.special_tokens):
            yield "answers with thoughts", _talk(renderer, thoughts)
    if renderer.takes_tools and renderer.renders_tool_calls:
        tools = json.dumps([PROBE_TOOL])
        ask = replace(PROBE_PROMPT, tools=tools)
        call = Message(role="assistant", content="", extra=json.dumps({"tool_calls": [PROBE_CALL]}))
        keys = {"tool_call_id": PROBE_CALL["id"], "name": PROBE_CALL["function"]["name"]}
        result = Message(role="tool", content="1", extra=json.dumps(keys))
        say, *_ = ANSWERS
        answer = Message(role="assistant", content=say)
        yield "calls", (ask, call, result, call, result, answer, PROBE_PROMPT, answer)


def _talk(renderer: ChatTemplate, thoughts: str) -> Conversation:
    asks = (PROBE_PROMPT, *(replace(PROBE_PROMPT, content=x) for x in ("Was it?", "Will it?")))
    system = (Message(role="system", content="Be kind."),) if renderer.takes_system else ()
    pairs = zip(asks, ANSWERS, strict=True)
    return system + tuple(
        message
        for ask, answer in pairs
        for message in (ask, Message(role="assistant", content=thoughts + answer))
    )


def _compare(
    template: IncrementalTemplate, answers: Answers, conversation: Conversation
) -> HistoryChange | None:
    renderer = template.renderer
    (cut,) = unused_noncharacters(conversation)
    ids: list[int] = []
    prompt: tuple[Message, ...] = ()
    requests: list[Message] = []
    for message in conversation:
        if message.role != "assistant":
            requests.append(message)
            continue
        span = (
            template.render_continuation(requests, prompt=prompt)
            if prompt
            else template.render_prompt(requests)
        )
        ids += [*span.token_ids, *_answer_ids(renderer, message, cut)]
        prompt, requests = prompt or tuple(requests), []
    # Nothing is cut, so that thoughts between special tokens are what a model samples.
    rendered = renderer.render(conversation, "", add_generation_prompt=False)
    whole = renderer.tokenize(rendered, cut)
    num_same = common_prefix_length(ids, whole)
    # Some templates leave the end of the last answer out.
    num_open = len(ids) - len(renderer.boundary.end_of_turn_ids)
    if num_same == len(ids) or num_open <= num_same == len(whole):
        return None
    num_thoughts = [renderer.tokenizer.decode(tokens).count("Hm.") for tokens in (whole, ids)]
    return HistoryChange(
        answers,
        template.describe_difference(ids, whole, num_same),
        drops_thoughts=num_thoughts[0] < num_thoughts[1],
    )


def _answer_ids(renderer: ChatTemplate, message: Message, cut: str) -> tuple[int, ...]:
    """As the student would sample it after a question."""
    if any(token in message.content for token in renderer.special_tokens):
        return renderer.tokenize(message.content, cut) + renderer.boundary.end_of_turn_ids
    if not message.extra:
        return renderer.completion_ids((PROBE_PROMPT,), message.content)
    prompt, rendered = (
        renderer.render(messages, cut, add_generation_prompt=add)
        for messages, add in (((PROBE_PROMPT,), True), ((PROBE_PROMPT, message), False))
    )
    if not rendered.startswith(prompt):
        raise ModelError("a call does not follow the generation prompt; there is nothing to do")
    return renderer.boundary.end_answer(renderer.tokenize(rendered[len(prompt) :], cut))
