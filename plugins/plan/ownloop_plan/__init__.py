"""`ownloop plan`: whether a run fits its GPUs and how long a step takes, computed before anything is launched.

    recipe, GPU -> sizes.py: parameters of a rank -> memory.py: bytes of trainer and generator
                                                  -> times.py: seconds of a step and of its phases
                                                  -> search.py: layouts on N GPUs, ranked

Everything is arithmetic on the model's config.json. No weights are read, and no process is started.
"""
