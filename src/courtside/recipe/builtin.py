"""The built-in recipes: in the source tree's `recipes/`, and inside an installed package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from courtside.errors import RecipeError, UserError

RECIPE = "recipe.toml"
NEEDS = re.compile(r"^Needs:\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinRecipe:
    name: str
    file: Path
    about: str
    """The first line of its README."""
    needs: str | None
    """Its README's line `Needs: …`: hardware and time."""


def recipes_folder() -> Path:
    installed = Path(__file__).parents[1] / "_recipes"
    if installed.is_dir():
        return installed
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "recipes").is_dir():
        return checkout / "recipes"
    raise UserError(f"{installed}: the built-in recipes are missing. Install courtside again")


def builtin_recipe_files() -> dict[str, Path]:
    """By name, in alphabetical order."""
    return {file.parent.name: file for file in sorted(recipes_folder().glob(f"*/{RECIPE}"))}


def find_builtin_recipe(name: str) -> Path:
    files = builtin_recipe_files()
    if name not in files:
        close = get_close_matches(name, files, n=1)
        guess = f" Did you mean {close[0]}?" if close else ""
        raise RecipeError(f"{name}: no such built-in recipe.{guess} `courtside recipes` lists them")
    return files[name]


def list_builtin_recipes() -> list[BuiltinRecipe]:
    return [_describe(name, file) for name, file in builtin_recipe_files().items()]


def find_recipe(name: str) -> Path:
    """The file meant by a path, or by the name of a built-in recipe."""
    path = Path(name)
    is_name = path.suffix != ".toml" and [*path.parts] == [name]
    if path.is_file() or (is_name and name in builtin_recipe_files()):
        return path if path.is_file() else find_builtin_recipe(name)
    if path.is_dir():
        raise RecipeError(_explain_folder(path))
    if path.exists():
        raise RecipeError(f"{name}: is no regular file. Give a TOML file")
    if not is_name:
        raise RecipeError(f"{name}: no such file. `courtside recipes` lists the built-in recipes")
    return find_builtin_recipe(name)


def _explain_folder(path: Path) -> str:
    if (path / "pipeline.json").is_file():
        return (
            f"{path}: is the folder of a pipeline, and a recipe is needed here, or a run: one of "
            f"the folders in {path / 'stages'}"
        )
    if not (path / RECIPE).is_file():
        return (
            f"{path}: is a folder, and has no {RECIPE}. Give a TOML file, or the name of a "
            "built-in recipe (`courtside recipes` lists them)"
        )
    if (path / "environment.json").is_file():
        return (
            f"{path}: is a run folder, and a recipe is needed here, or a run with checkpoints. Its "
            f"recipe is {path / RECIPE}"
        )
    return f"{path}: is a folder. Give the recipe in it: {path / RECIPE}"


def find_adapter_folder(path: Path) -> Path:
    """The folder itself, or that of a built-in recipe, such as `targeted-hints/warm`."""
    builtin = recipes_folder() / path
    return builtin if not path.is_dir() and builtin.is_dir() else path


def find_data_path(path: Path) -> Path:
    """The file or folder itself, or that of a built-in recipe, such as `continual/facts`."""
    if path.is_absolute() or path.exists():
        return path
    try:
        builtin = recipes_folder() / path
    except UserError:
        return path
    return builtin if builtin.exists() else path


def recipe_name(file: Path) -> str:
    """`shared-rule` for `recipes/shared-rule/recipe.toml`, `mine` for `mine.toml`."""
    return file.resolve().parent.name if file.name == RECIPE else file.stem


def default_run_folder(file: Path) -> Path:
    return Path("runs") / recipe_name(file)


def _describe(name: str, file: Path) -> BuiltinRecipe:
    readme = file.with_name("README.md")
    if not readme.is_file():
        raise UserError(f"{readme}: missing. It must describe the built-in recipe")
    text = readme.read_text(encoding="utf-8").strip()
    needs = NEEDS.search(text)
    return BuiltinRecipe(
        name=name,
        file=file,
        about=text.split("\n")[0].lstrip("# ").strip(),
        needs=needs[1].strip() if needs else None,
    )
