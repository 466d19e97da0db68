"""Calculator and unit conversion."""

from __future__ import annotations

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


def _draw_calculation(rng: SeededRandom, state: ToolState) -> RequestDraft:
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 19)
    shapes = (f"{a} + {b}", f"{a} - {b}", f"{a} * {c}", f"{a} / {c}", f"({a} + {b}) * {c}")
    expression = rng.choice(shapes)
    return RequestDraft(CALCULATIONS, {"expression": expression}, expression)


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


def _draw_conversion(rng: SeededRandom, state: ToolState) -> RequestDraft:
    unit, to = rng.choose_distinct(list(rng.choice(MEASURES)), 2)
    value = rng.randint(2, 500)
    arguments = {"value": value, "unit": unit, "to": to}
    return RequestDraft(CONVERSIONS, arguments, f"{value} {unit} {to}")


TOOLS = {
    "calculate": Tool(
        about="compute an expression",
        parameters=(Parameter("expression"),),
        run=_calculate,
        draft_request=_draw_calculation,
    ),
    "convert": Tool(
        about="convert units",
        parameters=(Parameter("value", "number"), Parameter("unit"), Parameter("to")),
        run=_convert,
        draft_request=_draw_conversion,
    ),
}
