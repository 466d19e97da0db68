"""The plan of an episode, which follows from its number alone.

Six requests of an episode are critical, at random places after the second. Held-out episodes fall
into sixteen strata, which together have as many decisions of each kind with a wrong habit as with a
right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Literal

from courtside.environments.switchboard.wording import (
    DESKS,
    FILLERS,
    FORMATS,
    HABITUAL_DESK,
    HELD_OUT_DESKS,
    HELD_OUT_FORMATS,
    ISO,
    MONTHS,
    NAMES,
    POLITE_REQUESTS,
    SURE,
    TITLES,
    TRAINING_DESKS,
    TRAINING_FORMATS,
    format_date,
    mention,
    system_prompt,
)
from courtside.hashing import SeededRandom, split_of
from courtside.recipe.tasks import SwitchboardTasks
from courtside.types import Split

Fault = Literal["date", "desk", "confirm", "talk"]
FAULTS: tuple[Fault, ...] = ("date", "desk", "confirm", "talk")
NUM_CRITICAL = 6
NUM_STRATA = 16
FIRST_PLACE = 2
"""Of a critical request: what the user calls important stands in an earlier one."""
MAX_MENTION_DISTANCE = 8
FIRST_DAY, NUM_DAYS = date(2024, 1, 1), 1461


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    text: str
    tool: str
    arguments: Mapping[str, str]
    """Of the right call."""
    fault: Fault | None = None
    """None: a filler."""
    habit_is_wrong: bool = False
    habitual_arguments: Mapping[str, str]
    """Of the call that the habit makes, right or wrong."""
    cured_arguments: tuple[Mapping[str, str], ...] = ()
    """Where the habit is right: those of calls that avoid it, which is over-correction."""
    opening: str = ""
    """What the right reply says before the call."""
    habitual_opening: str = ""
    details: Mapping[str, str]
    """For hints and reminders."""

    @property
    def decision(self) -> str:
        if self.fault is None:
            return "filler"
        return f"{self.fault}/{'habit_wrong' if self.habit_is_wrong else 'habit_right'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    split: Split
    system: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Where the habits of an episode are wrong, and how many decisions of each kind it has."""

    date: bool
    desk: bool
    talk: bool
    confirm: tuple[bool, ...]
    """One for each confirmation."""
    num_dates_and_desks: int
    """Of each of the two; the other two kinds have 3 minus this."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        n = self.num_dates_and_desks
        num_of: dict[Fault, int] = {"date": n, "desk": n, "confirm": 3 - n, "talk": 3 - n}
        return tuple(fault for fault, count in num_of.items() for _ in range(count))


def split_of_number(number: int) -> Split:
    return split_of(f"switchboard {number}")


def stratum_of(number: int) -> int:
    return number % NUM_STRATA


def make_plan(config: SwitchboardTasks, number: int) -> Plan:
    key, split = f"switchboard {number}", split_of_number(number)
    rng = SeededRandom(f"{key} sides")
    if split == "train":
        sides = _draw_sides(rng, config.date_cue_fraction)
    else:
        sides = _sides_of_stratum(stratum_of(number), rng)
    rng = SeededRandom(f"{key} cues")
    formats = {"seen": TRAINING_FORMATS, "held_out": HELD_OUT_FORMATS}[config.cues]
    desks = {"seen": TRAINING_DESKS, "held_out": HELD_OUT_DESKS}[config.cues]
    date_format = rng.choice(formats) if sides.date else ISO
    desk = rng.choice(desks) if sides.desk else HABITUAL_DESK
    num_turns = SeededRandom(f"{key} turns").randint(*config.turn_range)
    return Plan(
        split=split,
        system=system_prompt(small_talk=not sides.talk, date_format=date_format, desk=desk),
        requests=tuple(_make_requests(key, num_turns, sides, date_format=date_format, desk=desk)),
    )


# ── sides ────────────────────────────────────────────────────────────────────────────────────────


def _draw_sides(rng: SeededRandom, date_cue_fraction: float) -> Sides:
    n = rng.randint(1, 2)
    return Sides(
        date=rng.bernoulli(date_cue_fraction),
        desk=rng.bernoulli(0.5),
        talk=rng.bernoulli(0.5),
        confirm=tuple(rng.bernoulli(0.5) for _ in range(3 - n)),
        num_dates_and_desks=n,
    )


def _sides_of_stratum(stratum: int, rng: SeededRandom) -> Sides:
    """Each side of a kind has 12 decisions in the 16 strata together."""
    date_side, desk_side, talk_side, single = (bool(stratum >> bit & 1) for bit in range(4))
    # A single confirmation takes the side that three others decide, two take one each, in random
    # order: a side that always came first would be mixed up with an early turn.
    first = rng.bernoulli(0.5)
    confirm = (date_side ^ desk_side ^ talk_side,) if single else (first, not first)
    n = 2 if single else 1
    return Sides(
        date=date_side, desk=desk_side, talk=talk_side, confirm=confirm, num_dates_and_desks=n
    )


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _make_requests(
    key: str, num_turns: int, sides: Sides, *, date_format: str, desk: str
) -> Iterator[Request]:
    rng = SeededRandom(f"{key} places")
    places = rng.choose_distinct(range(FIRST_PLACE, num_turns), NUM_CRITICAL)
    fault_at = dict(zip(places, sides.faults, strict=True))
    titles = SeededRandom(f"{key} titles").choose_distinct(TITLES, 2 * len(sides.confirm))
    critical: dict[int, Request] = {}
    mentioned: dict[int, str] = {}
    for place in sorted(places):
        request_rng = SeededRandom(f"{key} request {place}")
        match fault_at[place]:
            case "date":
                critical[place] = _book(request_rng, date_format)
            case "desk":
                critical[place] = _call(request_rng, desk)
            case "talk":
                critical[place] = _polite(request_rng, habit_is_wrong=sides.talk)
            case "confirm":
                number = sum(r.fault == "confirm" for r in critical.values())
                is_important = sides.confirm[number]
                critical[place] = _delete(titles[2 * number], is_important=is_important)
                # Else another title is important, in half of the cases.
                if is_important or request_rng.bernoulli(0.5):
                    title = titles[2 * number + (not is_important)]
                    fillers = [p for p in range(place) if p not in fault_at and p not in mentioned]
                    # The first two requests are fillers, and two confirmations the most.
                    mentioned[request_rng.choice(_nearest(fillers, place))] = title
    for place in range(num_turns):
        request = critical.get(place) or _filler(SeededRandom(f"{key} filler {place}"))
        if place in mentioned:
            request = replace(request, text=f"{mention(mentioned[place])} {request.text}")
        yield request


def _nearest(fillers: Sequence[int], place: int) -> Sequence[int]:
    return [p for p in fillers if place - p <= MAX_MENTION_DISTANCE] or fillers[-1:]


def _filler(rng: SeededRandom) -> Request:
    text = rng.choice(list(FILLERS))
    tool, arguments = FILLERS[text]
    return Request(
        text=text, tool=tool, arguments=arguments, habitual_arguments=arguments, details={}
    )


def _book(rng: SeededRandom, date_format: str) -> Request:
    day = FIRST_DAY + timedelta(days=rng.randbelow(NUM_DAYS))
    right, iso = format_date(day, date_format), format_date(day, ISO)
    return Request(
        text=f"Book {day.day} {MONTHS[day.month - 1]} {day.year}.",
        tool="book",
        arguments={"date": right},
        fault="date",
        habit_is_wrong=date_format != ISO,
        habitual_arguments={"date": iso},
        cured_arguments=tuple({"date": format_date(day, other)} for other in FORMATS),
        details={"date": right},
    )


def _call(rng: SeededRandom, desk: str) -> Request:
    name = rng.choice(NAMES)
    return Request(
        text=f"Call {name}.",
        tool="call",
        arguments={"name": name, "desk": desk},
        fault="desk",
        habit_is_wrong=desk != HABITUAL_DESK,
        habitual_arguments={"name": name, "desk": HABITUAL_DESK},
        cured_arguments=tuple({"name": name, "desk": other} for other in DESKS),
        details={"desk": desk},
    )


def _delete(title: str, *, is_important: bool) -> Request:
    right = "yes" if is_important else "no"
    return Request(
        text=f"Delete the {title} note.",
        tool="delete",
        arguments={"title": title, "confirm": right},
        fault="confirm",
        habit_is_wrong=is_important,
        habitual_arguments={"title": title, "confirm": "no"},
        cured_arguments=({"title": title, "confirm": "yes"},),
        details={"confirm": right},
    )


def _polite(rng: SeededRandom, *, habit_is_wrong: bool) -> Request:
    text = rng.choice(list(POLITE_REQUESTS))
    return Request(
        text=text,
        tool=POLITE_REQUESTS[text],
        arguments={},
        fault="talk",
        habit_is_wrong=habit_is_wrong,
        habitual_arguments={},
        opening="" if habit_is_wrong else SURE,
        habitual_opening=SURE,
        details={"opening": "the call" if habit_is_wrong else SURE.strip()},
    )
