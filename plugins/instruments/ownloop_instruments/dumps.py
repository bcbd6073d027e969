"""Batches that TRL, verl and prime-rl dump, as data of ours, and their loss on them. No file runs code when it is read.

    TRL       torch.save of the inputs of `GRPOTrainer._compute_loss`: a dictionary of tensors
    verl      `DataProto.save_to_disk` with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy: a pickle
    prime-rl  `rollouts/step_N/rollouts.bin`: a `TrainingBatch` in msgpack

Legend: B sequences, T tokens of one, P and C tokens of padded prompts and completions, S scored tokens of all.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl.types import Datum

Array = NDArray[Any]
TheirLoss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(policy's log-probs [S], the sampler's [S], advantages [S], tokens counted) -> the loss."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A recorded batch of another framework."""

    framework: str
    data: tuple[Datum, ...]
    """Where the sampler's log-probs are not known, `logprobs` is NaN."""
    their_loss: TheirLoss
    """The framework's loss with its default options."""
    tokens_elsewhere: int = 0
    """Tokens that their denominator counts, of micro-batches that this file does not hold."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """`loss` and `grad_norm`, where the file has them."""
    logprobs: tuple[Array, ...] | None = None
    """[T] each: what their policy computed, NaN where it is not known."""


def read_dump(file: Path) -> Dump:
    """Reads a file by the end of its name: .pt, .pkl, or .bin. Raises ValueError for what is no such dump."""
    readers = {".pt": _read_trl, ".pkl": _read_verl, ".bin": _read_prime_rl}
    if not file.is_file():
        raise ValueError(f"there is no recorded batch {file}")
    try:
        return readers[file.suffix](file)
    except (LookupError, TypeError, AttributeError, pickle.UnpicklingError, msgspec.DecodeError) as error:
        kinds = "TRL's .pt, verl's .pkl or prime-rl's .bin"
        raise ValueError(f"{file} is no batch that can be read ({kinds}): {type(error).__name__}: {error}") from None


def _datum(
    prompt: Array, said: Array, scored: Array, logprobs: Array, advantages: Array, temperature: float = 1.0
) -> Datum:
    """A prompt [P] and arrays [C] of what was said after it, as a datum, whose arrays belong to what is predicted."""
    tokens = np.concatenate([prompt, said]).astype(np.int64)
    unscored = np.zeros(len(prompt))
    weights = np.concatenate([unscored, scored])[1:].astype(np.float32)
    inputs = {
        "target_tokens": tokens[1:],
        "weights": weights,
        "logprobs": np.concatenate([unscored + np.nan, logprobs])[1:].astype(np.float32),
        "advantages": np.where(weights != 0, np.concatenate([unscored, advantages])[1:], 0).astype(np.float32),
    }
    return Datum(tokens=tokens[:-1], loss_inputs=inputs, temperature=temperature)


def _data(prompts: Tensor, prompt_mask: Tensor, said: Tensor, said_mask: Tensor, *arrays: Tensor) -> tuple[Datum, ...]:
    """Padded prompts [B, P] and completions [B, C], masks of their tokens, and `_datum`'s arrays [B, C], as data."""
    rows = zip(prompts, prompt_mask.bool(), said, said_mask.bool(), *arrays, strict=True)
    return tuple(_datum(p[m].numpy(), *(each[k].float().numpy() for each in (s, *rest))) for p, m, s, k, *rest in rows)


def _read_trl(file: Path) -> Dump:
    saved: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    own = saved["completion_mask"]
    mask = own * saved.get("tool_mask", 1)
    scored = mask * saved.get("importance_sampling_ratio", 1)  # vLLM's, a factor of each token's term
    unknown, advantages = torch.full(own.shape, torch.nan), saved["advantages"]
    per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand(own.shape)
    tokens = (saved["prompt_ids"], saved["prompt_mask"], saved["completion_ids"], own)
    policy = _data(*tokens, scored, saved.get("per_token_logps", unknown), per_token)
    return Dump(
        framework="TRL",
        data=_data(*tokens, scored, saved.get("old_per_token_logps", unknown), per_token),
        their_loss=_trl_loss,
        tokens_elsewhere=max(0, int(saved["num_items_in_batch"]) - int(mask.sum())),
        numbers={name: float(saved[name]) for name in ("loss", "grad_norm") if name in saved},
        logprobs=tuple(datum.loss_inputs["logprobs"] for datum in policy),
    )


