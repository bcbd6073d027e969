"""Whether an engine computes what transformers does, and keeps the names of the weights on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl.losses import get_loss
from rl.system.model_files import stored_shapes
from rl.tiny_models import random_batch
from rl.types import AdamParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy, importance_sampling, published


def assert_as_transformers(
    model: Path, engine_name: str, *, bound: float = 1e-5, unbounded: tuple[str, ...] = ()
) -> None:
    """Log-probs and gradients are those of transformers in float32; weights have its names, before and after a step.

    `bound` is on relative errors of gradients, save of parameters whose names end in `unbounded`: 1e-4 for these.
    """
    batch = random_batch((1, 17, 5, 40, 9, 23, 33, 12, 7))
    engine = load_engine(TrainerConfig(model=model, engine=engine_name, compute_dtype="float32"))
    output = engine.forward_backward([batch[:8], batch[8:]], get_loss("importance_sampling"))
    reference = ReferencePolicy(model)
    reference.model.eval()
    for logprobs, datum in zip(output.logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(reference.logprobs(datum).detach().numpy()[scored], abs=2e-5)
    reference.backward(batch, importance_sampling)
    expected = reference.gradients()
    parameters = dict(engine.hf_parameters())
    actual = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    assert actual.keys() == expected.keys()
    errors = {n: relative_error(actual[n], expected[n]) for n in expected}
    assert {n: e for n, e in errors.items() if e > bound and not n.endswith(unbounded)} == {}
    assert max(errors.values()) < 1e-4
    assert {n: tuple(p.shape) for n, p in parameters.items()} == stored_shapes(model)
    stored = load_file(model / "model.safetensors")
    pushed = published(0, parameters.items())
    assert [n for n, p in parameters.items() if not torch.equal(p, stored[n]) or not torch.equal(pushed[n], p)] == []
    engine.optim_step(AdamParams(learning_rate=1e-2))
    assert {n for n, p in engine.hf_parameters() if not torch.equal(p, stored[n])} == expected.keys()
