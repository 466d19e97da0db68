"""Tasks from the rows of a data set of the `datasets` package, from a hub or from disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from courtside.errors import TaskError, UserError
from courtside.recipe.tasks import DatasetTasks
from courtside.tasks import layouts
from courtside.tasks.parsing import Record, parse_tasks
from courtside.types import Task

FIELDS = ("id", *layouts.KEYS, "answer")
PRIVILEGED = "privileged."
LAYOUTS = (
    ("prompt", "chosen", "rejected", "tools", "system"),
    ("chosen", "rejected", "tools"),
    ("messages", "tools"),
    ("conversations", "tools", "system"),
    ("prompt", "completion", "tools", "system"),
    ("prompt",),
)
"""Columns that are used where a recipe names none: of the first layout whose first column, or first
two of a preference, the data set has."""


def load_dataset_tasks(config: DatasetTasks, notes: list[str] | None = None) -> tuple[Task, ...]:
    """`notes` gets what a user should know."""
    for name in config.columns or ():
        if name not in FIELDS and not name.startswith(PRIVILEGED):
            raise TaskError(
                f"tasks.columns.{name}: no such field of a task; use one of {', '.join(FIELDS)}, "
                f"or {PRIVILEGED}NAME"
            )
    if config.columns is not None and not config.columns.keys() & {
        "prompt", "messages", "conversations", "chosen",
    }:  # fmt: skip
        raise TaskError(
            "tasks.columns: names none of prompt, messages, conversations and chosen; add one, "
            "such as columns = { prompt = 'question' }"
        )
    rows = _load(config)
    columns = config.columns if config.columns is not None else _find_columns(config, rows)
    for name, column in columns.items():
        if column not in rows.column_names:
            raise TaskError(
                f"tasks.columns.{name} = {column!r}: {config.path} has no such column. "
                f"It has {', '.join(rows.column_names)}"
            )
    tasks = parse_tasks("datasets", _records(config, columns, rows), notes)
    if not tasks:
        raise TaskError(
            f"{config.path}: split {config.split!r} has no rows; set tasks.split to another one"
        )
    return tasks


def _find_columns(config: DatasetTasks, rows: Any) -> dict[str, str]:
    """The columns of a known layout under their own names."""
    for layout in LAYOUTS:
        needed = {*layout[:2], "rejected"} if "chosen" in layout else {layout[0]}
        if needed <= {*rows.column_names}:
            return {name: name for name in layout if name in rows.column_names}
    raise TaskError(
        f"tasks.columns: {config.path} has the columns {', '.join(rows.column_names)}, none of "
        "which is a prompt, messages, conversations, or chosen with rejected. Name them, such as "
        "columns = { prompt = 'question' }"
    )


def _records(config: DatasetTasks, columns: Mapping[str, str], rows: Any) -> Iterator[Record]:
    for number, row in enumerate(rows.select_columns(sorted(set(columns.values())))):
        fields: dict[str, Any] = {}
        privileged = {}
        for name, column in columns.items():
            if name.startswith(PRIVILEGED):
                privileged[name.removeprefix(PRIVILEGED)] = row[column]
            else:
                fields[name] = _without_nulls(row[column])
        fields["privileged"] = {name: text for name, text in privileged.items() if text is not None}
        if config.grader is not None:
            fields["grader"] = config.grader
        yield Record(where=f"{config.path}, split {config.split!r}, row {number}", fields=fields)


def _without_nulls(value: Any) -> Any:
    """Arrow fills the keys that an object lacks, in tool schemas and arguments, too, with null."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _load(config: DatasetTasks) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "tasks.kind = 'datasets' needs the package datasets; run: pip install -e '.[datasets]'"
        ) from None
    folder = Path(config.path)
    single = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    several = (folder / "dataset_dict.json").is_file()
    if (single or several) and config.name is not None:
        raise TaskError(
            f"tasks.name = {config.name!r}: the folder {folder} holds one saved data set without "
            "named parts; remove tasks.name"
        )
    try:
        if not single and not several:
            return datasets.load_dataset(config.path, config.name, split=config.split)
        loaded = datasets.load_from_disk(config.path)
    except (OSError, ValueError, IndexError, datasets.exceptions.DatasetsError) as error:
        # IndexError is how the package meets a saved data set without rows.
        raise TaskError(
            f"tasks.path = {config.path!r}, name = {config.name!r}, split = {config.split!r}: "
            f"cannot be loaded; correct these fields. The package datasets said: {error}"
        ) from error
    if several:
        if config.split not in loaded:
            raise TaskError(
                f"tasks.split = {config.split!r}: {folder} has no such split; use one of "
                f"{sorted(loaded)}"
            )
        return loaded[config.split]
    saved = str(loaded.split) if loaded.split is not None else "train"
    if saved != config.split:
        raise TaskError(
            f"tasks.split = {config.split!r}: {folder} holds only {saved!r}; set it to that"
        )
    return loaded
