"""Text: count the words, turn it around, write it in capitals."""

from __future__ import annotations

from collections.abc import Callable

from courtside.environments.toolbox.tools.base import (
    Arguments,
    Parameter,
    RequestDraft,
    Tool,
    ToolState,
)
from courtside.hashing import SeededRandom

WHO = ("the old cat", "my brother", "a small bird", "our teacher", "the tall man", "her friend")
DOES = ("sees", "likes", "finds", "paints", "carries", "remembers", "draws", "hides")
WHAT = ("a red boat", "the garden", "two green apples", "an open door", "the last train", "a song")
WHERE = ("", " in the rain", " every day", " near the river", " after lunch", " without a word")

COUNTS = (
    'How many words are in "{text}"?',
    'Count the words of this: "{text}"',
    'What is the number of words in "{text}"?',
    'Please count how many words "{text}" has.',
)
REVERSALS = (
    'Write "{text}" backwards.',
    'Reverse this text: "{text}"',
    'What is "{text}" spelled backwards?',
    'Please turn around the letters of "{text}".',
)
CAPITALS = (
    'Write "{text}" in capital letters.',
    'Make this upper case: "{text}"',
    'Please put "{text}" in capitals.',
    'I need "{text}" with capital letters only.',
)


def _count(state: ToolState, arguments: Arguments) -> str:
    count = len(arguments["text"].split())
    return "1 word" if count == 1 else f"{count} words"


def _reverse(state: ToolState, arguments: Arguments) -> str:
    return str(arguments["text"])[::-1]


def _upper(state: ToolState, arguments: Arguments) -> str:
    return str(arguments["text"]).upper()


def _make_draft(phrases: tuple[str, ...]) -> Callable[[SeededRandom, ToolState], RequestDraft]:
    def draft_request(rng: SeededRandom, state: ToolState) -> RequestDraft:
        who, does, what, where = (rng.choice(options) for options in (WHO, DOES, WHAT, WHERE))
        text = f"{who} {does} {what}{where}"
        return RequestDraft(phrases, {"text": text}, text)

    return draft_request


TEXT = (Parameter("text"),)
TOOLS = {
    "count_words": Tool(
        about="count the words of a text",
        parameters=TEXT,
        run=_count,
        draft_request=_make_draft(COUNTS),
    ),
    "reverse_text": Tool(
        about="write a text backwards",
        parameters=TEXT,
        run=_reverse,
        draft_request=_make_draft(REVERSALS),
    ),
    "upper_case": Tool(
        about="write a text in capitals",
        parameters=TEXT,
        run=_upper,
        draft_request=_make_draft(CAPITALS),
    ),
}
