"""Recipes: one module for each, with the hardware that it is for in its first line. Plug-ins add theirs."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
