"""The tools of the toolbox, at their edges."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.environments.toolbox.tools import TOOLS
from courtside.environments.toolbox.tools.base import ToolFailure, ToolState, invalid_arguments
from courtside.environments.toolbox.tools.expression import evaluate, format_fraction
from courtside.environments.toolbox.tools.names import NAMES
from courtside.environments.toolbox.tools.notes import MAX_NOTE, MAX_NOTES
from courtside.hashing import SeededRandom, split_of
from courtside.recipe.tasks import CapabilityName


def use(capability: str, world: ToolState | None = None, **arguments: Any) -> str:
    assert invalid_arguments(TOOLS[capability], arguments) is None
    return TOOLS[capability].run(world or ToolState(), arguments)


def failure(capability: str, world: ToolState | None = None, **arguments: Any) -> str:
    with pytest.raises(ToolFailure) as failed:
        use(capability, world, **arguments)
    return str(failed.value)


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def test_every_capability_has_a_tool_and_names() -> None:
    assert set(get_args(CapabilityName)) == set(TOOLS) == set(NAMES)
    assert len(TOOLS) >= 8


def test_a_name_belongs_to_one_capability() -> None:
    names = [name for value in NAMES.values() for name in (*value.seen_names, *value.held_out)]
    assert len(names) == len(set(names))
    for value in NAMES.values():
        assert len(value.seen_names) >= 5 and len(value.held_out) >= 2
        assert value.common == value.seen_names[0]
        assert all(name.isidentifier() for name in (*value.seen_names, *value.held_out))


# ── calculator ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("-2 ** 2", "-4"), ("2 ** -2", "0.25"),
        ("2 ** 3 ** 2", "512"), ("7 // 2", "3"), ("-7 // 2", "-4"), ("-7 % 3", "2"),
        ("10 / 4", "2.5"), ("0.1 + 0.2", "0.3"), ("1 / 3", "0.333333"), (".5 * 4", "2"),
        ("10 - 4 - 3", "3"), ("100 / 10 / 5", "2"), ("+5", "5"), ("--5", "5"), ("6 × 7 ÷ 2", "21"),
        ("2 ^ 10", "1024"), ("0 ** 0", "1"), ("(-1) ** 999999999", "-1"), ("0 ** 7", "0"),
        ("1 / 10 ** 9", "1e-09"), ("123456789 * 987654321", "121932631112635269"),
    ],
)  # fmt: skip
def test_calculations(expression: str, result: str) -> None:
    assert use("calculate", expression=expression) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"), ("5 % 0", "division by zero"), ("0 ** -1", "division"),
        ("9 ** 9 ** 9", "too large"), ("9**9**9**9**9", "too large"), ("2 ** 0.5", "whole"),
        ("(1/3) ** 400 ** 9", "too large"), ("9" * 199, "too large"), ("1 " * 200, "longer than"),
        ("", "ends too early"), ("1 +", "ends too early"), ("(1 + 2", r"missing '\)'"),
        ("1 2", "unexpected '2'"), ("1 + 2)", "unexpected '\\)'"), ("* 2", "unexpected '\\*'"),
        ("(" * 99, "nested"), ("-" * 99 + "1", "nested"), ("a + 1", "unexpected 'a'"),
        ("__import__('os')", "unexpected '_'"), ("1e999", "unexpected 'e'"), ("1,000", "','"),
        ("٣ + 1", "unexpected"),
    ],
)  # fmt: skip
def test_calculations_that_fail(expression: str, reason: str) -> None:
    with pytest.raises(ToolFailure, match=reason):
        evaluate(expression)


NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda text: f"(-{text})"),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_calculations_agree_with_python(expression: str) -> None:
    plain = expression.replace("-0", "- 0")
    assert evaluate(expression) == eval(plain)  # made of digits and operators


@settings(deadline=2000)  # an exponent that is computed first would take minutes
@given(st.text(alphabet="0123456789+-*/%().^ ", max_size=60))
def test_no_expression_hangs(expression: str) -> None:
    with suppress(ToolFailure):
        format_fraction(evaluate(expression))


def test_a_result_is_written_in_full_or_rounded() -> None:
    assert format_fraction(Fraction(10**40)) == "1" + "0" * 40
    assert format_fraction(Fraction(-1, 3)) == "-0.333333"
    assert format_fraction(Fraction(-1, 10**8)) == "-1e-08"


# ── units and dates ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "unit", "to", "result"),
    [
        (10, "km", "miles", "10 km = 6.2137 miles"),
        ("10", "KM", "Miles", "10 km = 6.2137 miles"),
        (0, "celsius", "fahrenheit", "0 celsius = 32 fahrenheit"),
        (212, "°F", "c", "212 fahrenheit = 100 celsius"),
        (-40, "celsius", "fahrenheit", "-40 celsius = -40 fahrenheit"),
        (90, "minutes", "hours", "90 minutes = 1.5 hours"),
        (3, "kg", "kg", "3 kg = 3 kg"),
        (1.5, "weeks", "days", "1.5 weeks = 10.5 days"),
        (10**15, "g", "kg", "1000000000000000 g = 1000000000000 kg"),
    ],
)
def test_conversions(value: Any, unit: str, to: str, result: str) -> None:
    assert use("convert", value=value, unit=unit, to=to) == result


def test_conversions_that_fail() -> None:
    assert failure("convert", value=1, unit="km", to="kg") == "cannot convert km to kg"
    assert failure("convert", value=1, unit="parsec", to="km") == "unknown unit 'parsec'"


def test_calendar() -> None:
    assert use("days_between", start="2024-02-28", end="2024-03-01") == "2 days"
    assert use("days_between", start="2023-03-01", end="2023-02-28") == "1 days"
    assert use("weekday", date="2000-01-01") == "Saturday"
    assert use("weekday", date=" 2024-2-29 ") == "Thursday"
    assert use("add_days", date="2023-12-31", days=1) == "2024-01-01"
    assert use("add_days", date="2024-03-01", days="-1") == "2024-02-29"
    assert use("add_days", date="2024-03-01", days=2.0) == "2024-03-03"
    for text in ("tomorrow", "2024/01/01", "20240101", "2024-W01-1", "", "２０２４-01-01"):
        assert "is not a date, use YYYY-MM-DD" in failure("weekday", date=text)
    assert "not a date in the calendar" in failure("weekday", date="2023-02-29")
    assert "not a date in the calendar" in failure("weekday", date="0000-01-01")
    assert "outside of the calendar" in failure("add_days", date="9999-12-31", days=1)
    assert "days must be within" in failure("add_days", date="2024-01-01", days=10**12)


@settings(deadline=None)
@given(st.dates(date(1600, 1, 1), date(2400, 1, 1)), st.integers(-5000, 5000))
def test_adding_days_and_counting_them_agree(start: date, days: int) -> None:
    end = use("add_days", date=start.isoformat(), days=days)
    assert use("days_between", start=start.isoformat(), end=end) == f"{abs(days)} days"


# ── tables, text, notes ──────────────────────────────────────────────────────────────────────────


def test_tables() -> None:
    assert use("weather", city=" oslo ") == use("weather", city="Oslo")
    assert use("weather", city="Oslo").startswith("Oslo: ")
    assert use("contact", name="anna  berg").startswith("Anna Berg: 555-")
    assert use("price", item="Kettle").startswith("kettle: ")
    assert failure("weather", city="Atlantis") == "no weather station for 'Atlantis'"
    assert failure("contact", name="") == "no contact named ''"
    assert failure("price", item="hope") == "no item called 'hope'"


def test_texts() -> None:
    assert use("count_words", text=" one  two\nthree ") == "3 words"
    assert use("count_words", text="one") == "1 word"
    assert use("count_words", text="") == "0 words"
    assert use("reverse_text", text="abc é") == "é cba"
    assert use("upper_case", text="straße") == "STRASSE"


def test_notes() -> None:
    world = ToolState()
    assert use("list_notes", world) == "(no notes)"
    assert use("write_note", world, title=" b ", text="milk") == "Saved 'b'."
    assert use("write_note", world, title="a", text="") == "Saved 'a'."
    assert use("list_notes", world) == "a, b"
    assert use("append_note", world, title="b", text="eggs") == "Added to 'b'."
    assert use("read_note", world, title="b") == "milk\neggs"
    assert use("read_note", world, title="a") == "(empty)"
    assert list(world.notes) == ["a", "b"], "the latest last"
    assert use("delete_note", world, title="a") == "Deleted 'a'."
    for capability in ("read_note", "delete_note"):
        assert failure(capability, world, title="a") == "no note called 'a'"
    assert failure("append_note", world, title="a", text="x") == "no note called 'a'"
    assert failure("write_note", world, title=" ", text="x") == "a note needs a title"
    assert world.notes == {"b": "milk\neggs"}


def test_notes_have_an_end() -> None:
    world = ToolState(notes={f"note {i}": "" for i in range(MAX_NOTES)})
    assert "there is room for" in failure("write_note", world, title="one more", text="")
    assert use("write_note", world, title="note 3", text="again") == "Saved 'note 3'."
    assert "at most" in failure("append_note", world, title="note 3", text="x" * MAX_NOTE)
    assert world.notes["note 3"] == "again" and len(world.notes) == MAX_NOTES


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("capability", "arguments", "problem"),
    [
        ("weather", {}, "missing argument 'city' (takes city)"),
        ("weather", {"location": "Oslo"}, "unexpected argument 'location' (takes city)"),
        ("weather", {"city": 3}, "city must be a string"),
        ("weather", {"city": None}, "city must be a string"),
        ("list_notes", {"all": True}, "unexpected argument 'all' (takes no arguments)"),
        ("convert", {"value": "ten", "unit": "km", "to": "m"}, "value must be a number"),
        ("convert", {"value": True, "unit": "km", "to": "m"}, "value must be a number"),
        ("convert", {"value": [1], "unit": "km", "to": "m"}, "value must be a number"),
        ("convert", {"value": float("inf"), "unit": "km", "to": "m"}, "value is out of range"),
        ("convert", {"value": 10**4000, "unit": "km", "to": "m"}, "value is out of range"),
        ("add_days", {"date": "2024-01-01", "days": 1.5}, "days must be an integer"),
        ("add_days", {"date": "2024-01-01", "days": "1.5"}, "days must be an integer"),
        ("add_days", {"date": "2024-01-01", "days": "٣"}, "days must be an integer"),
    ],
)
def test_invalid_arguments(capability: str, arguments: Mapping[str, Any], problem: str) -> None:
    assert invalid_arguments(TOOLS[capability], arguments) == problem


ANYTHING = st.one_of(
    st.text(max_size=30), st.integers(), st.floats(), st.booleans(), st.none(),
    st.lists(st.integers(), max_size=2), st.sampled_from(["2024-01-31", "9", "km", "miles", "a"]),
)  # fmt: skip


@pytest.mark.parametrize("capability", TOOLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_checked_arguments_never_break_a_tool(capability: str, data: st.DataObject) -> None:
    tool = TOOLS[capability]
    arguments = {p.name: data.draw(ANYTHING) for p in tool.parameters}
    if invalid_arguments(tool, arguments) is None:
        try:
            assert isinstance(tool.run(ToolState(notes={"a": "x"}), arguments), str)
        except ToolFailure as failed:
            assert str(failed)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("capability", TOOLS)
def test_requests_say_what_the_call_needs(capability: str) -> None:
    tool = TOOLS[capability]
    for number in range(40):
        world = ToolState(notes={"shopping": "milk", "plan": "rest"})
        draft = tool.draft_request(SeededRandom(f"draw {number}"), world)
        assert invalid_arguments(tool, draft.arguments) is None
        assert tool.run(world, draft.arguments)
        assert len(set(tool.phrases)) >= 4
        for phrase in tool.phrases:
            text = phrase.format(**draft.arguments)
            assert all(str(value) in text for value in draft.arguments.values())
            assert text[0].isupper() and text[-1] in '.?"'


@pytest.mark.parametrize("capability", TOOLS)
def test_every_split_has_topics(capability: str) -> None:
    world = ToolState(notes={"shopping": "milk"})
    draft = [
        TOOLS[capability].draft_request(SeededRandom(f"topic {i}"), world).topic
        for i in range(1000)
    ]
    topics = {topic for topic in draft if topic is not None}
    if topics:
        splits = [split_of(f"{capability} {topic}") for topic in topics]
        assert all(splits.count(value) >= 4 for value in ("train", "validation", "test"))
