"""A stage of a Megatron-core model as a policy or critic: its forward pass ends in log-probs or in values."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.types import Head
from trainer.engines.decoder_config import DecoderConfig
from trainer.engines.mcore import core_api
from trainer.engines.mcore.token_shards import gather_tokens, split_tokens
from trainer.engines.pytorch.hf_directory import inverse_frequencies
from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values


class Stage(nn.Module):
    """The whole model, or the layers of one pipeline stage. Legend: L tokens of a row, D model dimension."""

    def __init__(
        self, model: Any, decoder: DecoderConfig, head: Head, tensor_group: dist.ProcessGroup, *, splits_tokens: bool
    ) -> None:
        """`model` is a GPTModel, on the meta device. A value head replaces its output projection.

        With `splits_tokens` a tensor-parallel rank holds a shard of the hidden states; see `token_shards`.
        """
        super().__init__()
        if head == "value" and model.post_process:
            model.output_layer = nn.Linear(decoder.dim, 1, bias=False, device="meta", dtype=model.config.params_dtype)
        self.model = model
        self._head = head
        self._config = decoder
        self._group = tensor_group
        self._is_sharded = dist.get_world_size(tensor_group) > 1
        self._splits_tokens = splits_tokens
        self._frequencies: Tensor | None = None

    def forward(
        self, tokens: Tensor, positions: Tensor, plan: Any, *, scored: Tensor, targets: Tensor, entropy: bool
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Scores the positions `scored` [S] of one packed row: tokens and positions [1, L], targets [S].

        Returns log-probs [S] float32 and entropies [S] float32 if asked for. Only scored positions go through the
        output projection. A value head returns values [S] float32 and None. In a pipeline, every stage but the first
        takes hidden states [1, L, D] instead of tokens, and every stage but the last returns them; only a shard of L of
        them where the tokens are split.
        """
        embedded: Tensor | None = None
        if self.model.pre_process:
            whole: Tensor = self.model.embedding(input_ids=tokens, position_ids=None)
            embedded = split_tokens(whole, self._group) if self._splits_tokens else whole
        else:
            self.model.set_input_tensor(tokens.transpose(0, 1))
        hidden: Tensor = self.model.decoder(
            hidden_states=embedded, attention_mask=plan, rotary_pos_emb=self._angles(positions)
        )
        if not self.model.post_process:
            return hidden.transpose(0, 1)
        hidden = hidden.squeeze(1)
        # A rank's gradient of the hidden states is that of its part of the vocabulary, but a value head is not sharded.
        if self._splits_tokens:
            hidden = gather_tokens(hidden, self._group, sums_gradients=self._head == "lm")
        hidden = hidden.index_select(0, scored)
        if self._head == "value":
            return values(hidden, self.model.output_layer.weight), None
        if self._is_sharded and not self._splits_tokens:
            hidden = core_api.copy_to_tensor_parallel_ranks(hidden, self._group)
        weight: Any = (
            self.model.shared_embedding_or_output_weight()
            if self._config.tie_embeddings
            else self.model.output_layer.weight
        )
        return logprobs_and_entropy(
            hidden, weight, targets, entropy=entropy, group=self._group if self._is_sharded else None
        )

    def _angles(self, positions: Tensor) -> Tensor:
        """[1, L] positions -> [L, 1, 1, head_dim] angles, the form in which Megatron-core takes them."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self._config).to(positions.device)
        angles = torch.outer(positions[0].float(), self._frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None]
