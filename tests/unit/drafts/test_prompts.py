"""What judge, rewriter and critic are shown, and which replies count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled_drafts import draft

from courtside.drafts.prompts import (
    CRITICIZE,
    JUDGE,
    REWRITE,
    find_reference,
    make_prompt,
    parse_score,
    parse_tagged,
    parse_whole,
    show_draft,
    show_events,
    show_task,
)
from courtside.types import Event, Message, Task, Turn


@pytest.mark.parametrize("template", [REWRITE, CRITICIZE, JUDGE])
def test_slots_are_filled_once_and_texts_stay_as_they_are(template: str) -> None:
    notes = {"A check said": "wrong {draft}", "Nothing": ""}
    text = make_prompt(template, "2+2? {notes}", "{task} 5", notes).content
    assert "2+2? {notes}" in text and "{task} 5" in text
    assert "A check said:\nwrong {draft}\n\n" in text and "Nothing" not in text
    assert ('{"score": N}' in text) == (template is JUDGE)


def test_episodes_turn_by_turn() -> None:
    def turn(role: str, text: str, *messages: Message) -> Turn:
        return Turn(role=role, text=text, token_ids=(3,), completion_mask=(role == "assistant",),
                    messages=messages)  # type: ignore[arg-type]  # fmt: skip

    single = draft(2, 0)
    assert show_draft(single) == "!"
    turns = (
        single.turns[0],
        turn("assistant", "look"),
        turn("environment", "", Message(role="tool", content="empty")),
        turn("assistant", "give up"),
    )
    episode = draft(2, 0, turns=turns)
    assert show_draft(episode) == "assistant: look\n\ntool: empty\n\nassistant: give up"
    assert show_task(episode.task, turns[1:3]) == "user: ?\n\nassistant: look\n\ntool: empty"


def test_the_correct_reply_is_no_feedback() -> None:
    events = (Event(kind="date", details={"given": "May", "correct": "June"}), Event(kind="late"))
    turn = Turn(role="assistant", text="", token_ids=(), completion_mask=(), events=events)
    assert show_events(turn) == 'date: {"given": "May"}\nlate'


def test_references() -> None:
    task = Task(id="t", split="train", messages=(), answer="4", privileged={"rule": "add"})
    names = (None, "rule", "answer", "other")
    assert [find_reference(task, name) for name in names] == ["", "add", "4", ""]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("Sure!\n<answer>\nfour\nlines </answer> Done.", "four\nlines"),
        ("<think><answer>5</answer></think><answer>4</answer>", "4"),
        ("<answer>4", None),
        ("4</answer>", None),
        ("<answer> </answer>", None),
        ("</answer>4<answer>", None),
        ("<answer>4</answer><answer>5</answer>", None),
        ("<answer><answer>4</answer></answer>", None),
        ("4", None),
        ("", None),
    ],
)
def test_tagged_replies(text: str, answer: str | None) -> None:
    assert parse_tagged(text, "answer") == answer


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 7}', 7.0), ('It is good: {"score": 0.5}', 0.5), ('{"score": 10}', 10.0),
        ('{"score": 11}', None), ('{"score": -1}', None), ('{"score": true}', None),
        ('{"score": "7"}', None), ('{"score": NaN}', None), ("{}", None), ("7", None), ("", None),
        ('{"score": 7} {"score": 8}', None), ('{"score": 7', None), ("{score: 7}", None),
        ('{"score": null}', None), ('{"score": [7]}', None), ('{"score": 1e999}', None),
    ],
)  # fmt: skip
def test_scores(text: str, score: float | None) -> None:
    assert parse_score(text) == score


@given(st.text(alphabet='<>/answer{}"score: 0.9\n[]\\tNaI', max_size=60))
def test_garbage_is_an_answer_or_none_and_never_raises(text: str) -> None:
    score = parse_score(text)
    assert score is None or 0 <= score <= 10
    for value in (parse_tagged(text, "answer"), parse_whole(text)):
        assert value is None or value.strip() == value != ""
