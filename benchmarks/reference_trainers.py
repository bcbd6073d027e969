"""References for a trainer: the loops that one writes around a transformers model, padded and packed.

Both keep float32 parameters, compute in a given dtype by autocast, score only the tokens that the loss needs, and step
with AdamW. The packed one attends within documents by a block mask, which transformers supports on every device.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.types import Datum

_MICROBATCH = 4  # sequences of a padded micro-batch


class ReferenceTrainer:
    """A transformers model, its optimizer, and a policy-gradient step over a batch."""

    def __init__(self, model: Path, dtype: str, *, packed: bool, max_tokens: int) -> None:
        """`dtype` is "bfloat16" or "float32"; `max_tokens` bounds a packed row."""
        self._autocast = dtype == "bfloat16"
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
        self._packed = packed
        self._max_tokens = max_tokens

    def step(self, batch: Sequence[Datum]) -> float:
        """Forward, backward and optimizer step; returns the loss summed over the batch."""
        total = 0.0
        for rows in self._packed_rows(batch) if self._packed else self._padded_rows(batch):
            loss = self._loss(*rows)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, inputs: dict[str, Tensor], datums: Sequence[Datum], where: Tensor) -> Tensor:
        """The importance-sampling loss; `where` are the flat positions of the datums' tokens in the row."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._autocast):
            hidden = self._model.model(**inputs, use_cache=False).last_hidden_state
            weights = torch.from_numpy(np.concatenate([d.weights for d in datums]))
            scored = weights.nonzero()[:, 0]
            logits = self._model.lm_head(hidden.flatten(0, 1)[where[scored]])
        arrays = {
            name: torch.from_numpy(np.concatenate([d.loss_inputs[name] for d in datums]))[scored]
            for name in ("target_tokens", "logprobs", "advantages")
        }
        logprobs = torch.log_softmax(logits.float(), -1).gather(1, arrays["target_tokens"][:, None])[:, 0]
        return -((logprobs - arrays["logprobs"]).exp() * arrays["advantages"]).sum()

    def _padded_rows(self, batch: Sequence[Datum]) -> Iterator[tuple[dict[str, Tensor], Sequence[Datum], Tensor]]:
        """Micro-batches in the order of the batch, each padded to its longest sequence."""
        for start in range(0, len(batch), _MICROBATCH):
            datums = batch[start : start + _MICROBATCH]
            longest = max(len(d.tokens) for d in datums)
            tokens = torch.zeros(len(datums), longest, dtype=torch.int64)
            mask = torch.zeros(len(datums), longest, dtype=torch.int64)
            for row, datum in enumerate(datums):
                tokens[row, : len(datum.tokens)] = torch.from_numpy(datum.tokens)
                mask[row, : len(datum.tokens)] = 1
            yield {"input_ids": tokens, "attention_mask": mask}, datums, mask.flatten().nonzero()[:, 0]

    def _packed_rows(self, batch: Sequence[Datum]) -> Iterator[tuple[dict[str, Tensor], Sequence[Datum], Tensor]]:
        """Rows of whole sequences end to end, of at most `max_tokens` tokens."""
        rows: list[list[Datum]] = [[]]
        for datum in batch:
            if rows[-1] and sum(len(d.tokens) for d in rows[-1]) + len(datum.tokens) > self._max_tokens:
                rows.append([])
            rows[-1].append(datum)
        for datums in rows:
            lengths = torch.tensor([len(d.tokens) for d in datums])
            document = torch.repeat_interleave(torch.arange(len(datums)), lengths)
            mask = (document[:, None] == document[None, :]).tril()[None, None]
            inputs = {
                "input_ids": torch.from_numpy(np.concatenate([d.tokens for d in datums]))[None],
                "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None],
                "attention_mask": mask,
            }
            yield inputs, datums, torch.arange(len(document))