class _Inert:
    """Stands for an object of any class in a pickle: it keeps its state, and no code of the class runs."""

    def __new__(cls, *_args: object, **_named: object) -> "_Inert":
        """Takes the arguments of any class."""
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes arrays of NumPy and plain values. Everything else is inert."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        if (module_name, global_name) == ("torch", "Size"):
            return torch.Size
        is_array = global_name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer")
        return super().find_class(module_name, global_name) if module_name[:5] == "numpy" and is_array else _Inert


def _read_verl(file: Path) -> Dump:
    with file.open("rb") as stream:
        state: Any = _Unpickler(stream).load()
    batch, _, information = state.state
    if not isinstance(batch, tuple):
        raise ValueError(
            f"{file} cannot be read without running code; with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy in the "
            "environment, write it again: DataProto.load_from_disk(file).save_to_disk(new)"
        )
    tensors = {name: _verl_tensor(value) for name, value in batch[2].items()}
    attention, length = tensors["attention_mask"], tensors["responses"].shape[1]
    tokens = (tensors["input_ids"][:, :-length], attention[:, :-length], tensors["responses"], attention[:, -length:])
    recorded: Mapping[str, Any] = information.get("metrics", {})
    names = {"loss": "actor/pg_loss", "grad_norm": "actor/grad_norm"}
    return Dump(
        framework="verl",
        data=_data(*tokens, tensors["response_mask"], tensors["old_log_probs"], tensors["advantages"]),
        their_loss=_verl_loss,
        numbers={name: float(np.mean(recorded[theirs])) for name, theirs in names.items() if theirs in recorded},
    )


def _verl_tensor(encoded: tuple[str, Sequence[int], Any]) -> Tensor:
    """A tensor from (name of the dtype, shape, bytes)."""
    dtype, shape, content = encoded
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(getattr(torch, dtype)).view(*shape)


def _read_prime_rl(file: Path) -> Dump:
    examples, *rest = msgspec.msgpack.decode(file.read_bytes())
    # One temperature of the batch, or one of each token of an example.
    temperature = float(rest[0]) if rest and isinstance(rest[0], float) else 1.0
    return Dump(
        framework="prime-rl",
        data=tuple(_prime_rl_datum(each, temperature) for each in examples),
        their_loss=_prime_rl_loss,
    )


def _prime_rl_datum(example: Sequence[Any], temperature: float) -> Datum:
    """An example of any version: prompt and completion apart, or the tokens of all turns in a row."""
    if isinstance(example[2][0], int):  # prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs
        prompt, _, said, scored, logprobs, *rest = example
        temperatures = rest[0] if rest and isinstance(rest[0], list) else [temperature]
        advantages = next((each for each in rest if isinstance(each, float)), 0.0)
    else:
        (said, scored, logprobs, temperatures, _, parts), prompt = example[:6], []
        if others := {loss for loss, _, _ in parts} & {"ce", "sft", "ref_kl"}:
            raise ValueError(f"an example has the loss {others.pop()!r}; only prime-rl's policy loss can be computed")
        advantages = np.sum([np.where(mask, values, 0.0) for _, values, mask in parts], axis=0)
        temperatures = [t for t, is_scored in zip(temperatures, scored, strict=True) if is_scored]
    if len(different := set(temperatures)) != 1:
        raise ValueError(f"an example was sampled at the temperatures {sorted(different)}; a datum has one")
    tokens, answer, mask, old = (np.array(each) for each in (prompt, said, scored, logprobs))
    return _datum(tokens, answer, mask, old, np.broadcast_to(advantages, len(said)), float(different.pop()))


def _trl_loss(p: Tensor, old: Tensor, advantages: Tensor, num_tokens: int) -> Tensor:
    """`loss_type="dapo"` of TRL 1.16."""
    ratio = torch.exp(p - old)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / num_tokens


def _verl_loss(p: Tensor, old: Tensor, advantages: Tensor, num_tokens: int) -> Tensor:
    """`compute_policy_loss_vanilla` with `loss_agg_mode="token-mean"` and `clip_ratio_c=3`."""
    ratio = torch.exp((p - old).clamp(-20, 20))
    larger = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.minimum(-3 * advantages, larger), larger).sum() / num_tokens


def _prime_rl_loss(p: Tensor, old: Tensor, advantages: Tensor, num_tokens: int) -> Tensor:
    """`default_loss_fn`: DPPO with the total variation of each token, and a squared log-ratio."""
    change = p.exp() - old.exp()
    left_out = torch.where(advantages > 0, change > 0.2, change < -0.2)
    return (-(~left_out * advantages * torch.exp(p - old)) + 1e-3 * (p - old) ** 2).sum() / num_tokens
