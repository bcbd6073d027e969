"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): what an adapter is, and what its tensors are called.

An adapter of rank r adds `alpha / r * B A x` to the output of a projection W x of the model, with A [r, in] and
B [out, r]. B starts at zero, so a new adapter changes nothing. Names, scale and initialisation are as in Hugging
Face's PEFT, which vLLM reads as well. The base model stays frozen.

This module imports no torch, because configurations are checked before any process starts.
"""

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import PositiveInt

from rl.configuration import Positive, Rare, Seed, configuration

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
FURTHER_ATTENTION_MODULES = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)
"""The same of latent attention (MLA), whose `kv_b_proj` generators absorb, and of gated delta rules."""
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
UNEMBED_MODULES = ("lm_head",)
"""The last parts of the names of the projections that can be adapted, in Hugging Face's names."""
VISION_TOWERS = ("visual", "vision_tower")
"""Parts of the names of what reads images. All its linear layers are adapted, if `TrainerConfig.train_vision`."""

PEFT_PREFIX = "base_model.model."

LivePolicy = str | None
"""The newest weights of a policy: an adapter's name, or None for the model itself."""
Policy = LivePolicy | tuple[LivePolicy, int]
"""What a generator samples from: a live policy, or one of its versions that was frozen."""


@configuration
class LoRAConfig:
    """An adapter to train over the frozen model. On the command line, any of its options switches it on."""

    rank: PositiveInt = 32
    """Size of the inner dimension. Higher ranks can learn more, and cost time and memory in proportion."""
    alpha: Positive = 32.0
    """The adapter's output is multiplied by `alpha / rank`."""
    train_attn: bool = True
    """Whether the projections of attention (q, k, v, o, or what a family has in their place) are adapted."""
    train_mlp: bool = True
    """Whether the projections of the feed-forward network (gate, up, down) are adapted. Experts are not."""
    train_unembed: Rare[bool] = True
    """Whether the output projection is adapted. Where it is tied to the input embedding, only the output changes."""
    seed: Rare[Seed] = 0
    """Seed of the initial A."""

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        return self.alpha / self.rank

    @property
    def module_names(self) -> tuple[str, ...]:
        """The last parts of the names of the projections that this adapter adapts."""
        attention = (*ATTENTION_MODULES, *FURTHER_ATTENTION_MODULES) if self.train_attn else ()
        mlp = MLP_MODULES if self.train_mlp else ()
        return attention + mlp + (UNEMBED_MODULES if self.train_unembed else ())

    def adapts(self, module: str) -> bool:
        """Whether this adapter adapts a module, given its Hugging Face name ("model.layers.0.self_attn.q_proj")."""
        of_vision = not set(VISION_TOWERS).isdisjoint(module.split("."))
        return of_vision or module.rpartition(".")[2] in self.module_names


def check_adapter_name(name: str) -> None:
    """Raises ValueError unless an adapter may have this name."""
    if not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,64}", name):  # it becomes a folder's name
        accepted = "1 to 64 letters, digits, dots, underscores or hyphens, without a dot at its beginning"
        raise ValueError(f"adapter's name is {name!r}; it must be {accepted}")


def tensor_name(module: str, which: Literal["A", "B"]) -> str:
    """PEFT's name of a module's A [rank, in] or B [out, rank], given the module's Hugging Face name."""
    return f"{PEFT_PREFIX}{module}.lora_{which}.weight"


def module_name(tensor: str) -> str:
    """The Hugging Face name of the module to which an adapter's tensor belongs."""
    return tensor.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]


def adapted_modules(tensors: Iterable[str]) -> tuple[str, ...]:
    """The modules to which an adapter's tensors belong, each once, in the order of the tensors."""
    return tuple(dict.fromkeys(map(module_name, tensors)))
