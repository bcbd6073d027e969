"""docs/recipes.md has a row for every recipe."""

from tests.docs.pages import ROOT, names_in_tables


def test_every_recipe_has_a_row() -> None:
    recipes = {path.stem for folder in ("", "plugins/*/") for path in ROOT.glob(f"{folder}configs/*.py")}
    assert names_in_tables(ROOT / "docs" / "recipes.md") == recipes
