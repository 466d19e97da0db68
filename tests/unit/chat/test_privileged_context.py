from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.chat.messages import insert_context
from courtside.types import Message

roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.lists(
    st.builds(Message, role=roles, content=st.text(max_size=6)), min_size=1, max_size=5
)

SYSTEM, ASK, SAY = (
    Message(role="system", content="Be kind."),
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Hello"),
)


@pytest.mark.parametrize(
    ("before", "place", "after"),
    [
        ([ASK], "system", [("system", "RULE"), ("user", "Hi")]),
        ([SYSTEM, ASK], "system", [("system", "Be kind.\n\nRULE"), ("user", "Hi")]),
        ([ASK], "user", [("user", "Hi\n\nRULE")]),
        ([SYSTEM, ASK], "user", [("system", "Be kind."), ("user", "Hi\n\nRULE")]),
        (
            [ASK, SAY, ASK],
            "user",
            [("user", "Hi"), ("assistant", "Hello"), ("user", "Hi\n\nRULE")],
        ),
        (
            [ASK, SAY],
            "user",
            [("user", "Hi\n\nRULE"), ("assistant", "Hello")],
        ),
        ([SYSTEM], "user", [("system", "Be kind."), ("user", "RULE")]),
    ],
)
def test_where_a_context_goes(
    before: list[Message], place: Literal["system", "user"], after: list[tuple[str, str]]
) -> None:
    assert [(m.role, m.content) for m in insert_context(before, "RULE", place)] == after


@settings(deadline=None)
@given(before=messages, text=st.text(max_size=6), place=st.sampled_from(["system", "user"]))
def test_one_message_gains_the_text_and_nothing_else_changes(
    before: list[Message], text: str, place: Literal["system", "user"]
) -> None:
    after = list(insert_context(before, text, place))
    if len(after) == len(before):
        ((old, new),) = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert new == Message(role=place, content=f"{old.content}\n\n{text}")
        assert old.role == place
    else:
        at = 0 if place == "system" else len(before)
        assert after[at] == Message(role=place, content=text)
        del after[at]
        assert after == before
        assert (before[0].role if place == "system" else None) != "system"
        assert place == "system" or all(m.role != "user" for m in before)
