"""The student as the reader, with a real model, tokenizer and template."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from scripted_trajectories import play, tool

from courtside.chat.template import ChatTemplate
from courtside.reader.loading import make_reader
from courtside.reader.model.client import StudentClient
from courtside.recipe.reader import ModelReaderConfig
from courtside.types import Message

CONTEXT_LENGTH = 3500


@pytest.fixture(scope="module")
def student() -> tuple[Any, ChatTemplate]:
    from support.tiny_model import tiny_model, tiny_tokenizer

    from courtside.engines.local import LocalEngine

    tokenizer = tiny_tokenizer()
    engine = LocalEngine(tiny_model(), tokenizer, name="tiny")
    engine.context_length = CONTEXT_LENGTH
    return engine, ChatTemplate(tokenizer, name="tiny", eos_ids=engine.eos_ids)


def make_client(
    student: tuple[Any, ChatTemplate], *, seed: int = 5, **fields: Any
) -> StudentClient:
    config = ModelReaderConfig(kind="model", max_new_tokens=8, **fields)
    return StudentClient(config, engine=student[0], template=student[1], seed=seed)


def prompt(text: str) -> tuple[Message, ...]:
    return (Message(role="system", content="Read."), Message(role="user", content=text))


def test_a_reply_depends_on_its_prompt_alone(student: tuple[Any, ChatTemplate]) -> None:
    ask = make_client(student, temperature=1.0)
    alone = ask([prompt("a")])
    assert ask([prompt("b"), prompt("a"), prompt("c")])[1] == alone[0] == ask([prompt("a")])[0]
    assert make_client(student, seed=6, temperature=1.0)([prompt("a")]) != alone
    assert ask([]) == []


def test_tokens_are_counted(student: tuple[Any, ChatTemplate]) -> None:
    [reply] = make_client(student)([prompt("a")])
    assert reply.input_tokens == len(student[1].prompt_ids(prompt("a")))
    assert 1 <= reply.output_tokens <= 8


def test_the_context_leaves_tokens_for_the_reply(student: tuple[Any, ChatTemplate]) -> None:
    ask = make_client(student)
    overhead = len(student[1].prompt_ids(prompt("")))
    assert ask.fits(prompt("x" * (CONTEXT_LENGTH - 8 - overhead)))
    assert not ask.fits(prompt("x" * (CONTEXT_LENGTH - 8 - overhead + 1)))
    ask([prompt("x" * (CONTEXT_LENGTH - 8 - overhead))])  # the engine agrees


def test_a_whole_reader(student: tuple[Any, ChatTemplate]) -> None:
    turns = [part for n in range(8) for part in (f"{n} <|im_end|>" + "a" * 200, tool("b" * 200))]
    config = ModelReaderConfig(kind="model", max_new_tokens=4)
    ask_self = partial(StudentClient, engine=student[0], template=student[1], seed=0)
    reading = make_reader(config, ask_self=ask_self, seed=0)([play(*turns)])
    assert reading.hints == () and reading.counts["model/windows"] > 1
    assert reading.counts["model/invalid_json"] == reading.counts["model/windows"]
    assert "model/window_too_long" not in reading.counts
