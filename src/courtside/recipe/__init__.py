"""The recipe: one frozen tree of sections, without torch and files; `load` reads TOML into it.

Unknown keys, wrong types and combinations that cannot work are refused with the field, the reason
and the fix. Checks that need tasks or models (a privileged field that no task has) are in
`assemble`.
"""

from courtside.recipe.recipe import Recipe

__all__ = ["Recipe"]
