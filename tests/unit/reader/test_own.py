"""The student as the reader, with a real model, tokenizer and template."""

from __future__ import annotations

from typing import Any

import pytest
from episodes import play, tool

from courtside.chat.template import Renderer
from courtside.reader.loading import reader_for
from courtside.reader.model.client import Ask
from courtside.reader.model.student_client import OwnAsk, own_ask
from courtside.recipe.reader import ModelReader
from courtside.types import Message

ROOM = 3500


@pytest.fixture(scope="module")
def student() -> tuple[Any, Renderer]:
    from tiny import tiny_model, tiny_tokenizer

    from courtside.engines.local import TransformersEngine

    tokenizer = tiny_tokenizer()
    engine = TransformersEngine(tiny_model(), tokenizer, name="tiny")
    engine.context_length = ROOM
    return engine, Renderer(tokenizer, name="tiny", eos_ids=engine.eos_ids)


def asking(student: tuple[Any, Renderer], **fields: Any) -> Ask:
    config = ModelReader(kind="model", max_new_tokens=8, **fields)
    return own_ask(*student, context_length=ROOM, seed=5)(config)


def prompt(text: str) -> tuple[Message, ...]:
    return (Message(role="system", content="Read."), Message(role="user", content=text))


def test_a_reply_depends_on_its_prompt_alone(student: tuple[Any, Renderer]) -> None:
    ask = asking(student, temperature=1.0)
    alone = ask([prompt("a")])
    assert ask([prompt("b"), prompt("a"), prompt("c")])[1] == alone[0] == ask([prompt("a")])[0]
    again = own_ask(*student, context_length=ROOM, seed=6)(
        ModelReader(kind="model", max_new_tokens=8, temperature=1.0)
    )
    assert again([prompt("a")]) != alone
    assert ask([]) == []


def test_tokens_are_counted(student: tuple[Any, Renderer]) -> None:
    [reply] = asking(student)([prompt("a")])
    assert reply.tokens_in == len(student[1].prompt_ids(prompt("a")))
    assert 1 <= reply.tokens_out <= 8


def test_room_is_left_for_the_reply(student: tuple[Any, Renderer]) -> None:
    ask = asking(student)
    assert isinstance(ask, OwnAsk)
    overhead = len(student[1].prompt_ids(prompt("")))
    assert ask.fits(prompt("x" * (ROOM - 8 - overhead)))
    assert not ask.fits(prompt("x" * (ROOM - 8 - overhead + 1)))
    ask([prompt("x" * (ROOM - 8 - overhead))])  # the engine agrees


def test_a_whole_reader(student: tuple[Any, Renderer]) -> None:
    turns = [part for n in range(8) for part in (f"{n} <|im_end|>" + "a" * 200, tool("b" * 200))]
    config = ModelReader(kind="model", max_new_tokens=4)
    ask_self = own_ask(*student, context_length=ROOM, seed=0)
    reading = reader_for(config, ask_self=ask_self, seed=0)([play(*turns)])
    assert reading.hints == () and reading.counts["model/windows"] > 1
    assert reading.counts["model/invalid_json"] == reading.counts["model/windows"]
    assert "model/window_too_long" not in reading.counts
