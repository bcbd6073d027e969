"""Random numbers by a request's seed and a token's position, so that a completion can be continued by another request.

vLLM draws the numbers of a request one after the other. Then what a request draws depends on where it began.
"""

import hashlib
from typing import Any

from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata


def draw_by_position(runner: Any) -> None:
    """Has the sampler of a model runner draw so."""
    sampler = runner.sampler
    forward = sampler.forward

    def positioned(logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any) -> SamplerOutput:
        batch = runner.input_batch
        for row, generator in sampling_metadata.generators.items():
            seed = runner.requests[batch.req_ids[row]].sampling_params.seed
            generator.manual_seed(key_of(seed, int(batch.num_tokens_no_spec[row])))
        return forward(logits, sampling_metadata, *args, **options)

    sampler.forward = positioned


def key_of(seed: int, position: int) -> int:
    """A seed of 64 bits for the token that is sampled after so many tokens."""
    text = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
