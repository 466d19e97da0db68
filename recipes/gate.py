"""Measure the gate of a recipe's hints: replies to the same turns with the hint, and without it.

    python recipes/gate.py recipes/switchboard/hint.toml --to gate.json [--with KEY=VALUE …]

The student of the recipe plays validation episodes. At *every* turn where a habit is wrong, whether
the student went wrong there or not, replies are sampled again, with the hint that the recipe's
rules would give and without; the environment tells which go well. Turns selected for having failed
would say nothing about "without". For tasks.kind = "switchboard", which knows its decisions
beforehand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from courtside.assemble import assemble
from courtside.assemble.inputs import load_inputs
from courtside.engines.base import SampleRequest
from courtside.environments.switchboard.environment import Switchboard
from courtside.environments.switchboard.episode import habitual_reply
from courtside.recipe.load import load_recipe
from courtside.recipe.tasks import SwitchboardTasks
from courtside.rollout.replies import reply_passes
from courtside.rollout.single_turn import make_sampling
from courtside.runtime import Runtime
from courtside.seeds import seed_for
from courtside.teacher.hint_scoring import HintScorer
from courtside.types import Event, Trajectory

WRONG = "/habit_wrong"


def mistaken_event(board: Switchboard, trajectory: Trajectory, turn: int) -> Event:
    """What the environment would report had this turn followed the habit."""
    episode = board.start(trajectory.task)
    for earlier in trajectory.turns[:turn]:
        if earlier.role == "assistant":
            episode.step(earlier.text)
    return episode.step(habitual_reply(episode.request)).events[0]


def as_if_mistaken(board: Switchboard, trajectory: Trajectory) -> Trajectory:
    """The trajectory with an event at every turn where the habit is wrong, and at no other."""
    turns = [
        replace(turn, events=(mistaken_event(board, trajectory, index),))
        if (turn.decision or "").endswith(WRONG)
        else replace(turn, events=())
        for index, turn in enumerate(trajectory.turns)
    ]
    return replace(trajectory, turns=tuple(turns))


def measure_gate(
    parts: Runtime, scorer: HintScorer, trajectories: Sequence[Trajectory], num_replies: int
) -> dict[str, dict[str, float]]:
    """By kind of fault: pass rates with and without, and the number of turns."""
    assert isinstance(parts.recipe.tasks, SwitchboardTasks)
    board = Switchboard(parts.recipe.tasks)
    marked = [as_if_mistaken(board, trajectory) for trajectory in trajectories]
    spliced = scorer.splice(marked, parts.reader(marked).hints)
    requests: list[SampleRequest] = []
    attempts: list[tuple[Trajectory, int, str]] = []
    for trajectory in marked:
        if trajectory.id not in spliced:
            continue
        for turn, (_, branch) in spliced[trajectory.id].branches.items():
            start = sum(len(t.token_ids) for t in trajectory.turns[:turn])
            hinted = branch.token_ids[: branch.scored.index(True)]
            prompts = {
                "without": trajectory.token_ids[:start],
                "with": trajectory.token_ids[: branch.splice] + hinted,
            }
            for name, ids in prompts.items():
                for n in range(num_replies):
                    # The same random numbers with and without.
                    seed = seed_for(parts.recipe.seed, "gate", trajectory.id, turn, n)
                    requests.append(SampleRequest(prompt_ids=ids, seed=seed))
                    attempts.append((trajectory, turn, name))
    samples = parts.engine.sample(requests, make_sampling(parts.recipe.rollout))
    passes: dict[str, dict[str, list[bool]]] = {}
    for (trajectory, turn, name), sample in zip(attempts, samples, strict=True):
        kind = (trajectory.turns[turn].decision or "").removesuffix(WRONG)
        passed = reply_passes(board.start, trajectory, turn, sample.text)
        passes.setdefault(kind, {"with": [], "without": []})[name].append(passed)
    return {
        kind: {
            **{name: sum(values) / len(values) for name, values in rates.items()},
            "turns": len(rates["with"]) // num_replies,
        }
        for kind, rates in sorted(passes.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="a JSON file")
    parser.add_argument("--episodes", type=int, default=64, help="a multiple of 16 is balanced")
    parser.add_argument("--replies", type=int, default=4, help="to each turn, with and without")
    parser.add_argument("--with", dest="overrides", nargs="*", default=[])
    options = parser.parse_args()
    recipe = load_recipe(
        options.recipe, [*options.overrides, f"evaluate.num_tasks={options.episodes}"]
    )
    parts = assemble(recipe)
    answers = parts.evaluator.evaluate("validation", step=0)
    template = load_inputs(recipe).incremental
    scorer = HintScorer(parts.engine, template, recipe.hints)
    rules = getattr(recipe.reader, "rules", ())
    result = {
        "hints": {rule.event: rule.hint for rule in rules},
        "episodes": options.episodes,
        "replies": options.replies,
        "overrides": options.overrides,
        "gate": measure_gate(parts, scorer, answers.trajectories, options.replies),
        "evaluation": dict(answers.evaluation.metrics),
    }
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["gate"], indent=1))


if __name__ == "__main__":
    main()
