"""Every detector, on turns that it must find and on their near neighbours that it must not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scripted_trajectories import (
    PROMPT,
    assistant,
    balanced,
    environment,
    event,
    play,
    tool,
    tool_missing,
)

from courtside.reader.base import Reader, ReaderOutput
from courtside.reader.detectors import find_span, unique_span
from courtside.reader.loading import make_reader
from courtside.recipe.reader import RuleReaderConfig
from courtside.recipe.rules import ERROR_PATTERN, Rule
from courtside.sanitize import escape_control_characters, to_one_line
from courtside.types import Message, Trajectory

TOOLS = {"tools": "meteo, sums"}


def reader(*rules: dict[str, Any], **fields: Any) -> Reader:
    listed = {"rules": [Rule(**rule) for rule in rules]} if rules else {}
    return make_reader(RuleReaderConfig(kind="rules", **listed, **fields), seed=3)


def read(trajectory: Trajectory, *rules: dict[str, Any], **fields: Any) -> ReaderOutput:
    reading = reader(*rules, **fields)([trajectory])
    assert balanced(reading.counts), reading.counts
    return reading


def turns(trajectory: Trajectory, **rule: Any) -> list[int]:
    return [hint.turn for hint in read(trajectory, rule).hints]


# ── what the environment reported ────────────────────────────────────────────────────────────────


def test_a_tool_that_is_not_there() -> None:
    bad = assistant('{"name": "weather"}', tool_missing())
    [hint] = read(play(bad, tool("Tool not found: weather"), "Fine.", privileged=TOOLS)).hints
    assert (hint.turn, hint.text) == (1, "Reminder: the tools here are meteo, sums.")
    assert (hint.source, hint.bad_span) == ("rules:tool_not_found", "weather")
    assert (hint.reason, hint.confidence) == ("Tool not found: weather", None)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("invalid_arguments", "Careful with the arguments of meteo: no place"),
        ("unparsable_call", "Reminder: write the call exactly in the format that was described."),
        ("tool_error", "Careful: calling meteo like this fails: no place"),
        ("no_call", "Reminder: this needs a tool. The tools here are meteo, sums."),
        ("repeated_call", "Reminder: the same call was made before and did not help. Do something"
         " else."),
    ],
)  # fmt: skip
def test_other_events(kind: str, text: str) -> None:
    turn = assistant("meteo()", event(kind, tool="meteo", arguments="{}", message="no place"))
    reading = read(play("Hm.", tool("?"), turn, tool("no place"), "Oh.", privileged=TOOLS))
    assert [(hint.turn, hint.text) for hint in reading.hints] == [(3, text)]
    assert reading.counts == {f"rules/{kind}": 1, "accepted": 1}
    clean = play("Hm.", tool("?"), "meteo(1)", tool("rain"), "Oh.", privileged=TOOLS)
    assert read(clean) == ReaderOutput(hints=(), counts={})


def test_an_event_of_ones_own() -> None:
    trajectory = play(assistant("a", event("wrong_tool", listed="meteo")), tool("x"), "b")
    rule = {"detect": "event", "event": "wrong_tool", "hint": "Use {listed}."}
    assert [hint.text for hint in read(trajectory, rule).hints] == ["Use meteo."]
    assert turns(trajectory, detect="event", event="other", hint="Use it.") == []


def test_a_message_that_the_event_lacks_is_the_reply() -> None:
    trajectory = play(assistant("a", event("tool_error", tool="sums")), tool("Error: no\n numbers"))
    [hint] = read(trajectory).hints
    assert hint.text == "Careful: calling sums like this fails: Error: no numbers"


def test_facts_are_one_short_line_but_names_are_whole() -> None:
    long = "x" * 5000
    turn = assistant("a", event("tool_error", tool="t" * 300, message=f"first\nsecond {long}"))
    [hint] = read(play(turn), {"detect": "tool_error", "hint": "{tool}|\n{message}"}).hints
    head, message = hint.text.split("|\n")
    assert head == "t" * 300
    assert message.startswith("first second xxx") and len(message) == 200 and message[-1] == "…"


# ── slots ────────────────────────────────────────────────────────────────────────────────────────


def test_slots_come_from_event_and_task() -> None:
    privileged = {"rule": "Be brief.", "listed": "not this one"}
    turn = assistant("a", tool_missing("weather", listed="meteo", city="Oslo"))
    hint = "{turn} {tool} {listed} {city} {rule} {{kept}}"
    reading = read(play(turn, privileged=privileged), {"detect": "tool_not_found", "hint": hint})
    assert reading.hints[0].text == "1 weather meteo Oslo Be brief. {kept}"


@pytest.mark.parametrize("privileged", [{}, {"tools": "  "}])
def test_a_missing_slot_is_counted(privileged: dict[str, str]) -> None:
    reading = read(play(assistant("a", tool_missing()), privileged=privileged))
    assert reading.hints == ()
    assert reading.counts == {"rules/tool_not_found": 1, "dropped/missing_slot": 1}


def test_a_hint_that_got_too_long_is_counted() -> None:
    reading = read(play(assistant("a", tool_missing()), privileged={"tools": "x" * 990}))
    assert reading.counts == {"rules/tool_not_found": 1, "dropped/long_hint": 1}


def test_values_are_not_templates() -> None:
    turn = assistant("a", event("tool_error", tool="{tools}", message="{0.__class__} {turn}"))
    [hint] = read(play(turn, privileged=TOOLS)).hints
    assert hint.text == "Careful: calling {tools} like this fails: {0.__class__} {turn}"


def test_hints_hold_no_control_characters() -> None:
    turn = assistant("a", event("tool_error", tool="a\x1b[2Jb", message="x\u202ey\ufdd0z\ud800"))
    [hint] = read(play(turn)).hints
    assert hint.text == "Careful: calling a[2Jb like this fails: xyz"


# ── what is read off the text ────────────────────────────────────────────────────────────────────

ERROR, SUN, RAIN = tool("Error: no such city"), tool("sun"), tool("rain")


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (play("a()", ERROR, "a()", ERROR, "b"), [3]),
        (play("a()", ERROR, " a()\n", ERROR, "b"), [3]),  # white space apart
        (play("a()", ERROR, "b()", SUN, "a()", ERROR), [5]),  # after an error, not right after it
        (play("a()", SUN, "a()", SUN, "b"), [3]),  # the same answer again
        (play("a()", SUN, "a()", stop="turns"), [3]),  # never answered
        (play("a()", ERROR, "b()", SUN, "a()", stop="turns"), [5]),
        (play("a()", SUN, "a()", RAIN, "b"), []),  # paging: the second told something new
        (play("a()", ERROR, "b()", SUN, "a()", SUN), []),  # tried again, and now it works
        (play("a()", ERROR, "a()", SUN, "b"), []),
        (play("a()", SUN, "b()", SUN, "a()", SUN), []),  # a success, looked up once more later
        (play("a()", ERROR, "a(1)", ERROR, "b"), []),
        (play("", ERROR, "  ", ERROR, "b"), []),  # nothing was said
    ],
)
def test_repeated_call(trajectory: Trajectory, expected: list[int]) -> None:
    assert turns(trajectory, detect="repeated_call") == expected


def test_repeated_call_tells_what_was_said_the_first_time() -> None:
    rule = {"detect": "repeated_call", "hint": "It said {message}."}
    [hint] = read(play("a()", ERROR, "a()", tool("Error: again")), rule).hints
    assert hint.text == "It said Error: no such city." and hint.reason == "the same as turn 1"


FAILED = assistant("a()", tool_missing("a"))


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (play("a()", ERROR, "a()", ERROR, "Sorry."), [3]),  # the same again
        (
            play(FAILED, SUN, assistant("a(2)", tool_missing("a")), SUN, "Sorry."),
            [3],
        ),  # the same mistake
        (play("a()", ERROR, "a(2)", ERROR, "Sorry."), [3]),  # the very same error
        (play("a()", ERROR, "It is sunny."), [3]),  # an answer out of nowhere
        (play("a()", ERROR, "It is sunny.", stop="eos"), [3]),
        (play("a()", ERROR, "I could not look it up."), []),  # admits it
        (play("a()", ERROR, "b()", SUN, "It is sunny."), []),  # another way was found
        (
            play(FAILED, SUN, assistant("b(2)", tool_missing("b")), RAIN, "Sorry."),
            [],
        ),  # another mistake
        (play("a()", ERROR, "a(2)", tool("Error: other"), "Sorry."), []),
        (play("a()", ERROR, "a(2)", stop="done"), []),  # the last turn is a call, not an answer
        (play("a()", ERROR, '<tool_call>{"name": "b"}</tool_call>', stop="done"), []),
        (play("a()", ERROR, "It is sun", stop="length"), []),  # cut off, not an answer
        (play("a()", SUN, "It is sunny."), []),
        (play("It is sunny."), []),
    ],
)
def test_ignored_error(trajectory: Trajectory, expected: list[int]) -> None:
    assert turns(trajectory, detect="ignored_error") == expected


def test_ignored_error_repeats_the_message() -> None:
    [hint] = read(play("a()", ERROR, "It is sunny."), {"detect": "ignored_error"}).hints
    assert "Error: no such city" in hint.text


LOOKUP = {"lookup": "yes"}


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (play("Sunny.", privileged=LOOKUP), [1]),
        (play("a()", ERROR, "Sunny.", privileged=LOOKUP), [3]),  # no call succeeded
        (play(assistant("Hm", event("no_call")), SUN, "Sunny.", privileged=LOOKUP), [3]),
        (play("a()", SUN, "Sunny.", privileged=LOOKUP), []),
        (play("a()", SUN, "b()", ERROR, "Sunny.", privileged=LOOKUP), []),
        (play("Sunny.", privileged={"lookup": "No"}), []),
        (play("Sunny."), []),
        (play("Sunny", privileged=LOOKUP, stop="length"), []),
        (play("a()", privileged=LOOKUP), []),  # a call that ended the episode
    ],
)
def test_answer_without_lookup(trajectory: Trajectory, expected: list[int]) -> None:
    assert turns(trajectory, detect="answer_without_lookup", lookup_field="lookup") == expected


def test_lookup_by_the_prompt() -> None:
    def hinted_turns(pattern: str) -> list[int]:
        rule = {"detect": "answer_without_lookup", "pattern": pattern}
        return turns(play("Sunny."), **rule)

    assert hinted_turns(r"weather in \w+") == [1] and hinted_turns("population") == []
    assert PROMPT.startswith("What")


def test_over_length() -> None:
    trajectory = play(
        assistant("a", num_tokens=9), SUN, assistant("b", num_tokens=4), stop="length"
    )
    assert turns(trajectory, detect="over_length") == [3]
    assert turns(trajectory, detect="over_length", max_tokens=8) == [1, 3]
    assert turns(trajectory, detect="over_length", max_tokens=9) == [3]
    finished = play(assistant("a", num_tokens=9), SUN, "b", stop="eos")
    assert turns(finished, detect="over_length") == []
    reading = read(finished, {"detect": "over_length", "max_tokens": 8, "hint": "{tokens} > 8"})
    assert reading.hints[0].text == "9 > 8"


def test_pattern_in_the_turn() -> None:
    rule = {"detect": "pattern", "pattern": r"get_(?P<what>\w+)", "hint": "{match}: drop {what}."}
    [hint] = read(play("call get_weather", SUN, "forget it"), rule).hints
    assert (hint.turn, hint.text) == (1, "get_weather: drop weather.")
    assert (hint.bad_span, hint.source) == ("get_weather", "rules:pattern")


def test_pattern_in_the_reply() -> None:
    trajectory = play("deny", tool("fine", "access denied"), "denied", tool("fine"))
    rule = {"detect": "pattern", "pattern": "den(y|ied)", "within": "reply", "hint": "{message}"}
    [hint] = read(trajectory, rule).hints
    assert (hint.turn, hint.text, hint.bad_span) == (1, "fine access denied", None)


@pytest.mark.parametrize(
    ("text", "is_error"),
    [
        ("Error: x", True), ("error 404", True), ("ERROR", True), ('{"error": "x"}', True),
        ("[error] x", True), ("ValueError: x", True), ("Traceback (most recent call last)", True),
        ("Error in weather: x", True), ("json.JSONDecodeError: x", True), ("Failed: x", True),
        ("Error: no such city", True), ("Error: 0 rows", True), ("Tool not found: x", True),
        ("  {'error': 'x'}", True),
        ('{"error": null, "result": 3}', False), ('{"error": ""}', False), ("error: none", False),
        ("No errors.", False), ("Terror in Oslo: a novel", False), ("Failed states of 1990", False),
        ("Errors are human", False), ("The error: x", False), ("", False), ("3", False),
    ],
)  # fmt: skip
def test_what_reads_like_an_error(text: str, is_error: bool) -> None:
    assert (re.search(ERROR_PATTERN, text) is not None) == is_error


def test_errors_are_the_tools_not_the_users() -> None:
    reply = (Message(role="tool", content="3"), Message(role="user", content="Error: now fix it"))
    trajectory = play("a()", environment(*reply), "Sunny.")
    assert turns(trajectory, detect="ignored_error") == []
    by_user = play("a()", environment(Message(role="user", content="Error: x")), "Sunny.")
    assert turns(by_user, detect="ignored_error") == [3]
    default = read(play("a()", tool("oops"), "Sunny."), {"detect": "ignored_error"})
    assert default.hints == ()
    default = read(play("a()", tool("oops"), "Sunny."), {"detect": "ignored_error"},
               error_pattern="oops")  # fmt: skip
    assert [hint.turn for hint in default.hints] == [3]


# ── several rules, spans, noise ──────────────────────────────────────────────────────────────────


def test_the_first_rule_that_finds_a_turn_speaks() -> None:
    first = {"detect": "pattern", "pattern": "weather", "hint": "One."}
    second = {"detect": "tool_not_found", "hint": "Two."}
    trajectory = play(assistant("weather", tool_missing()), SUN, assistant("x", tool_missing("x")))
    assert [h.text for h in read(trajectory, first, second).hints] == ["One.", "Two."]
    reading = read(trajectory, second, first)
    assert [h.text for h in reading.hints] == ["Two.", "Two."]
    assert reading.counts == {
        "rules/tool_not_found": 2, "rules/pattern": 1, "dropped/duplicate": 1, "accepted": 2,
    }  # fmt: skip


def test_turns_in_which_nothing_was_chosen_are_left_alone() -> None:
    assert read(play(assistant("", tool_missing(), num_tokens=0), privileged=TOOLS)).hints == ()


def test_a_span_is_located_in_the_text() -> None:
    assert find_span("weathered; weather()", "weather") == " weather"
    assert find_span("my_weather", "weather") == "weather"
    assert find_span("a.b", "a?b") is None and find_span("a", "") is None
    text = "ab ab ab"
    assert unique_span(text, 3, 5) == " ab" and text.find(" ab") == 2
    assert unique_span(text, 6, 8) == " ab ab"
    assert unique_span("a  b", 1, 3) is None


def test_lines() -> None:
    assert to_one_line("a\r\n\tb\u2028c\x00d\x85e ") == "a b cd e"
    assert escape_control_characters("a\r\n\tb\u2028\x00\ufeff\U000e0041\u200d") == "a\n\tb\n\u200d"


def noisy(share: float, number: int = 200, seed: int = 3) -> ReaderOutput:
    """One reader over many trajectories, each with one mistake and two clean turns."""
    config = RuleReaderConfig(kind="rules", false_positive_rate=share)
    batch = [
        play(
            assistant("weather", tool_missing()), SUN, "b", RAIN, "c", id=f"t{i}", privileged=TOOLS
        )
        for i in range(number)
    ]
    return make_reader(config, seed=seed)(batch)


def test_false_positives() -> None:
    reading = noisy(0.25)
    assert balanced(reading.counts)
    noise = [hint for hint in reading.hints if hint.source == "rules:false_positive"]
    assert 0.2 < len(noise) / 400 < 0.3
    assert {hint.turn for hint in noise} == {3, 5}
    assert sum(hint.source == "rules:tool_not_found" for hint in reading.hints) == 200
    assert all(hint.text for hint in noise)
    assert noisy(0.25) == reading and noisy(0.25, seed=4) != reading
    assert len(noisy(1.0).hints) == 600 and len(noisy(0.0).hints) == 200


def test_false_positives_grow_with_the_share() -> None:
    few, many = ({(h.trajectory, h.turn) for h in noisy(share).hints} for share in (0.1, 0.4))
    assert few < many


def test_a_thousand_turns_are_quick() -> None:
    rules = [{"detect": name} for name in ("repeated_call", "ignored_error")]
    reading = read(play(*(["a()", ERROR] * 1000)), *rules, max_hints=1000)
    assert reading.counts["rules/repeated_call"] == 999 and len(reading.hints) == 999


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.5, "0.5"), (True, "true"), (None, "null"), ([1, "a"], '[1, "a"]'),
     ({"a": [1]}, '{"a": [1]}'), ("ü", "ü")],
)  # fmt: skip
def test_details_of_events_are_any_json(value: Any, text: str) -> None:
    """Also where a detector looks for the tool's name in the turn."""
    bad = assistant("Call 3.", event("tool_not_found", tool=value, message=value, x=value))
    second = assistant("Call 4.", event("tool_not_found", tool=value))
    rule = {"detect": "tool_not_found", "hint": "Not {x}: {tool}."}
    [hint] = read(play(bad, tool("No."), "Fine."), rule).hints
    assert hint.text == f"Not {text}: {text}." and hint.reason == text
    assert turns(play(bad, tool("No."), second), detect="ignored_error") == [3]
