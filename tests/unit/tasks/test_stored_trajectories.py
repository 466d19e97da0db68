"""Trajectories of another run as tasks: which there are, in what order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, small_tree
from support.stored_runs import make_trajectory, store
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.api import evaluate_student
from courtside.assemble import assemble
from courtside.errors import RecipeError, TaskError, UserError
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.recipe.tasks import TrajectoryTasks
from courtside.report.folder.parquet import write_trajectories
from courtside.tasks.stored_trajectories import ReplaySource, make_replay_source
from courtside.types import Scored, Trajectory, Turn


def source(path: Path, **fields: Any) -> ReplaySource:
    hinted, most = fields.pop("hinted", frozenset()), fields.pop("max_tokens", None)
    config = TrajectoryTasks(kind="trajectories", path=path, **fields)
    return make_replay_source(config, seed=3, hinted=hinted, max_tokens=most)


STEPS = [
    [make_trajectory(f"{step}-{n}", "It is." * (n + 1)) for n in range(4)] for step in range(3)
]


def test_each_is_a_task_under_its_own_id_once_an_epoch(tmp_path: Path) -> None:
    stored = source(store(tmp_path / "run", *STEPS))
    batches = [[task.id for task in stored.batch(step, 4)] for step in range(6)]
    everything = sorted(t.id for step in STEPS for t in step)
    for epoch in (batches[:3], batches[3:]):
        assert sorted(id for ids in epoch for id in ids) == everything
    assert batches[:3] != batches[3:]
    reloaded = source(tmp_path / "run")
    assert [[task.id for task in reloaded.batch(step, 4)] for step in range(6)] == batches


def test_they_come_back_as_they_were(tmp_path: Path) -> None:
    stored = source(store(tmp_path / "run", *STEPS))
    ids = ["2-1", "0-3", "2-0"]
    assert stored.load(ids) == [STEPS[2][1], STEPS[0][3], STEPS[2][0]]


def test_a_batch_never_holds_one_twice(tmp_path: Path) -> None:
    stored = source(store(tmp_path / "run", STEPS[0]))
    assert sorted(task.id for task in stored.batch(5, 64)) == ["0-0", "0-1", "0-2", "0-3"]
    for step in range(8):  # batches of 3 run across epochs of 4
        ids = [task.id for task in stored.batch(step, 3)]
        assert len(set(ids)) == len(ids) >= 2


def test_what_a_run_on_stored_ones_has_stored_again_is_there_once(tmp_path: Path) -> None:
    stored = source(store(tmp_path / "run", STEPS[0], STEPS[0], STEPS[1]))
    assert len(stored.batch(0, 99)) == 8


def test_steps_and_limit_choose(tmp_path: Path) -> None:
    run = store(tmp_path / "run", *STEPS)
    chosen = {task.id for task in source(run, steps=(2, 0)).batch(0, 99)}
    assert chosen == {t.id for t in (*STEPS[0], *STEPS[2])}
    assert {t.id for t in source(run, limit=2).batch(0, 99)} == {"0-0", "0-1"}
    with pytest.raises(TaskError, match=r"tasks.limit = 13, but .* has 12 train tasks"):
        source(run, limit=13)


def test_only_hinted_ones(tmp_path: Path) -> None:
    data = [
        make_trajectory("2-7", task="talk", source="dataset"),
        make_trajectory("2-8", task="talk"),
    ]
    run = store(tmp_path / "run", *STEPS, data)
    # A recorded conversation goes by its task's id, too; a sample does not.
    hinted = source(run, select="hinted", hinted={"1-2", "talk", "elsewhere"})
    assert {task.id for task in hinted.batch(0, 99)} == {"1-2", "2-7"}
    assert hinted.sources == {"student", "dataset"}
    with pytest.raises(TaskError, match=r"hints name 1 trajectories, and none of the 14 .*Write a"):
        source(run, select="hinted", hinted={"elsewhere"})


def test_too_long_for_the_model(tmp_path: Path) -> None:
    run = store(tmp_path / "run", STEPS[0])
    longest, *_, shortest = sorted((len(t.token_ids) for t in STEPS[0]), reverse=True)
    with pytest.raises(
        TaskError, match=rf"trajectory 0-3 has {longest} tokens.*overlong_prompts = 'drop'"
    ):
        source(run, max_tokens=longest - 1)
    remaining = source(run, max_tokens=longest - 1, overlong_prompts="drop")
    assert len(remaining.batch(0, 99)) == 3 and remaining.num_dropped == 1
    with pytest.raises(TaskError, match="the model takes"):
        source(run, max_tokens=shortest - 1, overlong_prompts="drop")


def test_what_is_no_run_with_trajectories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"tasks.path: .*nope: not a run folder.*`courtside train`"):
        source(tmp_path / "nope")
    with pytest.raises(TaskError, match=r"has stored no trajectories yet. Let it train a step"):
        source(store(tmp_path / "empty"))
    with pytest.raises(TaskError, match=r"the stored steps are empty"):
        source(store(tmp_path / "nothing", []))
    run = store(tmp_path / "run", *STEPS)
    with pytest.raises(TaskError, match=r"tasks.steps: .*no trajectories of step 9; .*0 to 2"):
        source(run, steps=(1, 9))
    (run / "trajectories" / "step-000001.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=r"step-000001.parquet: cannot be read as Parquet"):
        source(run)


def test_a_newer_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("courtside.report.folder.parquet.SCHEMA_VERSION", 99)
        run = store(tmp_path / "run", STEPS[0])
    with pytest.raises(UserError, match=r"step-000000.parquet: .*schema version 99.*Update cour"):
        source(run)


def test_one_that_is_gone_meanwhile_is_told(tmp_path: Path) -> None:
    run = store(tmp_path / "run", STEPS[0])
    stored = source(run)
    file = run / "trajectories" / "step-000000.parquet"
    write_trajectories(file, [Scored(trajectory=STEPS[0][0], target=None)], {})
    with pytest.raises(TaskError, match=r"trajectory 0-2 is gone from step 0"):
        stored.load(["0-0", "0-2"])


# ── recipes ──────────────────────────────────────────────────────────────────────────────────────


def tree(folder: Path, run: Path, **changes: Any) -> dict[str, Any]:
    derived = small_tree(
        folder,
        **{
            "tasks": {"kind": "trajectories", "path": str(run)},
            "rollout": {"student_fraction": 0.0},
            "reader": {"kind": "human", "path": str(run / "hints.jsonl")},
            "teacher": {"kind": "self", "weights": "live"},
            "losses": [{"kind": "divergence", "on": "hinted_turns"}],
            **changes,
        },
    )
    return {name: section for name, section in derived.items() if section is not None}


def recipe(folder: Path, run: Path, **changes: Any) -> Recipe:
    hint = {"trajectory": "0-0", "turn": 1, "text": "No."}
    (run / "hints.jsonl").write_text(json.dumps(hint) + "\n")
    return parse_recipe(tree(folder, run, **changes))


REWARD = {"kind": "policy_gradient", "advantage": "reward", "on": "student"}
FROZEN = {"kind": "self", "weights": "frozen"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {}}, r"written elsewhere.*student_fraction = 0"),
        ({"rollout": {"student_fraction": 0.0, "temperature": 0.7}},
         r"rollout.temperature: nothing is sampled"),
        ({"rollout": {"student_fraction": 0.0, "samples_per_prompt": 2}},
         r"rollout.samples_per_prompt: nothing is sampled"),
        ({"losses": [REWARD], "reader": None, "teacher": None}, r"of a prompt, .*one by one"),
        ({"losses": [{"kind": "preference"}], "reader": None, "teacher": None}, r"of a pair"),
        ({"losses": [{"kind": "cross_entropy"}], "reader": None, "teacher": None}, r"degrades"),
        ({"losses": [{"kind": "divergence"}], "reader": None,
          "teacher": FROZEN | {"context": {"kind": "sibling"}}}, r"a sibling is another sample"),
        ({"evaluate": {"suites": {"more": {"limit": 1}}}}, r"evaluate.suites: nothing answers"),
        ({"tasks": {"kind": "trajectories", "path": "x", "system_prompt": "Hm."}},
         r"the prompts of stored trajectories"),
        ({"tasks": {"kind": "trajectories", "path": "x", "steps": [1, 1]}}, r"names a step twice"),
        ({"tasks": {"kind": "trajectories", "path": "x", "select": "hinted"},
          "reader": {"kind": "rules"}}, r"tasks.select = 'hinted' selects by a person's hints"),
    ],
)  # fmt: skip
def test_what_stored_trajectories_cannot_be_used_for(
    tmp_path: Path, tiny_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(tree(tiny_folder, tmp_path, **changes))


def test_a_policy_gradient_on_recorded_conversations_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"were sampled with, and .*'conversations' has none"):
        small_recipe(
            tiny_folder,
            tasks={"kind": "conversations", "path": "talks.jsonl"},
            rollout={"student_fraction": 0.0},
            reader={"kind": "rules"},
            teacher={"kind": "self", "weights": "live"},
            losses=[{"kind": "policy_gradient", "on": "hinted_turns"}],
        )


# ── the model at hand ────────────────────────────────────────────────────────────────────────────


def test_they_are_read_as_they_are_and_measured_before(tmp_path: Path, tiny_folder: Path) -> None:
    run = store(tmp_path / "run", STEPS[0])
    parts = assemble(recipe(tiny_folder, run))
    batch = parts.rollout(parts.tasks.batch(0, 4), 0)
    assert sorted(t.id for t in batch) == [t.id for t in STEPS[0]]
    assert {t.id: t for t in batch} == {t.id: t for t in STEPS[0]}
    assert any("the stored trajectories surprise the student by" in note for note in parts.notes)
    assert not any("chat template" in note for note in parts.notes)
    assert (
        parts.evaluator.reason_not_to("test")
        == "nothing answers the student in stored trajectories"
    )
    with pytest.raises(UserError, match=r"nothing answers the student.*tasks.kind and the rest"):
        evaluate_student(parts.recipe)


def test_another_template_is_told(tmp_path: Path, tiny_folder: Path) -> None:
    odd = make_trajectory("0-0")
    prompt = odd.turns[0].token_ids[1:]
    prompt_turn = Turn(
        role="prompt", text="", token_ids=prompt, completion_mask=(False,) * len(prompt)
    )
    other = Trajectory(**{**_fields(odd), "turns": (prompt_turn, odd.turns[1])})
    parts = assemble(recipe(tiny_folder, store(tmp_path / "run", [other])))
    assert any("makes other tokens of the prompt of trajectory 0-0" in n for n in parts.notes)
    assert parts.rollout(parts.tasks.batch(0, 1), 0) == [other]


def test_other_words_are_refused(tmp_path: Path) -> None:
    """The same text under two tokenizers; and a model that has more words than this one."""
    trajectory = make_trajectory("0-0", "It is.")
    turned = {i: 257 - i for i in range(2, 256)}
    for name, answer, message in (
        (
            "turned",
            tuple(turned.get(i, i) for i in trajectory.turns[1].token_ids),
            r"turn 1: its tokens",
        ),
        (
            "large",
            (*trajectory.turns[1].token_ids, 300),
            r"holds the token 300, and the vocabulary of .* has 258",
        ),
    ):
        turn = Turn(
            role="assistant", text="It is.", token_ids=answer, completion_mask=(True,) * len(answer)
        )
        other = Trajectory(**{**_fields(trajectory), "turns": (trajectory.turns[0], turn)})
        run = store(tmp_path / name, [other])
        folder = tmp_path / f"{name}-model"
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        with pytest.raises(TaskError, match=rf"trajectory 0-0.*{message}.*same vocabulary"):
            assemble(recipe(folder, run))


def test_a_loss_on_somebody_who_wrote_none_of_them_is_refused(
    tmp_path: Path, tiny_folder: Path
) -> None:
    run = store(tmp_path / "run", STEPS[0])
    losses = [{"kind": "cross_entropy", "on": "dataset"}]
    with pytest.raises(RecipeError, match=r"on = 'dataset', but .* written by the student. Use on"):
        assemble(recipe(tiny_folder, run, losses=losses, reader=None, teacher=None))


def test_hints_choose_when_the_run_starts(tmp_path: Path, tiny_folder: Path) -> None:
    run = store(tmp_path / "run", *STEPS)
    lines = [{"trajectory": id, "turn": 1, "text": "No."} for id in ("1-3", "2-0", "9-9")]
    derived = recipe(tiny_folder, run, tasks=tree(tiny_folder, run)["tasks"] | {"select": "hinted"})
    (run / "hints.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {task.id for task in assemble(derived).tasks.batch(0, 9)} == {"1-3", "2-0"}


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    return {name: getattr(trajectory, name) for name in trajectory.__dataclass_fields__}
