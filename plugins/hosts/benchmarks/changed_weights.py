"""What share of SmolLM2's weights a small step changes in bfloat16, and what share of the bytes a push to hosts sends.

    python -m plugins.hosts.benchmarks.changed_weights [--quick | --smoke]

AdamW's steps at three learning rates, each from the same weights, along policy gradients of this repository's own pages
with advantages of either sign. After each step the weights are cast, and what a trainer rank sends to a host that has
the version before is made, message by message. Figures are of the last step: AdamW's first ones are the largest.

Bar: at a learning rate of 1e-6 a push sends at most a tenth of the bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import REPOSITORY, Bar, benchmark_model, parser, print_result
from ownloop_hosts.weights.changes import changes_of
from ownloop_hosts.weights.links import PART_BYTES, bytes_of
from rl.types import AdamParams, Datum

RATES = (1e-6, 3e-6, 1e-5)
Weights = Mapping[str, torch.Tensor]


def main() -> None:
    """Runs the benchmark and prints its result."""
    options = parser(__doc__, quick="one learning rate").parse_args()
    steps, length = (2, 16) if options.smoke else (5, 256)
    figures: dict[str, float] = {}
    with benchmark_model(smoke=options.smoke) as model:
        for rate in RATES[:1] if options.quick or options.smoke else RATES:
            changed, sent = shares(model, rate, steps, length)
            print(f"learning rate {rate:g}: {changed:.2%} of the elements change, {sent:.2%} of the bytes are sent")
            figures |= {f"changed_{rate:g}": changed, f"sent_{rate:g}": sent}
    print_result("changed_weights", [Bar(name="sent_1e-06", value=figures["sent_1e-06"], limit=0.1)], figures)


def shares(model: Path, rate: float, steps: int, length: int) -> tuple[float, float]:
    """The share of elements that the last of some steps changes, and of bytes that are sent."""
    from rl.losses import get_loss
    from trainer.config import TrainerConfig
    from trainer.engines import load_engine

    engine = load_engine(TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=2 * length))
    loss, before, after = get_loss("importance_sampling"), dict[str, torch.Tensor](), _cast(engine)
    for step in range(steps):
        batch = datums(model, step, length)
        scored = engine.forward([batch]).logprobs
        batch = [
            Datum(tokens=each.tokens, loss_inputs={**each.loss_inputs, "logprobs": logprobs})
            for each, logprobs in zip(batch, scored, strict=True)
        ]
        engine.forward_backward([batch], loss)
        engine.optim_step(AdamParams(learning_rate=rate), 1 / (2 * length))
        before, after = after, _cast(engine)
    return compared(before, after)


def datums(model: Path, step: int, length: int) -> list[Datum]:
    """Two pieces of text, one to be made likelier and one less likely."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    text = "".join(page.read_text() for page in sorted((REPOSITORY / "docs").glob("[a-h]*.md")))
    tokens = np.array(tokenizer.encode(text)[step * 2 * length :][: 2 * length + 1], dtype=np.int64)
    made: list[Datum] = []
    for index, advantage in enumerate((1.0, -0.5)):
        piece = tokens[index * length : (index + 1) * length + 1]
        inputs = {"target_tokens": piece[1:], "advantages": np.full(length, advantage, np.float32)}
        made.append(Datum(tokens=piece[:-1], loss_inputs=inputs))
    return made


def compared(before: Weights, after: Weights) -> tuple[float, float]:
    """The share of elements that differ, and of bytes that a link brings to a host that has `before`."""
    changed = sent = total = 0
    for name, each in after.items():
        for new, old in zip(*(bytes_of(tensor).split(PART_BYTES) for tensor in (each, before[name])), strict=True):
            changes = changes_of(new, old)
            changed += 2 * int((new.view(torch.int16) != old.view(torch.int16)).sum())
            sent += len(new) if changes is None else len(changes)
            total += len(new)
    return changed / total, sent / total


def _cast(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in engine.hf_parameters()}


if __name__ == "__main__":
    main()
