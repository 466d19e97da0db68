"""Writes a checkpoint of a run as a model folder that other programs load."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from courtside.artifacts.model_card import write_base_card, write_model_card
from courtside.artifacts.serving import public_name, vllm_command
from courtside.artifacts.weights import (
    load_quantized_base,
    load_student,
    make_adapter,
    merge_student,
)
from courtside.engines.builtin_model import open_permissions
from courtside.engines.loading import load_tokenizer, read_config
from courtside.engines.portability import make_portable
from courtside.errors import UserError
from courtside.recipe.student import StudentConfig
from courtside.report.folder.folder import RunFolder
from courtside.training import checkpoints

ExportDtype = Literal["float32", "bfloat16", "float16"]


def write_export(
    run: RunFolder, checkpoint: Path, to: Path, *, adapter: bool, dtype: ExportDtype
) -> None:
    """All or nothing: a folder beside `to` is filled, then renamed."""
    config = run.recipe().student
    saved = checkpoints.load(checkpoint)
    with _fill_folder(to) as work:
        # The student alone: the teacher and the tasks may no longer exist.
        weights = load_student(config, saved.tensors["weights"])
        base = public_name(config.model) or config.model
        if adapter:
            _save_adapter(make_adapter(config, weights), work, base)
        else:
            merge_student(weights, getattr(torch, dtype)).save_pretrained(work)
        _save_tokenizer(config, work)
        display_base = public_name(config.model) or Path(config.model).name
        card = write_model_card(
            run,
            name=to.resolve().name,
            step=saved.num_steps,
            adapter=adapter,
            dtype=dtype,
            command=vllm_command(
                work,
                display_base,
                to.resolve().name,
                context_length=config.context_length,
            ),
        )
        (work / "README.md").write_text(card, "utf-8", errors="backslashreplace")


def write_base(run: RunFolder, to: Path, *, dtype: ExportDtype) -> None:
    """The frozen base of a run that held it in 4 bits, as other programs load it: adapters of that
    run have on it the log-probs that they have in the run."""
    config = run.recipe().student
    with _fill_folder(to) as work:
        load_quantized_base(config).to(getattr(torch, dtype)).save_pretrained(work)
        _save_tokenizer(config, work)
        card = write_base_card(run, name=to.resolve().name, dtype=dtype)
        (work / "README.md").write_text(card, "utf-8", errors="backslashreplace")


def _save_tokenizer(config: StudentConfig, folder: Path) -> None:
    """And what older programs read in the folder's JSON files."""
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    tokenizer.save_pretrained(folder)
    make_portable(folder, read_config(config.model))


def refuse_base(config: StudentConfig) -> None:
    """Why this run has no base but `student.model`."""
    if config.lora is None:
        raise UserError("--base: this run trained all weights and has no base. Leave it out")
    if not config.lora.in_4_bits:
        raise UserError(
            "--base: this run held its base as the files of student.model have it, and its adapter "
            "belongs on those. Leave --base out; it is for student.lora.base_dtype = 'nf4'"
        )


def refuse_adapter(config: StudentConfig, *, dtype: ExportDtype) -> None:
    """Why this run has no adapter that fits a base model."""
    if config.lora is None:
        raise UserError("--adapter: this run trained all weights and has no adapter. Leave it out")
    if config.average_with is not None:
        raise UserError(
            "--adapter: the adapter belongs to averaged weights (student.average_with), which only "
            "this run has. Leave --adapter out: merged weights have all of it"
        )
    if config.keep_layers is not None:
        raise UserError(
            "--adapter: the adapter belongs to a pruned model (student.keep_layers), which only "
            "this run has. Leave --adapter out: merged weights are the pruned model"
        )
    if dtype != "float32":
        raise UserError(f"--dtype {dtype}: an adapter is stored in float32. Leave --dtype out")


def _save_adapter(adapted: Any, folder: Path, base: str) -> None:
    adapted.peft_config["default"].base_model_name_or_path = base
    # With an adapted head, PEFT would save the whole embedding, too.
    adapted.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)


@contextmanager
def _fill_folder(to: Path) -> Iterator[Path]:
    """A new folder that becomes `to` at the end, with the permissions of any other new file."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to}: exists and is not an empty folder. Name a new folder")
    work = None
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}-"))
        yield work
        open_permissions(work)
        work.rename(to)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{to}: cannot be written ({reason}). Name a folder on a disk with space that you may "
            "write to"
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
