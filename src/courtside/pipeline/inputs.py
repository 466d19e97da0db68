"""What decides whether a stage is done: its recipe, its data files, the stages it starts from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from courtside.errors import RecipeError, TaskError
from courtside.files import require_regular_file
from courtside.recipe import Recipe
from courtside.recipe.builtin import find_data_path
from courtside.recipe.load import parse_recipe
from courtside.recipe.pipeline import Pipeline, Stage
from courtside.recipe.stage_trees import PREFIX
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import CHANGEABLE_FIELDS, dump_recipe, find_differences
from courtside.report.folder.pipeline_folder import PipelineFolder, StageRecord
from courtside.training import checkpoints


def collect_data_digests(recipe: Recipe) -> dict[str, str]:
    """SHA-256 of the files that the tasks and suites of a recipe are read from."""
    sections = [recipe.tasks, *(recipe.suite_tasks(name) for name in recipe.evaluate.suites)]
    paths = {path for section in sections for path in section.data_paths}
    return {
        str(path): _digest_path(find_data_path(path))
        for path in sorted(paths)
        if not str(path).startswith(PREFIX)
    }


def collect_stage_digests(
    pipeline: Pipeline, stage: Stage, folder: PipelineFolder
) -> dict[str, str]:
    """The checksums of the checkpoints that earlier stages hand to this one, of when those
    ended, because checkpoints may be deleted once they are exported."""
    digests = {}
    for reference in stage.references:
        record = folder.read_record(pipeline.stage(reference.stage).folder_name)
        assert record is not None and record.checkpoint is not None, "stages run in order"
        digests[PREFIX + reference.stage] = record.checkpoint
    return digests


def find_changes(
    record: StageRecord, stage: Stage, inputs: Mapping[str, str], *, name: str
) -> list[str]:
    """`field: old → new` of what the stage was started with and would be started with now.

    Fields that do not change what is trained may differ, and only as long as it trains the number
    of its steps. Inputs that are not in `inputs` are not compared.
    """
    old = dump_recipe(parse_recipe(dict(record.recipe), name=name))
    changeable = tuple(
        f"{field}{end}"
        for field in CHANGEABLE_FIELDS
        for end in ".:"
        if not (record.is_done and field == "train.steps")
    )
    lines = [
        line
        for line in find_differences(old, dump_recipe(stage.recipe))
        if not line.startswith(changeable)
    ]
    for source, digest in inputs.items():
        before = record.inputs.get(source)
        if before is not None and before != digest:
            lines.append(f"{source}: its contents changed ({before[:12]} → {digest[:12]})")
    return lines


def refuse_changed_stage(
    record: StageRecord, stage: Stage, inputs: Mapping[str, str], *, path: Path
) -> bool:
    """Whether the stage must forget its start: it changed, and has trained nothing. A RecipeError
    where it changed after it trained."""
    lines = find_changes(record, stage, inputs, name=str(path))
    if not lines:
        return False
    folder = RunFolder.read(path)
    if not folder.metrics() and checkpoints.latest(folder.checkpoints) is None:
        return True
    raise RecipeError(
        f"stage {stage.name!r} was changed after it ran in {path}:\n"
        + "\n".join(f"  {line}" for line in lines)
        + f"\nDelete or rename {path} to train it again (later stages that start from it, too), or "
        "take the change back"
    )


def make_record(pipeline: Pipeline, stage: Stage, inputs: Mapping[str, str]) -> StageRecord:
    root = pipeline.root_of(stage)
    return StageRecord(
        recipe=dump_recipe(stage.recipe),
        inputs=dict(inputs),
        root=None if root is stage else root.folder_name,
    )


# ── digests of files ─────────────────────────────────────────────────────────────────────────────


def _digest_path(path: Path) -> str:
    digest: Any = hashlib.sha256()
    try:
        for name, file in _list_files(path):
            digest.update(name.encode() + b"\0")
            require_regular_file(file)
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except FileNotFoundError:
        return "missing"  # whoever reads the tasks says so
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}). Make it readable") from None
    return str(digest.hexdigest())


def _list_files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield "", path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield file.relative_to(path).as_posix(), file
