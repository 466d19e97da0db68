"""Tasks from the rows of a data set of the `datasets` package, from a hub or from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from courtside.errors import TaskError, UserError
from courtside.recipe.tasks import DatasetTasks
from courtside.tasks.parsing import Record, parse_tasks
from courtside.types import Task

FIELDS = ("prompt", "messages", "answer", "completion", "rejected")
PRIVILEGED = "privileged."


def load_dataset_tasks(config: DatasetTasks) -> tuple[Task, ...]:
    if not config.columns.keys() & {"prompt", "messages"}:
        raise TaskError(
            "tasks.columns: names neither prompt nor messages; add one, such as "
            "columns = { prompt = 'question' }"
        )
    for name in config.columns:
        if name not in FIELDS and not name.startswith(PRIVILEGED):
            raise TaskError(
                f"tasks.columns.{name}: no such field of a task; use one of {', '.join(FIELDS)}, "
                f"or {PRIVILEGED}NAME"
            )
    rows = _load(config)
    for name, column in config.columns.items():
        if column not in rows.column_names:
            raise TaskError(
                f"tasks.columns.{name} = {column!r}: {config.path} has no such column. "
                f"It has {', '.join(rows.column_names)}"
            )
    tasks = parse_tasks("datasets", _records(config, rows))
    if not tasks:
        raise TaskError(
            f"{config.path}: split {config.split!r} has no rows; set tasks.split to another one"
        )
    return tasks


def _records(config: DatasetTasks, rows: Any) -> Iterator[Record]:
    for number, row in enumerate(rows.select_columns(sorted(set(config.columns.values())))):
        fields: dict[str, Any] = {}
        privileged = {}
        for name, column in config.columns.items():
            if name.startswith(PRIVILEGED):
                privileged[name.removeprefix(PRIVILEGED)] = row[column]
            else:
                fields[name] = row[column]
        fields["privileged"] = {name: text for name, text in privileged.items() if text is not None}
        if config.grader is not None:
            fields["grader"] = config.grader
        yield Record(where=f"{config.path}, split {config.split!r}, row {number}", fields=fields)


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
