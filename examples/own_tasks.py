"""Own tasks as a JSONL file, and the recipe as a plain tree, from Python.

The rule is in each task's privileged field: the teacher (the student before training) sees it, the
student does not. A grader is a name and its arguments; `regex` covers what the others do not.
"""

import argparse
import json
from pathlib import Path

import courtside

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()

ANIMALS = ("bee", "cat", "cow", "crab", "deer", "dog", "duck", "eel", "fox", "frog", "goat", "owl")
QUESTIONS = ("What does a {} eat?", "Where does a {} live?", "Tell me about the {}.")
tasks = [
    {
        "prompt": question.format(animal),
        "privileged": {"rule": "Answer always in exactly one sentence."},
        "grader": "instruction",
        "grader_args": {"check": "one_sentence"},
        "split": "test" if number % 3 == 0 else "train",
        "tags": ["animals"],
    }
    for number, animal in enumerate(ANIMALS)
    for question in QUESTIONS
]
file = Path("animals.jsonl")
file.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")

recipe = courtside.parse_recipe(
    {
        "student": {"model": options.model, "lora": {"rank": 16}},
        "tasks": {"kind": "jsonl", "path": file},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 64},
        "teacher": {
            "kind": "self",
            "context": {"kind": "field", "field": "rule", "position": "user"},
        },
        "losses": [{"kind": "divergence", "support": {"kind": "top_k", "k": 64}}],
        "train": {"steps": options.steps, "prompts_per_step": 8, "learning_rate": 5e-4},
        "evaluate": {"num_tasks": 12},
    }
)
run = courtside.train(recipe, "runs/own-tasks")
for row in run.metrics():
    print(f"step {row['step']}: KL {row['kl']:.3f}, passed {row['reward/pass_rate']:.0%}")
for e in run.evaluations():
    print(f"{e.policy} {e.step}: {e.mean_score:.1%} [{e.ci_low:.1%}, {e.ci_high:.1%}]")
