"""Calendar: days between two dates, day of the week, a date some days later."""

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
    numeric_argument,
)
from courtside.hashing import SeededRandom

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


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _day(rng: SeededRandom) -> date:
    return date(1990, 1, 1) + timedelta(days=rng.randbelow(365 * 45))


def _draw_difference(rng: SeededRandom, state: ToolState) -> RequestDraft:
    start = _day(rng)
    end = start + timedelta(days=rng.randint(2, 400))
    arguments = {"start": start.isoformat(), "end": end.isoformat()}
    return RequestDraft(DIFFERENCES, arguments, f"{start} {end}")


def _draw_weekday(rng: SeededRandom, state: ToolState) -> RequestDraft:
    day = _day(rng).isoformat()
    return RequestDraft(WEEKDAY_QUESTIONS, {"date": day}, day)


def _draw_shift(rng: SeededRandom, state: ToolState) -> RequestDraft:
    day, days = _day(rng).isoformat(), rng.randint(2, 120)
    return RequestDraft(SHIFTS, {"date": day, "days": days}, f"{day} {days}")


TOOLS = {
    "days_between": Tool(
        about="days between two dates",
        parameters=(Parameter("start"), Parameter("end")),
        run=_days_between,
        draft_request=_draw_difference,
    ),
    "weekday": Tool(
        about="day of the week of a date",
        parameters=(Parameter("date"),),
        run=_weekday,
        draft_request=_draw_weekday,
    ),
    "add_days": Tool(
        about="date some days later",
        parameters=(Parameter("date"), Parameter("days", "integer")),
        run=_add_days,
        draft_request=_draw_shift,
    ),
}
