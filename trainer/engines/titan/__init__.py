"""The default engine: torchtitan's own model specs and parallelisms.

torchtitan fixes its device when it is first imported, so the patch for machines without an accelerator has to be
applied here, before any submodule imports it.
"""

from trainer.engines._compat import prepare_torchtitan

prepare_torchtitan()
