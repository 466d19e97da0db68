"""Calculator, unit conversion and calendar."""

from __future__ import annotations

import re
from datetime import date, timedelta

from courtside.environments.toolbox.tools.base import (
    Arguments,
    Parameter,
    RequestDraft,
    Tool,
    ToolFailure,
    ToolState,
    format_number,
    numeric_argument,
)
from courtside.environments.toolbox.tools.expression import evaluate, format_fraction
from courtside.hashing import SeededRandom

CALCULATIONS = (
    "What is {expression}?",
    "How much is {expression}?",
    "Please work out {expression}.",
    "Compute {expression} for me.",
    "I need the result of {expression}.",
    "Can you calculate {expression}?",
)


def _calculate(state: ToolState, arguments: Arguments) -> str:
    return format_fraction(evaluate(arguments["expression"]))


def _draft_calculation(rng: SeededRandom, state: ToolState) -> RequestDraft:
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 19)
    shapes = (f"{a} + {b}", f"{a} - {b}", f"{a} * {c}", f"{a} / {c}", f"({a} + {b}) * {c}")
    expression = rng.choice(shapes)
    return RequestDraft({"expression": expression}, expression)


# A measure's units by the factor to its first one; temperatures are computed.
MEASURES = (
    {"km": 1.0, "m": 0.001, "miles": 1.609344, "feet": 0.0003048},
    {"kg": 1.0, "g": 0.001, "pounds": 0.45359237, "ounces": 0.028349523125},
    {"liters": 1.0, "gallons": 3.785411784, "cups": 0.2365882365},
    {"hours": 1.0, "minutes": 1 / 60, "days": 24.0, "weeks": 168.0},
    {"celsius": 1.0, "fahrenheit": 1.0},
)
ALIASES = {
    "kilometers": "km", "kilometer": "km", "meters": "m", "meter": "m", "mile": "miles",
    "mi": "miles", "foot": "feet", "ft": "feet", "kilograms": "kg", "kilogram": "kg", "grams": "g",
    "gram": "g", "pound": "pounds", "lb": "pounds", "lbs": "pounds", "ounce": "ounces",
    "oz": "ounces", "liter": "liters", "litres": "liters", "l": "liters", "gallon": "gallons",
    "cup": "cups", "hour": "hours", "h": "hours", "minute": "minutes", "min": "minutes",
    "day": "days", "week": "weeks", "c": "celsius", "°c": "celsius", "f": "fahrenheit",
    "°f": "fahrenheit",
}  # fmt: skip
CONVERSIONS = (
    "Convert {value} {unit} to {to}.",
    "How many {to} are {value} {unit}?",
    "What is {value} {unit} in {to}?",
    "I have {value} {unit}. Give me that in {to}.",
    "Turn {value} {unit} into {to}, please.",
    "Please express {value} {unit} in {to}.",
)


def _convert(state: ToolState, arguments: Arguments) -> str:
    value = numeric_argument(arguments, "value")
    unit, to = (_unit(arguments[name]) for name in ("unit", "to"))
    measure = next(measure for measure in MEASURES if unit in measure)
    if to not in measure:
        raise ToolFailure(f"cannot convert {unit} to {to}")
    if unit == to:
        result = float(value)
    elif unit == "celsius":
        result = value * 9 / 5 + 32
    elif unit == "fahrenheit":
        result = (value - 32) * 5 / 9
    else:
        result = value * measure[unit] / measure[to]
    return f"{format_number(value)} {unit} = {format_number(result)} {to}"


def _unit(word: str) -> str:
    name = word.strip().lower()
    name = ALIASES.get(name, name)
    if not any(name in measure for measure in MEASURES):
        raise ToolFailure(f"unknown unit '{word}'")
    return name


def _draft_conversion(rng: SeededRandom, state: ToolState) -> RequestDraft:
    unit, to = rng.choose_distinct(list(rng.choice(MEASURES)), 2)
    value = rng.randint(2, 500)
    arguments = {"value": value, "unit": unit, "to": to}
    return RequestDraft(arguments, f"{value} {unit} {to}")


