"""Memory of a step on the first of several pretended GPUs: nothing is computed, and torch's own allocator counts.

    python -m tests.gpu_pretended.memory MODEL_DIRECTORY TOKENS [FIELD=VALUE ...]

It is run in the mode `memory` (`pretended.py`). The model directory needs no weights: config.json is enough. Prints one
JSON object: bytes allocated once the engine is built, at the peak of a call in the first and in the second step, of a
call that adds to a gradient, and reserved.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(model: str, tokens: str, *fields: str) -> None:
    """Forward and backward passes over one row, with a step of the optimizer after each of the first two."""
    import torch

    import trainer.engines.titan.model.build as build
    from rl.losses import get_loss
    from rl.types import AdamParams, Datum
    from trainer.config import TrainerConfig
    from trainer.engines.titan.engine import TitanEngine

    options: dict[str, Any] = {}
    for field in fields:
        name, _, value = field.partition("=")
        options[name] = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
    build.load_weights = lambda *_: None  # there are none
    config = TrainerConfig(
        model=Path(model), compute_dtype="bfloat16", max_tokens_per_microbatch=int(tokens), **options
    )
    engine = TitanEngine(config)
    found = {"built": torch.cuda.memory_allocated()}
    length = int(tokens) // 4
    random = np.random.default_rng(0)
    batch = [
        Datum(
            tokens=(row := random.integers(1000, size=length)),
            loss_inputs={"target_tokens": row, "weights": np.ones(length, dtype=np.float32)},
        )
        for _ in range(4)
    ]
    loss = get_loss("cross_entropy")
    for phase in ("first", "second"):
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward([batch], loss)
        found[phase] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.optim_step(AdamParams(learning_rate=1e-6), 1.0)
        found[f"{phase}_step"] = torch.cuda.max_memory_allocated()
    engine.forward_backward([batch], loss)
    torch.cuda.reset_peak_memory_stats()
    engine.forward_backward([batch], loss)
    found["accumulated"] = torch.cuda.max_memory_allocated()
    found["reserved"] = torch.cuda.max_memory_reserved()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
