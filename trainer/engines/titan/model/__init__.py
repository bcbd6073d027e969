"""Every module that imports torchtitan.

torchtitan fixes its device when it is first imported, so the patch for machines without an accelerator has to be
applied here, before any submodule imports torchtitan.
"""

from trainer.engines.titan._compat import prepare_torchtitan

prepare_torchtitan()
