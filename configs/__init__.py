"""Recipes, one module each. The first line of a recipe's docstring says which hardware it is for."""
