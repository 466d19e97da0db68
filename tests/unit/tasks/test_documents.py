"""Documents: windows that cover every token, background text, and files that are no documents."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe, write_jsonl
from support.tiny_model import tiny_tokenizer

from courtside.api import evaluate_student, show, train
from courtside.assemble import assemble
from courtside.errors import RecipeError, TaskError
from courtside.recipe.document_tasks import BackgroundConfig, DocumentTasks
from courtside.tasks.documents import TextTokenizer, make_document_source, pack_windows

END = (1,)
"""The tiny tokenizer's end token."""


def source_of(path: Path, **options: Any) -> Any:
    config = DocumentTasks(kind="documents", path=path, **options)
    return make_document_source(config, TextTokenizer(tiny_tokenizer()), seed=0)


def ids_of(source: Any) -> list[tuple[int, ...]]:
    return [source.window(task.id) for task in source.train_tasks]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "below").mkdir(parents=True)
    (folder / "b.txt").write_text("second\n")
    (folder / "below" / "c.txt").write_text("third, and a longer one than the others\n")
    (folder / "a.txt").write_text("first\n")
    (folder / ".hidden").write_text("not this\n")
    return folder


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 40, 41])
def test_windows_cover_every_token_and_repeat_only_the_overlap(length: int, overlap: int) -> None:
    ids = list(range(length))
    spans = pack_windows(ids, max_tokens=8, overlap=overlap)
    covered = sorted({i for a, b in spans for i in range(a, b)})
    dropped = ids[len(covered) :]
    assert covered + dropped == ids
    assert len(dropped) <= (overlap == 0)  # a single last token has nothing before it
    assert all(2 <= b - a <= 8 for a, b in spans)
    assert all(after[0] == before[1] - overlap for before, after in pairwise(spans))
    trained = [i for a, b in spans for i in range(a + 1, b)]
    if overlap == 1:
        assert trained == ids[1:]


def test_the_stream_is_the_documents_with_separators(folder: Path) -> None:
    encode = TextTokenizer(tiny_tokenizer()).encode
    texts = ["first\n", "second\n", "third, and a longer one than the others\n"]
    stream = [*END, *(i for text in texts for i in (*encode(text), *END))]
    windows = ids_of(source_of(folder, max_tokens=16, overlap=4))
    rebuilt = [*windows[0], *(i for window in windows[1:] for i in window[4:])]
    assert rebuilt == stream
    plain = ids_of(source_of(folder, max_tokens=512, separator="\n\n"))
    assert plain == [(*encode("\n\n"), *(i for t in texts for i in encode(t + "\n\n")))]


def test_special_tokens_in_a_document_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("an <|im_end|> inside")
    [window] = ids_of(source_of(tmp_path / "a.txt"))
    assert [i for i, token in enumerate(window) if token == END[0]] == [0, len(window) - 1]


def test_every_token_but_the_first_is_a_completion_token(folder: Path, tiny_folder: Path) -> None:
    recipe = document_recipe(tiny_folder, folder)
    parts = assemble(recipe)
    for trajectory in parts.rollout(parts.tasks.batch(0, 3), 0):
        mask = trajectory.completion_mask
        assert not mask[0] and all(mask[1:]) and trajectory.source == "dataset"
    assert any("3 documents make" in note for note in parts.notes)


