"""Notes in memory: what is written early in an episode is read back later in it."""

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


def _draw_writing(rng: SeededRandom, state: ToolState) -> RequestDraft:
    title = rng.choice(TITLES)
    return RequestDraft(WRITINGS, {"title": title, "text": _text(rng)}, title)


def _latest(rng: SeededRandom, state: ToolState) -> str:
    """Mostly what was written last, so that a mistake there shows."""
    titles = list(state.notes)
    return titles[-1] if rng.bernoulli(0.6) else rng.choice(titles)


def _draw_addition(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft(ADDITIONS, {"title": _latest(rng, state), "text": _text(rng)}, None)


def _draw_reading(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft(READINGS, {"title": _latest(rng, state)}, None)


def _draw_listing(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft(LISTINGS, {}, None)


def _draw_deletion(rng: SeededRandom, state: ToolState) -> RequestDraft:
    return RequestDraft(DELETIONS, {"title": rng.choice(list(state.notes))}, None)


TITLE = Parameter("title")
TOOLS = {
    "write_note": Tool(
        about="save a note",
        parameters=(TITLE, Parameter("text")),
        run=_write,
        draft_request=_draw_writing,
    ),
    "append_note": Tool(
        about="add to a note",
        parameters=(TITLE, Parameter("text")),
        run=_append,
        draft_request=_draw_addition,
        needs_notes=True,
    ),
    "read_note": Tool(
        about="read a note",
        parameters=(TITLE,),
        run=_read,
        draft_request=_draw_reading,
        needs_notes=True,
    ),
    "list_notes": Tool(
        about="titles of all notes",
        parameters=(),
        run=_list,
        draft_request=_draw_listing,
    ),
    "delete_note": Tool(
        about="delete a note",
        parameters=(TITLE,),
        run=_delete,
        draft_request=_draw_deletion,
        needs_notes=True,
    ),
}
