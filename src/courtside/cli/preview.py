"""A preview as text: tokens with their boundaries, and marks on those that train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from courtside.sanitize import escape_control_characters

if TYPE_CHECKING:
    from courtside.assemble.preview import Preview, PreviewSequence, PreviewToken

MAX_TOKENS = 240
"""Of one sequence; the middle of a longer one is left out."""
MARKS: Mapping[str, tuple[str, str]] = {
    "context": ("", ""),
    "added": ("«", "»"),
    "trains": ("⟦", "⟧"),
}
LEGEND = "│ between tokens, ↵ line break, «only the teacher sees this», ⟦these tokens train⟧"


def format_preview(preview: Preview, *, every_token: bool) -> Iterator[str]:
    """Lines for a terminal."""
    yield f"{preview.model}, context of {preview.context_length:,} tokens"
    yield LEGEND
    for sequence in preview.sequences:
        num_trained = sum(token.use == "trains" for token in sequence.tokens)
        yield ""
        counts = f"{len(sequence.tokens):,} tokens, {num_trained:,} train"
        yield f"── {sequence.title} ({counts}): {sequence.about}"
        yield _format_tokens(sequence, every_token=every_token)
    for note in preview.notes:
        yield f"\nnote: {note}"


def _format_tokens(sequence: PreviewSequence, *, every_token: bool) -> str:
    tokens = sequence.tokens
    num_hidden = 0 if every_token else max(len(tokens) - MAX_TOKENS, 0)
    if not num_hidden:
        return _join(tokens)
    half = MAX_TOKENS // 2
    gap = f"\n   … {num_hidden:,} more tokens (--all shows them) …\n"
    return f"{_join(tokens[:half])}{gap}{_join(tokens[half + num_hidden :])}"


def _join(tokens: Sequence[PreviewToken]) -> str:
    runs = []
    for use, group in groupby(tokens, key=lambda token: token.use):
        opening, closing = MARKS[use]
        runs.append(f"{opening}{'│'.join(_escape(token.text) for token in group)}{closing}")
    return "│".join(runs)


def _escape(text: str) -> str:
    return escape_control_characters(text.replace("\n", "↵").replace("\t", "⇥"))
