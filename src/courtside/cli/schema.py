"""`courtside schema`."""

from __future__ import annotations


def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    from courtside.cli.tables import print_json
    from courtside.recipe import Recipe

    print_json(Recipe.model_json_schema())