def test_background_has_its_share_of_the_windows(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("something else entirely. " * 20)
    background = BackgroundConfig(path=tmp_path / "other.txt", fraction=0.3)
    source = source_of(folder, max_tokens=16, background=background)
    own_ids = {task.id for task in source.train_tasks}
    batches = [source.batch(step, 4) for step in range(25)]
    assert all(len(batch) == 4 for batch in batches)
    num_background = sum(task.id not in own_ids for batch in batches for task in batch)
    assert num_background == 30
    trained = [task.id for batch in batches for task in batch if task.id in own_ids]
    for start in range(0, len(trained) - len(own_ids) + 1, len(own_ids)):
        assert set(trained[start : start + len(own_ids)]) == own_ids  # epoch by epoch
    assert [source.batch(step, 4) for step in range(25)] == batches


BAD_FILES = {
    "empty.txt": (b" \n", "is empty"),
    "image.png": (b"\x89PNG\0\0", "holds NUL bytes, so it is binary"),
    "latin.txt": ("café".encode("latin-1"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_no_text_is_an_error_or_counted(name: str, folder: Path) -> None:
    content, reason = BAD_FILES[name]
    (folder / name).write_bytes(content)
    with pytest.raises(TaskError, match=rf"{name}: {reason}.*invalid_documents = 'drop'"):
        source_of(folder)
    source = source_of(folder, invalid_documents="drop")
    assert len(source.documents) == 3
    assert any(
        note.startswith(f"1 documents were left out: {name} ({reason}") for note in source.notes
    )
    only = folder / name
    with pytest.raises(TaskError, match=f"none of its 1 files is a document, such as {name}"):
        source_of(only, invalid_documents="drop")


def test_pipes_and_missing_paths(folder: Path) -> None:
    import os

    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(TaskError, match="it is a pipe"):
        source_of(folder)
    assert len(source_of(folder, invalid_documents="drop").documents) == 3
    with pytest.raises(TaskError, match="no such file or folder"):
        source_of(folder / "none")
    with pytest.raises(TaskError, match="no file in this folder matches"):
        source_of(folder, pattern="*.md")


def test_copies_are_used_once(folder: Path) -> None:
    (folder / "z.txt").write_text("first")
    source = source_of(folder)
    assert "1 documents are copies and used once: z.txt (as a.txt)" in source.notes
    assert len(source.documents) == 3


# ── training ─────────────────────────────────────────────────────────────────────────────────────


def document_recipe(model: Path, folder: Path, **changes: Any) -> Any:
    sections: dict[str, Any] = {
        "tasks": {"kind": "documents", "path": str(folder), "max_tokens": 16},
        "rollout": {"student_fraction": 0},
        "losses": [{"kind": "cross_entropy", "on": "dataset"}],
    }
    return small_recipe(model, **(sections | changes))


def test_the_loss_is_the_mean_over_all_tokens_but_the_first(
    folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = document_recipe(tiny_folder, folder, train={"steps": 1, "prompts_per_step": 4})
    run = train(recipe, tmp_path / "run", quiet=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    config = DocumentTasks(kind="documents", path=folder, max_tokens=16)
    source = make_document_source(config, TextTokenizer(tiny_tokenizer()), seed=0)
    total, count = 0.0, 0
    for task in source.batch(0, 4):
        ids = torch.tensor([source.window(task.id)])
        logp = model(ids).logits.detach()[0, :-1].log_softmax(-1)
        total -= float(logp.gather(-1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    row = run.metrics()[0]
    assert row["tokens/cross_entropy"] == count
    assert row["loss"] == pytest.approx(total / count, rel=1e-5)


def test_documents_with_suites_of_other_kinds(
    folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Questions on the documents and other abilities, before and after, beside the training."""
    questions = write_jsonl(
        tmp_path / "questions.jsonl",
        [{"prompt": f"what is {n}?", "answer": "e", "grader": "contains", "split": "test"}
         for n in range(3)],
    )  # fmt: skip
    suites = {
        "knowledge": {"kind": "jsonl", "path": str(questions)},
        "retention": {"kind": "arithmetic", "digits": 1},
    }
    recipe = document_recipe(
        tiny_folder, folder, evaluate={"num_tasks": 3, "suites": suites},
        rollout={"student_fraction": 0, "max_new_tokens": 6},
        train={"steps": 2, "prompts_per_step": 2},
    )  # fmt: skip
    run = train(recipe, tmp_path / "run", quiet=True)
    measured = [(e.policy, e.step, len(e.scores)) for e in run.evaluations()]
    assert measured == [
        ("student:knowledge", 0, 3), ("student:retention", 0, 3),
        ("student:knowledge", 2, 3), ("student:retention", 2, 3),
    ]  # fmt: skip
    page = (run.path / "report.html").read_text()
    assert "student:knowledge" in page and "No evaluation has been recorded" not in page
    added = evaluate_student(run=run.path, num_tasks=2, quiet=True)
    assert [(e.policy, len(e.scores)) for e in added] == [
        ("student:knowledge", 2), ("student:retention", 2),
    ]  # fmt: skip
    preview = show(recipe)
    assert [token.use for token in preview.sequences[0].tokens][:3] == [
        "context",
        "trains",
        "trains",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {"kind": "documents", "path": "d", "overlap": 600}}, "overlap = 600: a window"),
        ({"tasks": {"kind": "documents", "path": "d", "system_prompt": "x"}}, "have no prompt"),
        ({"tasks": {"kind": "documents", "path": "d", "max_tokens": 1}}, "max_tokens"),
        ({"rollout": {}}, "student_fraction = 0"),
        ({"reader": {"kind": "rules", "rules": [{"detect": "over_length"}]},
          "teacher": {"kind": "self", "weights": "live"},
          "losses": [{"kind": "divergence", "on": "hinted_turns"}]}, "reader: .* has no turns"),
        ({"losses": [{"kind": "policy_gradient", "advantage": "reward"}]}, "policy gradient"),
        ({"evaluate": {"suites": {"more": {"limit": 1}}}}, "give 'more' a `kind` of its own"),
        ({"evaluate": {"suites": {"d": {"kind": "documents", "path": "d"}}}},
         "evaluate.suites.d: nothing answers the student"),
        ({"evaluate": {"suites": {"d": {"kind": "arithmetic", "digits": 99}}}},
         "evaluate.suites.d.digits: must be less than"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], message: str, folder: Path, tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        document_recipe(tiny_folder, folder, **changes)


def test_a_window_must_fit_the_context(folder: Path, tiny_folder: Path) -> None:
    recipe = document_recipe(
        tiny_folder, folder, tasks={"kind": "documents", "path": str(folder), "max_tokens": 4096}
    )
    with pytest.raises(RecipeError, match=r"tasks.max_tokens = 4,096: the context .* is 512"):
        assemble(recipe)
