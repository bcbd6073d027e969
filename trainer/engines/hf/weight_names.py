"""Whether the parameters that transformers gives a model are the weights of its checkpoint, by name and shape.

vLLM reads checkpoints, so only weights that have their names there can be pushed to it. Reads headers, no weights.
"""

from pathlib import Path

import torch

from rl.checks import first_names
from rl.system.model_files import stored_shapes
from rl.types import Head
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.pytorch.hf_weights import VALUE_HEAD


def check_weight_names(model: Path, head: Head) -> None:
    """Raises ValueError if the engine cannot train the model, or if names or shapes differ, naming the weights."""
    policy = TransformersPolicy(model, head, torch.float32)
    policy.model.tie_weights()
    built = {name: tuple(parameter.shape) for name, parameter in policy.parameters_by_name().items()}
    stored = stored_shapes(model)
    left_out = {VALUE_HEAD, "lm_head.weight"}  # made where the files lack it; not of a critic, or a copy of another
    problems = [
        f"{what} {first_names(names)}"
        for what, names in (
            ("the checkpoint lacks", built.keys() - stored.keys() - {VALUE_HEAD}),
            ("transformers has no", stored.keys() - built.keys() - left_out),
            ("of another shape in the checkpoint:", {n for n in built.keys() & stored.keys() if built[n] != stored[n]}),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"{model}: parameters of transformers and weights of the checkpoint do not match, so they cannot be pushed "
            f"to vLLM; {'; '.join(problems)}. A checkpoint written by save_pretrained may match"
        )
