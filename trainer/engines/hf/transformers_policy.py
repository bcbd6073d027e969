"""Any causal language model of transformers as a policy or critic: its forward pass ends in log-probs or values.

The model is transformers' own, untouched. What is assumed of it (that its logits are its last hidden states times one
matrix, that packed documents do not see each other) is not looked up in a list of architectures but tried out once.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl.types import Head
from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values

T = TypeVar("T")
# Makes a soft cap on logits show.
_MAGNIFIED = 1000.0


class TransformersPolicy(nn.Module):
    """Holds the model. Whoever shards it wraps this module, so that all it computes is one forward pass of its root."""

    def __init__(self, path: Path, head: Head) -> None:
        """Builds the model of a directory in float32: parameters on the meta device, buffers on the CPU.

        A value head, named `score`, takes the place of the output projection.

        Raises ValueError when transformers has no causal language model for it.
        """
        super().__init__()
        self._has_values = head == "value"
        self._run: Callable[[Callable[[Any], Any]], Any] = self.__call__
        try:
            config = AutoConfig.from_pretrained(path)
            for name, value in config.to_dict().items():
                if isinstance(value, float) and "drop" in name:
                    setattr(config, name, 0.0)  # log-probs must not depend on chance
            if self._has_values:
                config.tie_word_embeddings = False
            with accelerate.init_empty_weights(include_buffers=False):
                self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"transformers cannot build a causal language model from {path}: {error}") from error
        self._name = type(self.model).__name__
        if "position_ids" not in inspect.signature(self.model.base_model.forward).parameters:
            raise ValueError(f"{self._name} takes no positions, so documents cannot be packed")
        projection = self.model.get_output_embeddings()
        if not isinstance(projection, nn.Linear) or "bias" in dict(projection.named_parameters()):
            raise ValueError(f"{self._name} ends in {projection}; a linear projection without a bias is needed")
        if self._has_values:
            parent, _, name = next(n for n, module in self.model.named_modules() if module is projection).rpartition(
                "."
            )
            delattr(self.model.get_submodule(parent), name)
            self.model.score = nn.Linear(projection.in_features, 1, bias=False, device="meta")

    def forward(self, compute: Callable[[Any], T]) -> T:
        """Runs a function of the model, all that is sharded gathered as in any forward pass."""
        return compute(self.model)

    def run_by(self, wrapper: nn.Module) -> None:
        """Computes through a module that wraps this one from now on."""
        self._run = wrapper.__call__

    def layers(self) -> list[nn.Module]:
        """The model's repeated blocks, in which sharding is done."""
        names: set[str] = self.model._no_split_modules or set()
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def materialize(self, device: torch.device) -> None:
        """Gives parameters memory, uninitialized, and moves buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        self.to_empty(device=device)
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])
        self.model.tie_weights()

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its Hugging Face name; a tied output projection is the input embedding."""
        return dict(self.model.named_parameters())

    def score(
        self, tokens: Tensor, positions: Tensor, scored: Tensor, targets: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Scores the positions `scored` [S] of one packed row: tokens and positions [1, L], targets [S].

        Returns log-probs [S] float32 and entropies [S] float32 if asked for. Only scored positions go through the
        output projection; a value head scores them with values [S] float32 and None. Positions begin at 0 in every
        document, which is how transformers tells documents apart.
        """

        def compute(model: Any) -> tuple[Tensor, Tensor | None]:
            hidden = _hidden(model, tokens, positions)[0].index_select(0, scored)
            if self._has_values:
                return values(hidden, model.score.weight), None
            return logprobs_and_entropy(hidden, model.get_output_embeddings().weight, targets, entropy=entropy)

        return self._run(compute)

    @torch.no_grad()
    def check(self, device: torch.device) -> None:
        """Tries the assumptions out on a few tokens. Raises ValueError when one does not hold for this model."""
        tokens = torch.arange(1, 9, device=device)[None]
        alone = torch.arange(4, device=device)[None]

        def compute(model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            packed = _hidden(model, tokens, torch.cat([alone, alone], dim=1))[:, 4:]
            single = _hidden(model, tokens[:, 4:], alone)
            if self._has_values:  # no logits whose computation could differ
                return packed, single, single, single
            head = model.get_output_embeddings()
            with head.register_forward_hook(lambda *args: _MAGNIFIED * args[-1]):
                logits = model(input_ids=tokens[:, 4:], position_ids=alone, use_cache=False).logits
            return packed, single, logits, _MAGNIFIED * (single @ head.weight.T)

        packed, single, logits, product = (x.float() for x in self._run(compute))
        if (packed - single).norm() > 0.1 * single.norm():
            raise ValueError(f"documents of one row of {self._name} attend to each other, so they cannot be packed")
        if (logits - product).norm() > 0.01 * logits.norm():
            raise ValueError(
                f"{self._name} scales or caps its logits after the output projection, which is not computed here"
            )


def _hidden(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """[1, L, D] last hidden states."""
    return model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
