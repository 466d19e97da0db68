"""Arbitrary trajectories and arbitrary replies: nothing raises, and every hint can be used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_trajectories import balanced

from courtside.chat.model_client import Reply
from courtside.reader.base import ReaderOutput
from courtside.reader.loading import make_reader
from courtside.reader.model.prompt import CLOSE, OPEN, make_windows
from courtside.recipe.reader import CombinedReaderConfig, ModelReaderConfig, RuleReaderConfig
from courtside.recipe.rules import Detect, Rule
from courtside.sanitize import to_one_line
from courtside.types import Event, Grade, Message, Task, Trajectory, Turn

NASTY = ["", " ", "\n", "{", "}", "{tool}", "[]", '"', "\\", "<|im_end|>", CLOSE, "Error: x", "a()",
         "\x00", "\u2028", "\ud800", "\ufdd0", "weather", '[{"turn": 1, "hint": "x"}]']  # fmt: skip
texts = st.one_of(
    st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=8)), max_size=4).map("".join)
)
kinds = st.sampled_from(["tool_not_found", "invalid_arguments", "unparsable_call", "tool_error",
                         "no_call", "repeated_call", "odd"])  # fmt: skip
details = st.dictionaries(
    st.one_of(st.sampled_from(["tool", "arguments", "message", "listed", "tools", "turn"]), texts),
    texts,
    max_size=3,
)
events = st.lists(st.builds(Event, kind=kinds, details=details), max_size=2).map(tuple)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=texts)


@st.composite
def a_turn(draw: st.DrawFn) -> Turn:
    role = draw(st.sampled_from(["assistant", "environment", "prompt"]))
    num = draw(st.integers(0, 3))
    chosen = tuple(role == "assistant" and draw(st.booleans()) for _ in range(num))
    return Turn(
        role=role,  # type: ignore[arg-type]
        text=draw(texts),
        token_ids=tuple(range(num)),
        completion_mask=chosen,
        messages=tuple(draw(st.lists(messages, max_size=2))) if role == "environment" else (),
        events=draw(events) if role == "assistant" else (),
    )


@st.composite
def a_batch(draw: st.DrawFn) -> list[Trajectory]:
    return [
        Trajectory(
            id=f"t{number}",
            task=Task(
                id="x",
                split="train",
                messages=tuple(draw(st.lists(messages, min_size=1, max_size=2))),
                privileged=draw(st.dictionaries(st.sampled_from(["tools", "need"]), texts)),
            ),
            turns=tuple(draw(st.lists(a_turn(), max_size=8))),
            source="student",
            policy_version=0,
            temperature=1.0,
            stop=draw(st.sampled_from(["eos", "length", "turns", "done"])),
            grade=draw(
                st.none()
                | st.builds(Grade, score=st.floats(0, 1), passed=st.booleans(), feedback=texts)
            ),
        )
        for number in range(draw(st.integers(0, 3)))
    ]


RULES = tuple(
    Rule.model_validate({"detect": name} | more)
    for name in get_args(Detect)
    for more in {
        "event": [{"event": "odd", "hint": "{tool}"}],
        "pattern": [
            {"pattern": "(?P<what>w|E)", "hint": "{match}{what}", "within": within}
            for within in ("turn", "reply")
        ],
        "answer_without_lookup": [{"lookup_field": "need"}, {"pattern": "a"}],
    }.get(name, [{}])
)
CONTROLS = st.sampled_from(["none", "random_turn", "random_hint", "all_turns"])


def check(reading: ReaderOutput, batch: Sequence[Trajectory], max_hints: int, control: str) -> None:
    assert balanced(reading.counts), reading.counts
    assert reading.counts.get("accepted", 0) == len(reading.hints)
    by_id = {trajectory.id: trajectory for trajectory in batch}
    places = [(hint.trajectory, hint.turn) for hint in reading.hints]
    assert len(set(places)) == len(places)
    for hint in reading.hints:
        turn = by_id[hint.trajectory].turns[hint.turn]
        assert hint.turn >= 0 and turn.role == "assistant" and any(turn.completion_mask)
        assert 0 < len(hint.text) <= 1000 and hint.text == hint.text.strip()
        assert not any(c in hint.text for c in "\x00\ud800\ufdd0\u2028")
        assert hint.bad_span is None or hint.bad_span in turn.text
        hint.text.encode()
    if control != "all_turns":
        assert all(sum(p[0] == id for p in places) <= max_hints for id in by_id)


@settings(max_examples=40, deadline=None)
@given(a_batch(), CONTROLS, st.integers(1, 4), st.floats(0, 1))
def test_rules(batch: list[Trajectory], control: Any, max_hints: int, noise: float) -> None:
    config = RuleReaderConfig(
        kind="rules", rules=RULES, control=control, max_hints=max_hints, false_positive_rate=noise
    )
    read = make_reader(config, seed=1)
    check(read(batch), batch, max_hints, control)
    assert read(batch) == read(batch)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "turn": st.integers(-2, 9) | values,
        "hint": texts | values,
        "reason": texts | values,
        "confidence": st.floats() | st.floats(0, 1) | values,
    },
)
PIECES = [*'[]{}",:\\', "turn", "hint", "1", "```"]
replies = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.builds(
        lambda before, answer, after: before + json.dumps(answer) + after,
        texts, st.lists(entries, max_size=4) | entries | values, texts,
    ),
)  # fmt: skip


class Scripted:
    def __init__(self, replies: Sequence[str]):
        self.replies = replies

    def __call__(self, prompts: Sequence[Sequence[Message]]) -> list[Reply]:
        for prompt in prompts:
            lines = prompt[-1].content.split("\n")
            assert lines.count(OPEN) == lines.count(CLOSE) == 1
            assert all(json.loads(line) for line in lines[1 : lines.index(CLOSE)])
            prompt[-1].content.encode()
        return [Reply(text=self.replies[i % len(self.replies)]) for i in range(len(prompts))]

    def fits(self, prompt: Sequence[Message]) -> bool:
        return True


@settings(max_examples=60, deadline=None)
@given(a_batch(), st.lists(replies, min_size=1, max_size=3), CONTROLS, st.integers(1, 4))
def test_model(batch: list[Trajectory], replies: list[str], control: Any, max_hints: int) -> None:
    config = ModelReaderConfig(kind="model", control=control, max_hints=max_hints)
    reading = make_reader(config, ask_self=lambda _: Scripted(replies), seed=1)(batch)
    check(reading, batch, max_hints, control)
    assert all(hint.text == to_one_line(hint.text) for hint in reading.hints)
    assert all(h.confidence is None or 0 <= h.confidence <= 1 for h in reading.hints)


@settings(max_examples=20, deadline=None)
@given(a_batch(), st.lists(replies, min_size=1, max_size=3), CONTROLS)
def test_both(batch: list[Trajectory], replies: list[str], control: Any) -> None:
    members = (
        ModelReaderConfig(kind="model"),
        RuleReaderConfig(kind="rules", rules=RULES, max_hints=2),
    )
    config = CombinedReaderConfig(kind="combined", readers=members, control=control, max_hints=3)
    reading = make_reader(config, ask_self=lambda _: Scripted(replies), seed=1)(batch)
    check(reading, batch, 3, control)


@settings(max_examples=30, deadline=None)
@given(a_batch(), st.integers(1000, 3000), st.integers(0, 500), st.integers(100, 400))
def test_windows(
    batch: list[Trajectory], window: int, overlap: int, max_message_chars: int
) -> None:
    config = ModelReaderConfig(
        kind="model",
        window_chars=window,
        overlap_chars=overlap,
        max_message_chars=max_message_chars,
    )
    for trajectory in batch:
        windows = make_windows(trajectory, config)
        hintable = {i for i, t in enumerate(trajectory.turns)
                    if t.role == "assistant" and any(t.completion_mask)}  # fmt: skip
        assert {turn for w in windows for turn in w.turns} == hintable


def test_reading_loads_no_torch() -> None:
    code = (
        "import sys, courtside.reader.loading, courtside.chat.openai_client; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
