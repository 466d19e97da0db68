"""What a run over several processes does not support, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.errors import RecipeError
from courtside.ranks import Ranks
from courtside.recipe import Recipe

BATCH_CONTROLS = ("random_hint", "other_kind", "mirror_turn")
"""Controls of a reader that exchange hints across the batch."""


def refuse_sharded(recipe: Recipe, ranks: Ranks) -> None:
    problems = list(find_sharding_problems(recipe, ranks.size))
    if problems:
        raise RecipeError("\n".join(problems))


def find_sharding_problems(recipe: Recipe, num_ranks: int) -> Iterator[str]:
    fix = "train with one process"
    if recipe.train.optimizer_offload:
        yield (
            "train.optimizer_offload: the optimizer state is sharded over the processes, and its "
            f"offload takes whole parameters. Set it to false, or {fix}"
        )
    if recipe.student.lora is not None and recipe.student.lora.base_dtype != "auto":
        yield (
            "student.lora.base_dtype = 'nf4': weights in 4 bits cannot be sharded here. Leave it "
            f"out, or {fix}"
        )
    for field, is_set in (
        ("student.router_replay = true", recipe.student.router_replay),
        ("student.router_aux_loss_coef", recipe.student.router_aux_loss_coef > 0),
    ):
        if is_set:
            yield f"{field} was not tried with shards of the routers. Leave it out, or {fix}"
    if num_ranks == 1:
        return
    if recipe.rollout.server is not None:
        yield (
            "rollout.server: the servers take new weights from one process, and here each has its "
            f"own sampler. Remove it: every process then samples its own part; or {fix}"
        )
    if recipe.rollout.mixed_sampling is not None:
        yield (
            "rollout.mixed_sampling: which prompts are mixed is decided over the whole batch, and "
            f"a process has only its own part. Remove it, or {fix}"
        )
    controls: dict[str, str | None] = {
        f"hints.contrast = {recipe.hints.contrast!r}": recipe.hints.contrast
    }
    if recipe.reader is not None:
        controls[f"reader.control = {recipe.reader.control!r}"] = recipe.reader.control
    for field, control in controls.items():
        if control in BATCH_CONTROLS:
            yield (
                f"{field}: hints change places across the whole batch, and a process has only "
                f"those of its own part. Use 'random_turn' or 'all_turns', or {fix}"
            )


def note_idle_ranks(recipe: Recipe, ranks: Ranks) -> str | None:
    """Trajectories of one prompt stay on one process."""
    num_prompts = recipe.train.prompts_per_step
    if num_prompts >= ranks.size:
        return None
    return (
        f"train.prompts_per_step = {num_prompts}: samples of a prompt stay together, so "
        f"{ranks.size - num_prompts} of {ranks.size} processes have nothing to sample or train on"
    )
