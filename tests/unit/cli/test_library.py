"""The built-in recipes are there, described, and valid."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from courtside.errors import RecipeError, UserError
from courtside.recipe import builtin
from courtside.recipe.builtin import (
    find_recipe,
    list_builtin_recipes,
    recipe_name,
    recipes_folder,
)
from courtside.recipe.load import load_recipe
from courtside.recipe.pipeline import is_pipeline, load_pipeline


def test_every_built_in_recipe_is_valid_and_says_what_it_does_and_needs() -> None:
    recipes = list_builtin_recipes()
    assert recipes
    for recipe in recipes:
        (load_pipeline if is_pipeline(recipe.file) else load_recipe)(recipe.file)
        assert recipe.about, recipe.name
        assert recipe.needs, f"{recipe.name}: its README needs a line `Needs: hardware, time`"
        assert find_recipe(recipe.name) == recipe.file


def test_a_checkout_uses_its_own_recipes() -> None:
    assert recipes_folder() == Path(__file__).resolve().parents[3] / "recipes"


def test_an_installed_package_carries_its_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "courtside"
    (package / "recipe").mkdir(parents=True)
    monkeypatch.setattr(builtin, "__file__", str(package / "recipe/builtin.py"))
    with pytest.raises(UserError, match="the built-in recipes are missing"):
        recipes_folder()
    (package / "_recipes").mkdir()
    assert recipes_folder() == package / "_recipes"


def test_a_file_comes_before_a_name_and_a_folder_is_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "builtin_recipe_files", lambda: {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").write_text("")
    assert find_recipe("sums") == Path("sums")
    (tmp_path / "folder").mkdir()
    for name in ("folder", str(tmp_path / "folder"), ".", "folder/"):
        with pytest.raises(RecipeError, match=r"is a folder, and has no recipe.toml. Give a TOML"):
            find_recipe(name)
    (tmp_path / "folder/recipe.toml").write_text("")
    with pytest.raises(RecipeError, match=r"is a folder\. Give the recipe in it: folder/recipe"):
        find_recipe("folder")
    (tmp_path / "folder/environment.json").write_text("{}")
    with pytest.raises(RecipeError, match="is a run folder, and a recipe is needed here"):
        find_recipe("folder")
    os.mkfifo("pipe")
    with pytest.raises(RecipeError, match="pipe: is no regular file"):
        find_recipe("pipe")


def test_a_recipe_is_called_by_its_folder_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_name(Path("recipes/shared-rule/recipe.toml")) == "shared-rule"
    assert recipe_name(Path("recipe.toml")) == tmp_path.name
    assert recipe_name(Path("some/mine.toml")) == "mine"
