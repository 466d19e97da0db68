"""Every refusal of the recipe names the field, the reason and the fix; what is left works."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from courtside.errors import RecipeError, UserError
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.recipe.rollout import Ramp
from courtside.recipe.teacher import SelfTeacherConfig
from courtside.recipe.train import TrainConfig
from courtside.report.folder import toml

DIVERGENCE = {"kind": "divergence"}
GAP = {"kind": "policy_gradient"}
REWARD = {"kind": "policy_gradient", "advantage": "reward"}
IMITATE = {"kind": "cross_entropy", "on": "dataset"}
PREFER = {"kind": "preference"}


def tree(**changes: Any) -> dict[str, Any]:
    """A small recipe; a change to None removes the section."""
    whole = {
        "student": {"model": "smollm2-135m"},
        "tasks": {"kind": "arithmetic"},
        "teacher": {"kind": "self"},
        "losses": [DIVERGENCE],
    } | changes
    return {name: value for name, value in whole.items() if value is not None}


def loss(kind: str = "divergence", **changes: Any) -> dict[str, Any]:
    return {"losses": [{"kind": kind, **changes}]}


RECORDED = {
    "tasks": {"kind": "conversations", "path": "logs.jsonl"},
    "rollout": {"student_fraction": 0},
}
RULE = {"detect": "event", "event": "date", "hint": "Look."}


def hinting(tasks: str, **reader: Any) -> dict[str, Any]:
    return {
        "tasks": {"kind": tasks},
        "teacher": {"kind": "self", "weights": "live"},
        "reader": {"kind": "rules", **reader},
        "losses": [DIVERGENCE | {"on": "hinted_turns"}],
    }


def problems(changes: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(tree(**changes), name="mine.toml")
    first, *lines = str(caught.value).split("\n")
    assert first == "mine.toml:"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


# ── one field ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # missing, unknown and misplaced keys
        ({"student": None}, "student: is required"),
        ({"losses": None}, "losses: is required"),
        ({"losses": []}, "losses: needs at least one entry"),
        ({"teacher": {"kind": "model"}}, "teacher.model: is required"),
        ({"train": {"stepz": 3}}, "train.stepz: unknown key; did you mean 'steps'?"),
        ({"trian": {}}, "trian: unknown key; did you mean 'train'?"),
        (
            {"student": {"model": "m", "lora": {"zzz": 1}}},
            "student.lora.zzz: unknown key; this section has rank, alpha, dropout, target_modules, "
            "base_dtype",
        ),
        (
            {"tasks": {"kind": "arithmetic", "columns": {}}},
            "tasks.columns: unknown key here; it belongs to kind = 'datasets'",
        ),
        (
            {"max_new_tokens": 9},
            "max_new_tokens: unknown key here; did you mean rollout.max_new_tokens or "
            "takeover.max_new_tokens or "
            "evaluate.max_new_tokens?",
        ),
        (loss(entropy_aware={"threshold": 1, "advantage": "reward"}),
         "losses[0].entropy_aware.advantage: unknown key; this section has threshold, weight"),
        # kinds
        ({"teacher": {}},
         "teacher.kind: is required; use one of 'self', 'model', 'server', 'routes', 'custom'"),
        (
            {"teacher": {"kind": "slef"}},
            "teacher.kind: 'slef' is not known; did you mean 'self'? use one of 'self', 'model', "
            "'server', 'routes', 'custom'",
        ),
        (
            loss(support={"kind": "all"}),
            "losses[0].support.kind: 'all' is not known; use one of 'full', 'top_k'",
        ),
        (
            {"teacher": "self"},
            "teacher: must be a section with a kind: 'self', 'model', 'server', 'routes', "
            "'custom'; got \"self\"",
        ),
        (
            {"losses": DIVERGENCE},
            "losses: must be a list of sections; write [[losses]] above each; "
            'got {"kind": "divergence"}',
        ),
        # types, taken at their word
        ({"seed": True}, "seed: must be an integer; got true"),
        ({"train": {"steps": "5"}}, 'train.steps: must be an integer; got "5"'),
        ({"train": {"steps": 2.5}}, "train.steps: must be an integer; got 2.5"),
        ({"train": {"learning_rate": "1e-4"}},
         'train.learning_rate: must be a number; got "1e-4"'),
        ({"student": {"model": 3}}, "student.model: must be a string; got 3"),
        ({"student": {"model": "m", "gradient_checkpointing": 1}},
         "student.gradient_checkpointing: must be true or false; got 1"),
        ({"rollout": {"stop": "END"}}, 'rollout.stop: must be a list; got "END"'),
        ({"train": 3},
         "train: must be a section with steps, max_student_tokens, max_teacher_tokens, max_flops, "
         "max_seconds, prompts_per_step, learning_rate, lr_schedule, "
         "warmup_steps, "
         "weight_decay, betas, max_grad_norm, optimizer_offload, micro_batch_tokens, "
         "logits_chunk_tokens; got 3"),
        ({"tasks": {"kind": "datasets", "path": "x", "columns": 3}},
         "tasks.columns: must be a section; got 3"),
        ({"tasks": {"kind": "jsonl", "path": 3}}, "tasks.path: must be a string; got 3"),
        # ranges
        ({"train": {"steps": 0}}, "train.steps: must be greater than 0; got 0"),
        ({"seed": -1}, "seed: must be greater than or equal to 0; got -1"),
        ({"train": {"learning_rate": float("nan")}},
         "train.learning_rate: must be a finite number; got NaN"),
        ({"rollout": {"temperature": 0}},
         "rollout.temperature: must be greater than or equal to 0.001; got 0"),
        ({"train": {"betas": [0.9]}}, "train.betas[1]: is required"),
        ({"train": {"betas": [0.9, 0.9, 0.9]}}, "train.betas: takes at most 2 entries"),
        ({"tasks": {"kind": "arithmetic", "digits": 13}},
         "tasks.digits: must be less than or equal to 12; got 13"),
        ({"tasks": {"kind": "instructions", "checks": []}},
         "tasks.checks: needs at least one entry"),
        # a number or a section; a list or a word
        (
            {"rollout": {"student_fraction": 2}},
            "rollout.student_fraction: must be less than or equal to 1, or a section with start, "
            "end, "
            "steps; got 2",
        ),
        ({"rollout": {"student_fraction": {"start": 1, "end": 2, "steps": 5}}},
         "rollout.student_fraction.end: must be less than or equal to 1; got 2"),
        ({"student": {"model": "m", "lora": {"target_modules": 3}}},
         "student.lora.target_modules: must be a list, or 'all-linear'; got 3"),
        ({"student": {"model": "m", "lora": {"target_modules": ["q_proj", 3]}}},
         "student.lora.target_modules[1]: must be a string; got 3"),
        # deep places
        (
            {"teacher": {"kind": "routes", "routes": {"sums": {"kind": "model"}}}},
            "teacher.routes.sums.model: is required",
        ),
        (
            {"teacher": {"kind": "routes", "routes": {"a": {"kind": "self"}}, "default": "b"}},
            "teacher: default = 'b' is not one of routes ['a']",
        ),
        (
            {"teacher": {"kind": "self", "context": {"kind": "field", "field": "rule",
                                                     "template": "Obey!"}}},
            "teacher.context.template: needs the slot {text}, where the privileged text goes",
        ),
        # what would be ignored
        (
            {"tasks": {"kind": "arithmetic", "limit_by": "seed"}},
            "tasks.limit_by = 'seed' says which prompts tasks.limit takes, and there is none; set "
            "tasks.limit, or remove it",
        ),
        (
            {"tasks": {"kind": "trajectories", "path": "run", "limit": 2, "limit_by": "seed"},
             "rollout": {"student_fraction": 0}},
            "tasks.limit_by = 'seed': with tasks.kind = 'trajectories' a limit takes the first "
            "ones; remove it",
        ),
    ],
)  # fmt: skip
def test_a_bad_field_gives_one_line(changes: dict[str, Any], line: str) -> None:
    assert problems(changes) == [line]


def test_all_bad_fields_are_listed_at_once() -> None:
    changes = {"student": {}, "rollout": {"samples_per_prompt": 0}, **loss(weight=-1)}
    assert problems(changes) == [
        "student.model: is required",
        "rollout.samples_per_prompt: must be greater than 0; got 0",
        "losses[0].weight: must be greater than 0; got -1",
    ]


def test_a_long_value_is_shortened() -> None:
    [line] = problems({"seed": ["very long"] * 99})
    assert line.startswith('seed: must be an integer; got ["very long", ')
    assert line.endswith("…")
    assert len(line) < 120


# ── losses that cannot work ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "place", "reason", "fix"),
    [
        (
            loss(support={"kind": "sampled"}),
            "losses[0].support",
            "expectation is zero",
            "kind = 'policy_gradient' with advantage = 'teacher_gap'",
        ),
        (
            loss("policy_gradient", advantage="top_k_kl"),
            "losses[0].advantage",
            "its expected gradient is zero",
            "Use a loss of kind = 'divergence'",
        ),
        (
            loss("policy_gradient", advantage="gae"),
            "losses[0].advantage",
            "'gae' is not known",
            "use 'teacher_gap', 'reward', 'hint_contrast' or 'unlikely'",
        ),
        (
            {**loss("preference", normalize="turn"), "rollout": {"student_fraction": 0}},
            "losses[0]",
            "preferences are averaged over pairs",
            "remove it",
        ),
        (
            loss("policy_gradient", advantage="unlikely"),
            "losses[0]",
            "'unlikely' and unlikely_below belong together",
            "e.g. 0.1",
        ),
        (
            loss("policy_gradient", unlikely_below=0.1),
            "losses[0]",
            "'unlikely' and unlikely_below belong together",
            "e.g. 0.1",
        ),
        (loss(divergence="jsd"), "losses[0]", "'jsd' needs beta", "set beta between 0 and 1"),
        (loss(beta=0.5), "losses[0]", "beta belongs to 'jsd', not to", "remove it"),
        (loss(divergence="jsd", beta=1.5), "losses[0]", "beta = 1.5: must lie", "between 0 and 1"),
        (
            loss(divergence="jsd", beta=0.5, parameters={"beta": 0.4}),
            "losses[0]",
            "beta is set twice",
            "remove it",
        ),
        (loss(parameters={"order": 2}), "losses[0]", "order belongs to none", "remove it"),
        (loss(divergence="kl"), "losses[0]", "'kl' is no divergence", "use one of forward_kl"),
        (loss(divergence="skew_reverse_kl"), "losses[0]", "needs alpha", "set alpha between"),
        (loss(alpha=0.1), "losses[0]", "alpha belongs to 'skew_forward_kl' and", "remove it"),
        (
            loss(divergence="jsd", beta=0.5, support={"kind": "top_k", "form": "naive"}),
            "losses[0]",
            "support.form = 'naive' is defined for forward_kl and reverse_kl",
            "use form = 'tail'",
        ),
        (
            loss(divergence="skew_forward_kl", alpha=0.1,
                 support={"kind": "top_k", "form": "stop_gradient"}),
            "losses[0]",
            "support.form = 'stop_gradient' is defined for forward_kl and reverse_kl",
            "use form = 'tail'",
        ),
        (
            loss(support={"kind": "top_k"}, extrapolate=1.5),
            "losses[0]",
            "extrapolate need the whole distribution",
            "support = { kind = 'full' }",
        ),
        (
            loss(support={"kind": "top_k"}, entropy_aware={"threshold": 1.0}),
            "losses[0]",
            "entropy_aware and extrapolate need",
            "support = { kind = 'full' }",
        ),
        (
            loss("policy_gradient", advantage="reward", baseline=True),
            "losses[0]",
            "baseline and extrapolate belong to",
            "advantage = 'teacher_gap'",
        ),
        (
            loss("policy_gradient", scale_by_std=True),
            "losses[0]",
            "scale_by_std and turn_penalty belong to",
            "advantage = 'reward'",
        ),
        (
            loss("policy_gradient", ratio="none", truncate=2.0),
            "losses[0]",
            "truncate acts on the ratio",
            "use ratio = 'importance'",
        ),
        (
            loss("policy_gradient", truncate=2.0, clip=[0.2, 0.2]),
            "losses[0]",
            "truncate and clip exclude each other",
            "choose one",
        ),
        (
            loss("policy_gradient", advantage="reward", penalized_events=["bad"]),
            "losses[0]",
            "penalized_events belongs to turn_penalty",
            "set that, too",
        ),
        (
            loss("cross_entropy", self_imitation=True),
            "losses[0]",
            "self_imitation is of the student's own samples",
            "set on = 'student'",
        ),
        (
            loss("policy_gradient", advantage="reward", gate={}),
            "losses[0]",
            "gate is by the teacher's gap",
            "use advantage = 'teacher_gap' with it",
        ),
        (
            loss(against="reference", gate={}),
            "losses[0]",
            "gate is by the teacher's gap",
            "use against = 'teacher' with it",
        ),
        (
            loss("policy_gradient", dual_clip=3.0),
            "losses[0]",
            "dual_clip bounds the clipped surrogate",
            "set clip, too",
        ),
        (
            loss("policy_gradient", group_baseline="leave_one_out"),
            "losses[0]",
            "group_baseline and zero_variance_groups belong to",
            "advantage = 'reward'",
        ),
        (
            loss("policy_gradient", zero_variance_groups="drop"),
            "losses[0]",
            "group_baseline and zero_variance_groups belong to",
            "advantage = 'reward'",
        ),
        (
            loss(normalize="constant"),
            "losses[0]",
            "normalize = 'constant' and normalize_tokens belong together",
            "e.g. rollout.max_new_tokens",
        ),
        (
            loss(normalize="sequence", normalize_tokens=10),
            "losses[0]",
            "normalize = 'constant' and normalize_tokens belong together",
            "e.g. rollout.max_new_tokens",
        ),
    ],
)  # fmt: skip
def test_a_loss_that_cannot_work_is_refused_with_the_fix(
    changes: dict[str, Any], place: str, reason: str, fix: str
) -> None:
    [line] = problems(changes)
    assert line.startswith(f"{place}: ")
    assert reason in line
    assert fix in line


# ── parts that do not fit each other ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "place", "reason", "fix"),
    [
        (
            {**loss(gate={}), "rollout": {"student_fraction": 0.5}},
            "losses[0] (divergence)",
            "gate is defined on the student's own samples",
            "set on = 'student'",
        ),
        (
            loss(route_weights="equal"),
            "losses[0] (divergence)",
            "route_weights are of teacher.kind = 'routes'",
            "remove them",
        ),
        (
            {**loss(route_weights={"a": 1.0}),
             "teacher": {"kind": "routes", "routes": {"a": {"kind": "model", "model": "q"},
                                                      "b": {"kind": "model", "model": "r"}}}},
            "losses[0] (divergence)",
            "give one weight to each of the routes",
            "['a', 'b']",
        ),
        ({"losses": [DIVERGENCE, DIVERGENCE]}, "losses", "same name", "give each its own `name`"),
        (
            {"rollout": {"off_policy_source": "teacher"}},
            "rollout.off_policy_source = 'teacher'",
            "needs a rest",
            "set rollout.student_fraction below 1",
        ),
        (
            {"teacher": None, "losses": [IMITATE | {"on": "teacher"}],
             "rollout": {"student_fraction": 0, "off_policy_source": "teacher"}},
            "rollout.off_policy_source = 'teacher'",
            "needs a [teacher]",
            "use off_policy_source = 'dataset'",
        ),
        (
            {"tasks": {"kind": "instructions"}, "rollout": {"student_fraction": 0.5}},
            "rollout.student_fraction",
            "tasks.kind = 'instructions' has none",
            "Use off_policy_source = 'teacher'",
        ),
        (
            {"losses": [DIVERGENCE | {"on": "dataset"}]},
            "losses[0] (divergence)",
            "no trajectories written by the dataset",
            "rollout.student_fraction",
        ),
        (
            {"losses": [DIVERGENCE | {"on": "student"}], "rollout": {"student_fraction": 0}},
            "losses[0] (divergence)",
            "no trajectories written by the student",
            "rollout.student_fraction",
        ),
        (
            {"losses": [DIVERGENCE | {"on": "teacher"}], "rollout": {"student_fraction": 0.5}},
            "losses[0] (divergence)",
            "no trajectories written by the teacher",
            "rollout.off_policy_source",
        ),
        ({"teacher": None}, "losses[0] (divergence)", "compares with a teacher", "[teacher]"),
        (
            {"teacher": None, "losses": [GAP]},
            "losses[0] (policy_gradient)",
            "compares with a teacher",
            "add a [teacher] section",
        ),
        (
            {"losses": [GAP], "rollout": {"student_fraction": 0.5}},
            "losses[0] (policy_gradient)",
            "defined on the student's own samples",
            "set on = 'student'",
        ),
        (
            {"losses": [GAP], "rollout": {"student_fraction": {"start": 0, "end": 1, "steps": 9}}},
            "losses[0] (policy_gradient)",
            "defined on the student's own samples",
            "rollout.student_fraction = 1",
        ),
        (
            {"teacher": None, "losses": [REWARD], "rollout": {"samples_per_prompt": 1}},
            "losses[0] (policy_gradient)",
            "compares samples of one prompt",
            "set rollout.samples_per_prompt to 2 or more",
        ),
        (
            {"teacher": None, "losses": [{"kind": "cross_entropy"}],
             "rollout": {"student_fraction": 0.5}},
            "losses[0] (cross_entropy)",
            "imitating the student's own samples degrades it",
            "Use on = 'dataset'",
        ),
        (
            {"teacher": None, "losses": [PREFER]},
            "losses[0] (preference)",
            "pairs come from the tasks",
            "set rollout.student_fraction = 0",
        ),
        (
            {"teacher": None, "losses": [PREFER | {"on": "student"}],
             "rollout": {"student_fraction": 0}},
            "losses[0] (preference)",
            "on = 'student'",
            "written by the dataset",
        ),
        (
            {"teacher": {"kind": "self", "weights": "live"}},
            "teacher",
            "every gap is zero",
            "Give it a context, or weights = 'frozen'",
        ),
        (
            {"teacher": {"kind": "self", "ema_decay": 0.9}},
            "teacher",
            "ema_decay belongs to weights = 'ema'",
            "remove it",
        ),
        (
            {"teacher": {"kind": "routes", "routes": {"a": {"kind": "self", "weights": "live"}}}},
            "teacher",
            "every gap is zero",
            "Give it a context",
        ),
        (
            {"losses": [IMITATE], "rollout": {"student_fraction": 0}},
            "teacher",
            "no loss uses it",
            "remove the section",
        ),
        (
            {"evaluate": {"collateral": True, "temperature": 0.0}},
            "evaluate.collateral",
            "evaluate.temperature = 0 samples nothing",
            "Use a temperature above 0",
        ),
        (
            RECORDED | {"evaluate": {"collateral": True}},
            "evaluate.collateral",
            "nothing answers the student with tasks.kind = 'conversations'",
            "remove it",
        ),
        (
            hinting("toolbox", control="mirror_turn"),
            "reader.control = 'mirror_turn'",
            "tasks.kind = 'toolbox' does not",
            "Use tasks.kind = 'switchboard'",
        ),
        (
            hinting("switchboard", control="other_kind", rules=[RULE]),
            "reader.control = 'other_kind'",
            "this reader has one kind of hint",
            "Add a rule",
        ),
        (
            {"train": {"steps": 5, "warmup_steps": 5}},
            "train.warmup_steps",
            "must be smaller than train.steps",
            "train.steps",
        ),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_with_the_fix(
    changes: dict[str, Any], place: str, reason: str, fix: str
) -> None:
    [line] = problems(changes)
    assert line.startswith(place)
    assert reason in line
    assert fix in line


@pytest.mark.parametrize(
    "changes",
    [
        hinting("switchboard", control="mirror_turn"),
        hinting("switchboard", control="other_kind", rules=[RULE, RULE | {"event": "desk"}]),
        hinting("toolbox", control="other_kind"),
        hinting("toolbox", kind="custom", path="mine:read", control="other_kind"),
    ],
)  # fmt: skip
def test_controls_that_can_place_a_hint_are_accepted(changes: dict[str, Any]) -> None:
    parse_recipe(tree(**changes))


def test_all_misfits_are_listed_at_once() -> None:
    changes = {
        "teacher": None,
        "losses": [DIVERGENCE, GAP],
        "train": {"steps": 5, "warmup_steps": 9},
    }
    assert [line.split(":")[0].split(" must")[0] for line in problems(changes)] == [
        "losses[0] (divergence)",
        "losses[1] (policy_gradient)",
        "train.warmup_steps",
    ]


# ── what works ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"losses": [GAP | {"truncate": 2.0}, REWARD | {"name": "reward", "scale_by_std": True}]},
        {"teacher": None, "losses": [REWARD | {"clip": [0.2, 0.28]}]},
        {"teacher": None, "losses": [IMITATE], "rollout": {"student_fraction": 0}},
        {"teacher": None, "losses": [PREFER], "rollout": {"student_fraction": 0}},
        {"losses": [IMITATE | {"on": "teacher"}],
         "rollout": {"student_fraction": 0, "off_policy_source": "teacher"}},
        {"rollout": {"student_fraction": {"start": 0, "end": 1, "steps": 9}}},
        {"teacher": {"kind": "self", "weights": "live"}, **loss(extrapolate=1.5)},
        {"teacher": {"kind": "self", "weights": "ema", "ema_decay": 0.9}},
        {"teacher": {"kind": "self", "weights": "live", "context": {"kind": "sibling"}}},
        loss(divergence="jsd", beta=0.5, support={"kind": "top_k", "form": "tail"}),
        loss(divergence="skew_reverse_kl", alpha=0.1),
        loss(support={"kind": "top_k", "form": "naive", "k": 20}),
    ],
)  # fmt: skip
def test_a_recipe_survives_toml_and_json(changes: dict[str, Any]) -> None:
    recipe = parse_recipe(tree(**changes))
    dumped = recipe.model_dump(mode="json")
    assert parse_recipe(tomllib.loads(toml.dumps(dumped))) == recipe
    assert parse_recipe(json.loads(json.dumps(dumped))) == recipe


def test_python_values_are_as_good_as_toml() -> None:
    recipe = parse_recipe(
        tree(
            tasks={"kind": "jsonl", "path": Path("some/tasks.jsonl")},
            rollout={"stop": ("END",)},
            train=TrainConfig(steps=7),
        )
    )
    assert recipe.tasks.kind == "jsonl"
    assert recipe.tasks.path == Path("some/tasks.jsonl")
    assert recipe.rollout.stop == ("END",)
    assert recipe.train == TrainConfig(steps=7)
    with pytest.raises(RecipeError, match="of type object is not allowed in a recipe"):
        parse_recipe(tree(seed=object()))


def test_recipes_are_frozen_and_wrong_ones_are_user_errors() -> None:
    recipe = parse_recipe(tree())
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1  # type: ignore[misc]
    assert issubclass(RecipeError, UserError)


def test_learning_rate_follows_the_trained_weights() -> None:
    lora = {"model": "m", "lora": {"rank": 8}}
    assert parse_recipe(tree()).learning_rate == 1e-5
    assert parse_recipe(tree(student=lora)).learning_rate == 1e-4
    assert parse_recipe(tree(student=lora, train={"learning_rate": 3e-4})).learning_rate == 3e-4


def test_share_of_student_samples_moves_linearly_and_stays() -> None:
    ramp = Ramp(start=0.2, end=1.0, steps=4)
    assert [ramp.at(step) for step in (0, 2, 4, 99)] == pytest.approx([0.2, 0.6, 1.0, 1.0])
    recipe = parse_recipe(tree(rollout={"student_fraction": ramp.model_dump()}))
    assert recipe.rollout.student_fraction_at(2) == pytest.approx(0.6)
    assert (
        parse_recipe(tree(rollout={"student_fraction": 0.3})).rollout.student_fraction_at(9) == 0.3
    )


def test_only_some_losses_need_the_student_before_training() -> None:
    assert not parse_recipe(tree()).needs_reference
    assert parse_recipe(tree(**loss(extrapolate=1.2))).needs_reference
    prefers = tree(teacher=None, losses=[PREFER], rollout={"student_fraction": 0})
    assert parse_recipe(prefers).needs_reference


def test_losses_are_logged_by_name_or_kind() -> None:
    losses = [DIVERGENCE | {"name": "pull"}, GAP]
    assert parse_recipe(tree(losses=losses)).loss_names() == ("pull", "policy_gradient")


def test_single_teachers_of_a_recipe() -> None:
    frozen = SelfTeacherConfig(kind="self")
    routes = {"kind": "routes", "routes": {"a": {"kind": "self"}, "b": {"kind": "self"}}}
    assert parse_recipe(tree()).model_teachers == (frozen,)
    assert parse_recipe(tree(teacher=routes)).model_teachers == (frozen, frozen)
    assert parse_recipe(tree(teacher=None, losses=[REWARD])).model_teachers == ()


# ── schema ───────────────────────────────────────────────────────────────────────────────────────


def nodes(tree: Any) -> list[dict[str, Any]]:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    inner_nodes = [node for item in inner for node in nodes(item)]
    return [tree, *inner_nodes] if isinstance(tree, dict) else inner_nodes


def test_the_json_schema_is_whole_and_knows_every_key() -> None:
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    references = [node["$ref"] for node in nodes(schema) if isinstance(node.get("$ref"), str)]
    assert references
    assert all(ref.removeprefix("#/$defs/") in definitions for ref in references)
    simple = {"string", "integer", "number", "boolean", "array", "object", "null"}
    types = [node["type"] for node in nodes(schema) if isinstance(node.get("type"), str)]
    assert set(types) <= simple
    assert schema["properties"].keys() == Recipe.model_fields.keys()
    assert schema["required"] == ["student", "tasks", "losses"]
    assert schema["additionalProperties"] is False
    assert (
        "Per step." in definitions["TrainConfig"]["properties"]["prompts_per_step"]["description"]
    )
