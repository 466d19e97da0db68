"""Servers that sample for the student or score for a teacher: what cannot work with them."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.losses import Loss
from courtside.recipe.recipe import Recipe
from courtside.recipe.server import RolloutServerConfig
from courtside.recipe.teacher import RoutedTeacherConfig

TEMPERATURES = (0.01, 2.0)
"""vLLM raises lower ones to the first without a word, and refuses higher ones."""
HEADS = ("lm_head", "embed_tokens", "embed_out", "wte")


def find_server_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.rollout.server is not None:
        yield from _rollout_problems(recipe, recipe.rollout.server)
    if recipe.server_teachers:
        yield from _teacher_problems(recipe)


def _rollout_problems(recipe: Recipe, server: RolloutServerConfig) -> Iterator[str]:
    lora = recipe.student.lora
    if (
        lora is not None
        and lora.target_modules != "all-linear"
        and (heads := set(HEADS) & set(lora.target_modules))
    ):
        yield (
            f"student.lora.target_modules names {min(heads)!r}, and vLLM leaves an adapter there "
            "out of its log-probs. Remove it, or remove rollout.server"
        )
    if server.weight_transfer == "nccl" and lora is not None:
        yield (
            "rollout.server.weight_transfer = 'nccl': with student.lora an adapter travels, as "
            "files. Remove one of the two"
        )
    if server.weight_transfer == "nccl" and server.sync_folder is not None:
        yield "rollout.server.sync_folder: nothing is written to it with weight_transfer = 'nccl'"
    if server.lacks_sync_folder and not server.is_local:
        yield (
            "rollout.server.sync_folder: the servers run on other machines. Name a folder on a "
            "disk that they have under the same path"
        )
    low, high = TEMPERATURES
    for field, t in (
        ("rollout.temperature", recipe.rollout.temperature),
        ("evaluate.temperature", recipe.evaluate.temperature),
    ):
        if t != 0 and not low <= t <= high:
            yield f"{field} = {t:g}: with rollout.server from {low:g} to {high:g}, as vLLM takes"
    if recipe.rollout.mixed_sampling is not None:
        yield (
            "rollout.mixed_sampling decodes token by token with two models in one process; remove "
            "it, or rollout.server"
        )
    if server.max_staleness:
        yield from _staleness_problems(recipe)
    if recipe.tasks.is_recorded and not recipe.evaluate.suites:
        yield (
            f"rollout.server: nothing is sampled with tasks.kind = {recipe.tasks.kind!r}; remove it"
        )


def _staleness_problems(recipe: Recipe) -> Iterator[str]:
    field = f"rollout.server.max_staleness = {recipe.max_staleness}"
    if recipe.tasks.is_recorded:
        yield f"{field}: nothing is sampled with tasks.kind = {recipe.tasks.kind!r}; remove it"
    if recipe.rollout.student_fraction != 1.0:
        yield (
            f"{field} samples whole batches ahead, and rollout.student_fraction gives a part of "
            "each to another source. Remove one of the two"
        )
    for index, loss in enumerate(recipe.losses):
        if loss.kind != "policy_gradient":
            continue
        if loss.ratio == "none":
            yield (
                f"losses[{index}].ratio = 'none' takes samples as the current student's, and with "
                f"{field} they are of older weights. Use ratio = 'importance'"
            )
        elif not loss.bounds_ratio:
            yield (
                f"losses[{index}]: with {field} samples are of older weights, and without a bound "
                "one token's importance ratio may outweigh a batch. Set truncate = 2.0, ratio_gate "
                "= [0.5, 5.0] or clip = [0.2, 0.2]"
            )


def _teacher_problems(recipe: Recipe) -> Iterator[str]:
    fields = ["teacher"]
    if isinstance(recipe.teacher, RoutedTeacherConfig):
        routes = recipe.teacher.routes.items()
        fields = [f"teacher.routes.{tag}" for tag, t in routes if t.kind == "server"]
    kind = f"{fields[0]}.kind = 'server'"
    for field, t in (
        ("rollout.temperature", recipe.rollout.temperature),
        # Answers of an evaluation are scored, too, but greedy ones and those of hinted recipes.
        ("evaluate.temperature", recipe.evaluate.temperature or 1.0),
    ):
        if t != 1 and (field == "rollout.temperature" or recipe.reader is None):
            yield (
                f"{field} = {t:g} with {kind}: vLLM gives log-probs of a sequence at temperature 1 "
                "only, whatever a request or --logprobs-mode says, and from the k likeliest no "
                f"other temperature can be computed. Set {field} = 1, or use teacher.kind = 'model'"
            )
    for index, loss in enumerate(recipe.losses):
        need = find_whole_distribution(loss, can_name_ids=recipe.reader is None)
        if need is not None:
            yield (
                f"losses[{index}].{need} needs the teacher's whole distributions, and with {kind} "
                "there are the k likeliest tokens a position. Use support = { kind = 'top_k', of = "
                "'teacher' } without a baseline, or teacher.kind = 'model'"
            )
    if recipe.rollout.mixed_sampling is not None:
        yield (
            f"rollout.mixed_sampling decodes token by token with two models in one process, and "
            f"not with {kind}. Use teacher.kind = 'model'"
        )
    if recipe.train.max_flops is not None and not all(
        teacher.num_parameters for teacher in recipe.server_teachers
    ):
        yield (
            f"train.max_flops: the FLOPs of {fields[0]} count as 0 without its num_parameters; "
            f"set {fields[0]}.num_parameters"
        )


def find_whole_distribution(loss: Loss, *, can_name_ids: bool = False) -> str | None:
    """The setting that needs more than the k likeliest tokens of the teacher. `can_name_ids`: it
    also tells how likely it finds other tokens."""
    if loss.kind == "policy_gradient":
        return "baseline = true" if loss.baseline else None
    if loss.kind != "divergence" or not loss.needs_teacher:
        return None
    if loss.support.kind != "top_k":
        return f"support.kind = {loss.support.kind!r}"
    if loss.support.of == "teacher" or can_name_ids:
        return None
    return f"support.of = {loss.support.of!r}"
