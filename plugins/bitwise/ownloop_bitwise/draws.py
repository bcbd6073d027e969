"""Random numbers by a request's seed and a token's position, so that a completion can be continued by another request.

vLLM draws the numbers of a request one after the other. Then what a request draws depends on where it began, and a step
that checks drafts would have to take numbers back.
"""

import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata


def draw_by_position(runner: Any) -> None:
    """Has the sampler of a model runner draw so. Rows with one generator are of one request, in order."""
    sample = runner.sampler.sample

    def positioned(logits: Tensor, metadata: SamplingMetadata, *args: object, **options: object) -> Any:
        batch, depth = runner.input_batch, Counter[int]()
        owners = {id(generator): row for row, generator in batch.generators.items()}
        generators: dict[int, torch.Generator] = {}
        for row, generator in metadata.generators.items():
            owner = owners[id(generator)]
            seed = runner.requests[batch.req_ids[owner]].sampling_params.seed
            key = key_of(seed, int(batch.num_tokens_no_spec[owner]) + depth[owner])
            generators[row] = torch.Generator().manual_seed(key)
            depth[owner] += 1
        return sample(logits, replace(metadata, generators=generators), *args, **options)

    runner.sampler.sample = positioned


def key_of(seed: int, position: int) -> int:
    """A seed of 64 bits for the token that is sampled after so many tokens."""
    text = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