# ── calendar ─────────────────────────────────────────────────────────────────────────────────────

# Not strftime's: that speaks the language of the machine.
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MAX_DAYS = 1_000_000

DIFFERENCES = (
    "How many days are there between {start} and {end}?",
    "How long is it from {start} to {end}, in days?",
    "Count the days from {start} to {end}.",
    "What is the number of days between {start} and {end}?",
    "I leave on {start} and come back on {end}. How many days is that?",
    "Please tell me how many days lie between {start} and {end}.",
)
WEEKDAY_QUESTIONS = (
    "What day of the week is {date}?",
    "Which weekday was {date}?",
    "On what day of the week does {date} fall?",
    "Tell me the weekday of {date}.",
    "Is {date} a Monday or something else?",
    "I was born on {date}. What weekday was that?",
)
SHIFTS = (
    "What date is {days} days after {date}?",
    "Add {days} days to {date}.",
    "Which date comes {days} days after {date}?",
    "It is {date}. What will the date be in {days} days?",
    "Please move {date} forward by {days} days.",
    "My parcel left on {date} and takes {days} days. When is it here?",
)


def _date(text: str) -> date:
    match = re.fullmatch(r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})", text.strip())
    if match is None:
        raise ToolFailure(f"'{text}' is not a date, use YYYY-MM-DD")
    try:
        return date(*map(int, match.groups()))
    except ValueError:
        raise ToolFailure(f"'{text}' is not a date in the calendar") from None


def _days_between(state: ToolState, arguments: Arguments) -> str:
    return f"{abs((_date(arguments['end']) - _date(arguments['start'])).days)} days"


def _weekday(state: ToolState, arguments: Arguments) -> str:
    return WEEKDAYS[_date(arguments["date"]).weekday()]


def _add_days(state: ToolState, arguments: Arguments) -> str:
    days = int(numeric_argument(arguments, "days"))
    if abs(days) > MAX_DAYS:
        raise ToolFailure(f"days must be within {MAX_DAYS}")
    try:
        return (_date(arguments["date"]) + timedelta(days=days)).isoformat()
    except OverflowError:
        raise ToolFailure("the date is outside of the calendar") from None


def _day(rng: SeededRandom) -> date:
    return date(1990, 1, 1) + timedelta(days=rng.randbelow(365 * 45))


def _draft_difference(rng: SeededRandom, state: ToolState) -> RequestDraft:
    start = _day(rng)
    end = start + timedelta(days=rng.randint(2, 400))
    arguments = {"start": start.isoformat(), "end": end.isoformat()}
    return RequestDraft(arguments, f"{start} {end}")


def _draft_weekday(rng: SeededRandom, state: ToolState) -> RequestDraft:
    day = _day(rng).isoformat()
    return RequestDraft({"date": day}, day)


def _draft_shift(rng: SeededRandom, state: ToolState) -> RequestDraft:
    day, days = _day(rng).isoformat(), rng.randint(2, 120)
    return RequestDraft({"date": day, "days": days}, f"{day} {days}")


DATE = Parameter("date")
TOOLS = {
    "calculate": Tool(
        "compute an expression",
        (Parameter("expression"),),
        _calculate,
        CALCULATIONS,
        _draft_calculation,
    ),
    "convert": Tool(
        "convert units",
        (Parameter("value", "number"), Parameter("unit"), Parameter("to")),
        _convert,
        CONVERSIONS,
        _draft_conversion,
    ),
    "days_between": Tool(
        "days between two dates",
        (Parameter("start"), Parameter("end")),
        _days_between,
        DIFFERENCES,
        _draft_difference,
    ),
    "weekday": Tool(
        "day of the week of a date", (DATE,), _weekday, WEEKDAY_QUESTIONS, _draft_weekday
    ),
    "add_days": Tool(
        "date some days later",
        (DATE, Parameter("days", "integer")),
        _add_days,
        SHIFTS,
        _draft_shift,
    ),
}
