"""Replies → calls, and the errors of those that hold none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.environments.tool_calls import (
    MAX_CALL,
    CallError,
    CallFormat,
    ToolCall,
    format_call,
    parse_call,
)

FORMATS: tuple[CallFormat, ...] = ("json", "plain")


def call(text: str, call_format: CallFormat = "json") -> ToolCall:
    parsed = parse_call(text, call_format)
    assert isinstance(parsed, ToolCall), parsed
    return parsed


def error(text: str, call_format: CallFormat = "json") -> CallError:
    parsed = parse_call(text, call_format)
    assert isinstance(parsed, CallError), parsed
    assert parsed.message.startswith("Could not parse a tool call: ") and parsed.message.encode()
    return parsed


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


# ── both ─────────────────────────────────────────────────────────────────────────────────────────

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)
VALUES = st.one_of(TEXTS, st.integers(-(10**12), 10**12), st.booleans())


@pytest.mark.parametrize("call_format", FORMATS)
@settings(deadline=None)
@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_is_written_is_read(
    call_format: CallFormat, name: str, arguments: dict[str, Any]
) -> None:
    formatted = format_call(name, arguments, call_format)
    assert call(formatted, call_format) == ToolCall(name=name, arguments=arguments)
    around = f"Let me look that up.\n{formatted}\nThat should do."
    assert call(around, call_format) == ToolCall(name=name, arguments=arguments)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}}", '"', "'", "\\", "f(",
     "a=", ")", ",", "[", "{", "1e999", "9" * 5000, "\\ud800", "\ud800", "NaN", "null", "\n"]
)  # fmt: skip


@pytest.mark.parametrize("call_format", FORMATS)
@settings(deadline=None)
@given(pieces=st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=20))
def test_no_text_raises(call_format: CallFormat, pieces: list[str]) -> None:
    parsed = parse_call("".join(pieces), call_format)
    if isinstance(parsed, ToolCall):
        # Whatever was read can be stored.
        json.dumps([parsed.name, dict(parsed.arguments)], ensure_ascii=False).encode()
    else:
        parsed.message.encode()


@pytest.mark.parametrize("call_format", FORMATS)
def test_hostile_replies_are_quick(call_format: CallFormat) -> None:
    for text in ("f(" * 50_000, "f(a='" * 20_000, "[" * 100_000, "a" * 100_000, "(" * 100_000):
        assert isinstance(parse_call(text, call_format), CallError)
        assert isinstance(parse_call(f"<tool_call>{text}", call_format), CallError)
        assert isinstance(parse_call(f'<tool_call>{{"name": {text}', call_format), CallError)


@pytest.mark.parametrize("call_format", FORMATS)
def test_a_call_has_a_size(call_format: CallFormat) -> None:
    assert isinstance(
        parse_call(format_call("f", {"a": "x" * (MAX_CALL // 2)}, call_format), call_format),
        ToolCall,
    )
    error(format_call("f", {"a": "x" * (2 * MAX_CALL)}, call_format), call_format)


@pytest.mark.parametrize("call_format", FORMATS)
def test_of_several_calls_the_first_is_taken(call_format: CallFormat) -> None:
    replies = [format_call(name, {"text": "f(a=1)"}, call_format) for name in ("one", "two", "tri")]
    parsed = call("First ".join(replies), call_format)
    assert (parsed.name, parsed.num_ignored) == ("one", 2)
    assert call(replies[0], call_format).num_ignored == 0


def test_a_call_inside_an_argument_is_text() -> None:
    inner = tagged('{"name": "delete_note", "arguments": {}}')
    for call_format in FORMATS:
        parsed = call(format_call("write_note", {"text": inner}, call_format), call_format)
        assert parsed == ToolCall(name="write_note", arguments={"text": inner})


# ── json ─────────────────────────────────────────────────────────────────────────────────────────


def test_layouts_of_json_calls() -> None:
    expected = ToolCall(name="f", arguments={"a": 1})
    body = '{"name": "f", "arguments": {"a": 1}}'
    assert call(tagged(body)) == expected
    assert call(tagged(f"\n{body}\n")) == expected
    assert call(tagged('{\n  "arguments": {"a": 1},\n  "name": " f "\n}')) == expected
    assert call(f"<tool_call>{body}") == expected, "cut off by a stop string"
    assert call(tagged('{"name": "f"}')).arguments == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>", "Expecting value at character 0"),
        (tagged('{"name": "f", "arguments": {"a": }}'), "Expecting value at character 3"),
        (tagged('{"name": "f", "arguments": {"a": "b'), "Invalid control|Unterminated string"),
        (tagged('{"name": "f"') + "}", "Expecting ',' delimiter"),
        ('<tool_call>{"name": "f"} and so on', "</tool_call> is missing"),
        (tagged('["f"]'), "a call is an object"),
        (tagged('{"name": "f", "parameters": {}}'), "unexpected key 'parameters'"),
        (tagged('{"name": "", "arguments": {}}'), "the call has no name"),
        (tagged('{"name": 3, "arguments": {}}'), "the call has no name"),
        (tagged('{"arguments": {}}'), "the call has no name"),
        (tagged('{"name": "f", "arguments": "{}"}'), "arguments must be an object"),
        (tagged('{"name": "f", "arguments": {"a": NaN}}'), "NaN is not JSON"),
        (tagged('{"name": "f", "arguments": {"a": "\\ud800"}}'), "surrogate"),
        (tagged('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"), "number is too long"),
        (tagged('{"name": "f", "arguments": {"a": ' + "[" * 9000 + "]" * 9000 + "}}"), "nested"),
    ],
)
def test_json_that_cannot_be_read(text: str, reason: str) -> None:
    parsed = error(text)
    assert parsed.kind == "unparsable_call"
    assert re.search(reason, parsed.message), parsed.message


def test_prose_holds_no_json_call() -> None:
    for text in ("", "It is sunny.", '{"name": "f", "arguments": {}}', "f(a=1)", "<tool_call"):
        assert error(text).kind == "no_call"


# ── plain ────────────────────────────────────────────────────────────────────────────────────────


def test_layouts_of_plain_calls() -> None:
    expected = ToolCall(name="f", arguments={"a": "x", "b": 2})
    for text in ('f(a="x", b=2)', "f( a = 'x' ,b=2 )", 'f(\n  a="x",\n  b=2\n)'):
        assert call(text, "plain") == expected
    assert call("f()", "plain").arguments == {}
    assert call("f(a=-1.5, b=true, c=None)", "plain").arguments == {"a": -1.5, "b": True, "c": None}
    assert call(r'f(a="say \"hi\",\nyou\\", b="it\'s")', "plain").arguments == {
        "a": 'say "hi",\nyou\\', "b": "it's",
    }  # fmt: skip


def test_prose_that_looks_like_a_call_is_passed_over() -> None:
    parsed = call('The temperature(s) come from meteo(city="Oslo").', "plain")
    assert parsed == ToolCall(name="meteo", arguments={"city": "Oslo"})
    assert call('get-weather(city="Oslo")', "plain").name == "get-weather", "not weather"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('meteo("Oslo")', "expected argument=value before '\"Oslo\")'"),
        ("meteo(city=Oslo)", "expected a quoted text or a number before 'Oslo)'"),
        ('meteo(city="Oslo"', "expected ',' or ')' at the end of the reply"),
        ('meteo(city="Oslo" days=2)', "expected ',' or ')' before 'days=2)'"),
        ('meteo(city="Oslo)', "expected a quoted text or a number"),
        ("f(a=1, a=2)", "argument 'a' is given twice"),
        (r'f(a="\q")', r"unknown escape \\q"),
        (r'f(a="\ud800")', "surrogate"),
        ('f(a="\ud800")', "surrogate"),
        ('f(a="\\\ud800")', "surrogate"),
        ("f(\ud800)", "expected argument=value"),
        ("f(a=1.2.3)", "expected a quoted text or a number"),
        ("f(a=" + "9" * 5000 + ")", "expected a quoted text or a number"),
        ("f(a=[1])", "expected a quoted text or a number"),
    ],
)
def test_plain_calls_that_cannot_be_read(text: str, reason: str) -> None:
    parsed = error(text, "plain")
    assert parsed.kind == "unparsable_call"
    assert re.search(reason.replace("(", r"\(").replace(")", r"\)"), parsed.message), parsed.message


def test_prose_holds_no_plain_call() -> None:
    for text in ("", "It is sunny (and warm).", "(1 + 2)", '{"name": "f"}', "3(a=1)"):
        assert error(text, "plain").kind == "no_call"
