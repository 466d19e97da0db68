"""The marks that models put around their thoughts."""

from __future__ import annotations

from typing import Any

THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def ends_thoughts(generation_prompt: str) -> bool:
    """Whether an answer begins after thoughts, which are empty: thinking is switched off."""
    return generation_prompt.rstrip().endswith(tuple(closing for _, closing in THOUGHT_TAGS))


def begins_with_thoughts(text: str) -> bool:
    return text.lstrip().startswith(tuple(opening for opening, _ in THOUGHT_TAGS))


def name_thoughts(tree: dict[str, Any]) -> dict[str, Any]:
    """A chat API's message with its thoughts under the other name, too, by which gpt-oss' template
    reads them."""
    thoughts = tree.get("reasoning_content")
    return {**tree, "thinking": thoughts} if thoughts else tree
