"""A recipe of published shapes, and lengths, that tests plan."""

from __future__ import annotations

from typing import Any

from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe

PROMPTS = {"prompt_tokens": 128.0}


def make_recipe(**sections: Any) -> Recipe:
    tree: dict[str, Any] = {
        "student": {"model": "Qwen/Qwen3-8B-Base"},
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 512},
        "teacher": {"kind": "model", "model": "Qwen/Qwen3-32B"},
        "losses": [{"kind": "divergence"}],
        "train": {"steps": 100, "prompts_per_step": 64},
    }
    return parse_recipe({**tree, **sections})
