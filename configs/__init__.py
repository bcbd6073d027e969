"""Recipes: one module each, whose docstring's first line says what hardware it is for."""
