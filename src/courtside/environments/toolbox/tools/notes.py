"""Notes in memory, which are read back later in an episode, and texts that are transformed."""

from __future__ import annotations

from courtside.environments.toolbox.tools.base import (
    Arguments,
    Parameter,
    RequestDraft,
    Tool,
    ToolFailure,
    ToolState,
)
from courtside.hashing import SeededRandom

MAX_NOTES, MAX_NOTE = 500, 40_000

TOPICS = "work home garden summer school music travel kitchen winter family office weekend"
KINDS = "plan list ideas budget todo diary recipes goals"
TITLES = tuple(f"{topic} {kind}" for topic in TOPICS.split() for kind in KINDS.split())
VERBS = ("buy", "bring", "clean", "pack", "repair", "order", "sell", "paint", "wash", "find")
THINGS = (
    "two chairs", "fresh bread", "the blue bag", "a new lamp", "six eggs", "the old bike",
    "warm socks", "some paper", "the big table", "a train ticket", "green tea", "the keys",
)  # fmt: skip
WHEN = ("", " today", " on Friday", " before noon", " next week", " with Tom")

WRITINGS = (
    'Write a note called "{title}" that says "{text}".',
    'Save "{text}" as a note with the title "{title}".',
    'Make a note "{title}": "{text}".',
    'Please note down "{text}" under "{title}".',
    'I want a note "{title}" with the text "{text}".',
)
ADDITIONS = (
    'Add "{text}" to the note "{title}".',
    'Put "{text}" at the end of my note "{title}".',
    'The note "{title}" also needs "{text}".',
    'Please append "{text}" to "{title}".',
)
READINGS = (
    'What does my note "{title}" say?',
    'Read me the note "{title}".',
    'Show me what is in the note "{title}".',
    'What did I write down under "{title}"?',
    'Please open the note "{title}".',
)
LISTINGS = (
    "Which notes do I have?",
    "List all my notes.",
    "Show me the titles of my notes.",
    "What notes are stored?",
)
DELETIONS = (
    'Delete the note "{title}".',
    'I do not need the note "{title}" any more. Remove it.',
    'Please throw away my note "{title}".',
    'Get rid of the note "{title}".',
)


# ── tools ────────────────────────────────────────────────────────────────────────────────────────


def _existing(state: ToolState, arguments: Arguments) -> str:
    title = str(arguments["title"]).strip()
    if title not in state.notes:
        raise ToolFailure(f"no note called '{title}'")
    return title


def _store(state: ToolState, title: str, text: str) -> None:
    if len(text) > MAX_NOTE:
        raise ToolFailure(f"a note holds at most {MAX_NOTE} characters")
    state.notes.pop(title, None)  # the latest stands last
    if len(state.notes) >= MAX_NOTES:
        raise ToolFailure(f"there is room for {MAX_NOTES} notes")
    state.notes[title] = text


def _write(state: ToolState, arguments: Arguments) -> str:
    title = arguments["title"].strip()
    if not title:
        raise ToolFailure("a note needs a title")
    _store(state, title, arguments["text"])
    return f"Saved '{title}'."


def _append(state: ToolState, arguments: Arguments) -> str:
    title = _existing(state, arguments)
    _store(state, title, f"{state.notes[title]}\n{arguments['text']}")
    return f"Added to '{title}'."


def _read(state: ToolState, arguments: Arguments) -> str:
    return state.notes[_existing(state, arguments)] or "(empty)"


def _list(state: ToolState, arguments: Arguments) -> str:
    return ", ".join(sorted(state.notes)) or "(no notes)"


def _delete(state: ToolState, arguments: Arguments) -> str:
    title = _existing(state, arguments)
    del state.notes[title]
    return f"Deleted '{title}'."


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _text(rng: SeededRandom) -> str:
    return f"{rng.choice(VERBS)} {rng.choice(THINGS)}{rng.choice(WHEN)}"


def _draft_writing(rng: SeededRandom, state: ToolState) -> RequestDraft:
    title = rng.choice(TITLES)
    return RequestDraft({"title": title, "text": _text(rng)}, title)


def _latest(rng: SeededRandom, state: ToolState) -> str:
    """Mostly what was written last, so that a mistake there shows."""
    titles = list(state.notes)
    return titles[-1] if rng.bernoulli(0.6) else rng.choice(titles)


def _draft_addition(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft({"title": _latest(rng, state), "text": _text(rng)}, None)


def _draft_reading(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft({"title": _latest(rng, state)}, None)


def _draft_listing(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft({}, None)


def _draft_deletion(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft({"title": rng.choice(list(state.notes))}, None)


TITLE, TEXT = Parameter("title"), Parameter("text")
NOTE_TOOLS = {
    "write_note": Tool("save a note", (TITLE, TEXT), _write, WRITINGS, _draft_writing),
    "append_note": Tool(
        "add to a note", (TITLE, TEXT), _append, ADDITIONS, _draft_addition, needs_notes=True
    ),
    "read_note": Tool("read a note", (TITLE,), _read, READINGS, _draft_reading, needs_notes=True),
    "list_notes": Tool("titles of all notes", (), _list, LISTINGS, _draft_listing),
    "delete_note": Tool(
        "delete a note", (TITLE,), _delete, DELETIONS, _draft_deletion, needs_notes=True
    ),
}


# ── texts ────────────────────────────────────────────────────────────────────────────────────────

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


def _draft_text(rng: SeededRandom, state: ToolState) -> RequestDraft:
    who, does, what, where = (rng.choice(options) for options in (WHO, DOES, WHAT, WHERE))
    text = f"{who} {does} {what}{where}"
    return RequestDraft({"text": text}, text)


TEXT_TOOLS = {
    "count_words": Tool("count the words of a text", (TEXT,), _count, COUNTS, _draft_text),
    "reverse_text": Tool("write a text backwards", (TEXT,), _reverse, REVERSALS, _draft_text),
    "upper_case": Tool("write a text in capitals", (TEXT,), _upper, CAPITALS, _draft_text),
}
