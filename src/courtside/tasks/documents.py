"""Documents as windows of tokens: plain text, without prompts and chat template.

Documents are joined with a separator and cut every `max_tokens - overlap` tokens, in the order of
their names. Which windows a step trains is a pure function of seed and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from courtside.errors import TaskError
from courtside.files import BOM, read_regular_file
from courtside.hashing import task_id
from courtside.recipe.builtin import find_data_path
from courtside.recipe.document_tasks import DocumentTasks
from courtside.tasks.base import epoch_slice, require_limit
from courtside.types import Message, Split, Task

MAX_NAMED = 3
"""Documents that a note names."""


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Token ids of plain text: what looks like a special token in it is text, too."""

    tokenizer: Any

    def encode(self, text: str) -> tuple[int, ...]:
        ids = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        return tuple(ids)

    @property
    def end_token(self) -> tuple[int, ...]:
        token = self.tokenizer.eos_token_id
        return () if token is None else (int(token),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    name: str
    """Its path below the folder."""
    text: str


class DocumentSource:
    """Windows of the documents, and of background text for a share of each batch."""

    num_dropped = 0

    def __init__(
        self,
        windows: Sequence[tuple[Task, tuple[int, ...]]],
        background: Sequence[tuple[Task, tuple[int, ...]]],
        *,
        fraction: float,
        documents: Sequence[Document],
        seed: int,
        notes: Sequence[str],
    ) -> None:
        self.train_tasks = [task for task, _ in windows]
        self.documents = tuple(documents)
        self.notes = tuple(notes)
        self._background = [task for task, _ in background]
        self._ids = {task.id: ids for task, ids in (*windows, *background)}
        self._fraction, self._seed = fraction, seed

    def window(self, id: str) -> tuple[int, ...]:
        """The token ids of a task."""
        return self._ids[id]

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        first, last = (math.floor(n * size * self._fraction + 1e-9) for n in (step, step + 1))
        start, stop = step * size - first, (step + 1) * size - last
        chosen = epoch_slice(self.train_tasks, seed=self._seed, start=start, stop=stop)
        if last == first:
            return chosen
        return chosen + epoch_slice(self._background, seed=self._seed, start=first, stop=last)

    def held_out(self, split: Split, size: int) -> tuple[Task, ...]:
        if split == "train":
            return tuple(self.train_tasks[:size])
        raise TaskError(
            "tasks.kind = 'documents': all windows are in the train split. Give evaluate.suites of "
            "another kind, such as questions on the documents (kind = 'jsonl')"
        )


def make_document_source(
    config: DocumentTasks, tokenizer: TextTokenizer, *, seed: int
) -> DocumentSource:
    notes: list[str] = []
    documents = read_documents(
        find_data_path(config.path), config.pattern, config.invalid_documents, notes, "tasks.path"
    )
    windows = _make_windows(documents, config, tokenizer, str(config.path))
    require_limit(str(config.path), config.limit, len(windows))
    windows = windows[: config.limit]
    num_tokens = sum(len(ids) for _, ids in windows)
    notes.append(
        f"{len(documents)} documents make {len(windows)} windows of up to {config.max_tokens} "
        f"tokens ({num_tokens:,} tokens)"
    )
    background, fraction = list[tuple[Task, tuple[int, ...]]](), 0.0
    if config.background is not None:
        other = read_documents(
            find_data_path(config.background.path),
            config.background.pattern,
            config.invalid_documents,
            notes,
            "tasks.background.path",
        )
        background = _make_windows(other, config, tokenizer, str(config.background.path))
        fraction = config.background.fraction
    return DocumentSource(
        windows, background, fraction=fraction, documents=documents, seed=seed, notes=notes
    )


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def read_documents(
    path: Path, pattern: str, invalid: str, notes: list[str], field: str
) -> list[Document]:
    """In the order of their names, each text once. `notes` gets what was left out; `field` is the
    recipe's."""
    documents: list[Document] = []
    problems: list[str] = []
    name_of: dict[str, str] = {}
    copies: list[str] = []
    for name, file in _list_documents(path, pattern, field):
        try:
            text = _read_text(file)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if invalid == "error":
                raise TaskError(
                    f"{file}: {reason}. Mend or remove the file, narrow tasks.pattern, or set "
                    "tasks.invalid_documents = 'drop' to leave such files out and count them"
                ) from None
            problems.append(f"{name} ({reason})")
            continue
        if text in name_of:
            copies.append(f"{name} (as {name_of[text]})")
            continue
        name_of[text] = name
        documents.append(Document(name=name, text=text))
    if not documents:
        raise TaskError(
            f"{field} = {str(path)!r}: none of its {len(problems)} files is a document, such as "
            f"{problems[0] if problems else 'none'}. Give text files in UTF-8"
        )
    if problems:
        notes.append(f"{len(problems)} documents were left out: {_name_some(problems)}")
    if copies:
        notes.append(f"{len(copies)} documents are copies and used once: {_name_some(copies)}")
    return documents


def _list_documents(path: Path, pattern: str, field: str) -> Iterator[tuple[str, Path]]:
    if not path.exists():
        raise TaskError(f"{field} = {str(path)!r}: no such file or folder. Give one that exists")
    if not path.is_dir():
        yield path.name, path
        return
    files = [
        (file.relative_to(path), file)
        for file in path.rglob(pattern)
        if not file.is_dir() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    if not files:
        raise TaskError(
            f"{field} = {str(path)!r}: no file in this folder matches pattern = {pattern!r}. Put "
            "text files there, or change the pattern"
        )
    for name, file in sorted(files, key=lambda entry: entry[0].as_posix()):
        yield name.as_posix(), file


def _read_text(file: Path) -> str:
    data = read_regular_file(file).removeprefix(BOM)
    if b"\0" in data:
        raise ValueError("holds NUL bytes, so it is binary and no text")
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ValueError("is empty")
    return text.strip("\n") + "\n"


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


# ── windows ──────────────────────────────────────────────────────────────────────────────────────


def pack_windows(ids: Sequence[int], *, max_tokens: int, overlap: int) -> list[tuple[int, int]]:
    """Start and end of windows that cover all ids; each has something that the one before has not,
    and two tokens at least."""
    starts = range(0, max(len(ids), 1), max_tokens - overlap)
    spans = [(start, min(start + max_tokens, len(ids))) for start in starts]
    first_end = spans[0][1]
    later = [(a, b) for (_, end), (a, b) in pairwise(spans) if b > end]
    return [(a, b) for a, b in ((0, first_end), *later) if b - a >= 2]


def _make_windows(
    documents: Sequence[Document], config: DocumentTasks, tokenizer: TextTokenizer, path: str
) -> list[tuple[Task, tuple[int, ...]]]:
    separator = (
        tokenizer.end_token if config.separator is None else tokenizer.encode(config.separator)
    )
    ids: list[int] = [*separator]
    for document in documents:
        ids += (*tokenizer.encode(document.text), *separator)
    spans = pack_windows(ids, max_tokens=config.max_tokens, overlap=config.overlap)
    if not spans:
        raise TaskError(f"{path}: {len(ids)} tokens are too few to learn from. Give more text")
    return [(_make_task(path, a, b, ids), tuple(ids[a:b])) for a, b in spans]


def _make_task(path: str, start: int, end: int, ids: Sequence[int]) -> Task:
    return Task(
        id=task_id("documents", f"{start}/{list(ids[start:end])}"),
        split="train",
        messages=(Message(role="user", content=f"{path}, tokens {start} to {end}"),),
        tags=("documents",),
    )
