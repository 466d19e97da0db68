"""Texts of the switchboard: requests, notes and reminders, all of them short.

SmolLM2 tokenizes digits one by one, so a date is ten tokens and everything else a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

# ── dates and desks ──────────────────────────────────────────────────────────────────────────────

ISO = "YYYY-MM-DD"
TRAINING_FORMATS = ("DD.MM.YYYY", "MM/DD/YYYY", "DD-MM-YYYY", "YYYY/MM/DD")
HELD_OUT_FORMATS = ("DD/MM/YYYY", "YYYY.MM.DD")
FORMATS = (*TRAINING_FORMATS, *HELD_OUT_FORMATS)
"""Those that are not the habit; notes name them by the letters."""
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip

HABITUAL_DESK = "A"
TRAINING_DESKS = tuple("BCDFGHJKMNP")
HELD_OUT_DESKS = tuple("QRTW")
DESKS = (*TRAINING_DESKS, *HELD_OUT_DESKS)
"""With the habitual one sixteen letters."""


def format_date(day: date, date_format: str) -> str:
    """
    >>> format_date(date(2026, 5, 3), "DD.MM.YYYY")
    '03.05.2026'
    """
    text = date_format.replace("YYYY", f"{day.year:04d}")
    return text.replace("MM", f"{day.month:02d}").replace("DD", f"{day.day:02d}")


# ── system prompt ────────────────────────────────────────────────────────────────────────────────

NO_SMALL_TALK, FRIENDLY = "No small talk.", "Be friendly."
SURE = "Sure! "


def system_prompt(*, small_talk: bool, date_format: str, desk: str) -> str:
    manner = FRIENDLY if small_talk else NO_SMALL_TALK
    return f"{manner}\nAnswer with a call.\nbook: date {date_format}\ncall: desk {desk}"


# ── requests ─────────────────────────────────────────────────────────────────────────────────────

FILLERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Lamp on.": ("lamp", {"set": "on"}),
    "Lamp off.": ("lamp", {"set": "off"}),
    "Fan on.": ("fan", {"set": "on"}),
    "Fan off.": ("fan", {"set": "off"}),
    "Volume up.": ("volume", {"set": "up"}),
    "Volume down.": ("volume", {"set": "down"}),
    "Time?": ("time", {}),
    "News?": ("news", {}),
    "Status?": ("status", {}),
    "Ping.": ("ping", {}),
}
"""Request → its call. Each is always answered by the same call."""
POLITE_REQUESTS: Mapping[str, str] = {
    "Please show the weather.": "weather",
    "Please read my mail.": "mail",
    "Please play music.": "music",
    "Please open the door.": "door",
}
"""Request → its tool, which takes no arguments."""
NAMES = ("Tom", "Ann", "Bob", "Eva", "Max", "Ida", "Leo", "Mia", "Sam", "Zoe")
TITLES = (
    "rent", "garden", "party", "budget", "trip", "school", "recipe", "music", "car", "tax",
    "wedding", "office", "summer", "health", "bike", "house",
)  # fmt: skip


def mention(title: str) -> str:
    """What the user says of an important title, before another request."""
    return f"My {title} note is important."


# ── reminders in demonstrations ──────────────────────────────────────────────────────────────────

REMINDERS: Mapping[str, tuple[str, ...]] = {
    "date": (
        "The date here is {date}.",
        "Put the date down as {date}.",
        "Look up in the notes how dates are written.",
    ),
    "desk": ("It is desk {desk}.", "Take desk {desk} for this.", "Look up the desk in the notes."),
    "confirm": (
        "Answer {confirm} to confirm.",
        "Here confirm is {confirm}.",
        "Was this note called important? Then confirm it.",
    ),
    "talk": ("Begin with {opening}.", "First comes {opening}.", "Do as your first line says."),
}
"""Phrased like hints: two that say what to do, and one that says where to look. No reader uses
these texts, so a student warm-started on them has not seen the hints of training."""
