"""`courtside recipes`."""

from __future__ import annotations


def recipes() -> None:
    """List the built-in recipes."""
    from courtside.cli.tables import print_table, text_table
    from courtside.recipe.builtin import built_in_recipes

    rows = [(recipe.name, recipe.about, recipe.needs or "–") for recipe in built_in_recipes()]
    print_table(text_table(("recipe", "what it does", "time and hardware"), rows))
