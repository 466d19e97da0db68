"""`courtside recipes`."""

from __future__ import annotations


def recipes() -> None:
    """List the built-in recipes."""
    from courtside.cli.tables import print_table, text_table
    from courtside.recipe.builtin import list_builtin_recipes

    rows = [(recipe.name, recipe.about, recipe.needs or "–") for recipe in list_builtin_recipes()]
    print_table(text_table(("recipe", "what it does", "time and hardware"), rows))
