"""Any causal language model of transformers as a policy or critic: its forward pass ends in log-probs or values.

The model is transformers' own, unchanged. Two assumptions are made: logits are the last hidden states times one matrix,
perhaps with a factor or a soft cap of config.json, and packed documents do not attend to each other. They are tested
once on the model itself; there is no list of architectures.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar, cast

import accelerate
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from rl.checks import first_names
from rl.data.packing import PackedRow
from rl.images import PlacedImage
from rl.lora import ATTENTION_MODULES, FURTHER_ATTENTION_MODULES, MLP_MODULES, UNEMBED_MODULES
from rl.system.hf_config import VisionParts, find_family, num_experts, read_config, renamed, trained_shapes
from rl.types import Head, HeadDtype
from trainer.engines.hf import document_kernel
from trainer.engines.pytorch.distribution import Distribution
from trainer.engines.pytorch.document_attention import Bounds
from trainer.engines.pytorch.hf_directory import VALUE_HEAD, load_hf_weights, unstacked
from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values
from trainer.engines.pytorch.low_rank import Adaptable, freeze
from trainer.engines.pytorch.row_runner import to_tensor

T = TypeVar("T")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The projections of one expert that each stack of transformers holds, one above the other."""
_ADAPTABLE = (*ATTENTION_MODULES, *FURTHER_ATTENTION_MODULES, *UNEMBED_MODULES)
# Factor on the output projection that makes a soft cap on logits visible.
_MAGNIFIED = 1000.0


class Hidden(Protocol):
    """Computes a row up to the output projection. A family that reads images brings one."""

    def __call__(
        self, model: Any, tokens: Tensor, positions: Tensor, bounds: Bounds | None, images: Sequence[PlacedImage] = ()
    ) -> Tensor:
        """tokens and positions [1, L], images at their places in the row -> [1, L, D] last hidden states."""
        ...


class TransformersPolicy(nn.Module):
    """Holds the model. FSDP wraps this module, so that each computation is one forward pass of FSDP's root module."""

    def __init__(
        self,
        path: Path,
        head: Head,
        compute_dtype: torch.dtype,
        head_dtype: HeadDtype | None = None,
        *,
        train_vision: bool = False,
    ) -> None:
        """Builds the model of a directory in float32: parameters on the meta device, buffers on the CPU.

        A value head, named `score`, replaces the output projection. Without `train_vision`, the parameters that read
        images are frozen; they count as buffers.

        Raises ValueError if transformers cannot build a causal language model from the directory, or if the model does
        not fit this engine.
        """
        super().__init__()
        self._has_values, self._dtype, self._head_dtype = head == "value", compute_dtype, head_dtype
        self._by_documents = self._is_split = False
        self._run: Callable[[Callable[[object], object]], Any] = self.__call__
        family = find_family(read_config(path))
        vision = None if family is None else family.vision
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            text = _without_dropout(config.get_text_config())
            if self._has_values:
                config.tie_word_embeddings = False
            with accelerate.init_empty_weights(include_buffers=False):
                builder = AutoModelForImageTextToText if vision else AutoModelForCausalLM
                self.model: Any = builder.from_config(config, dtype=torch.float32, **_options(text))
        except (OSError, ValueError, ImportError, StrictDataclassError) as error:
            raise ValueError(f"transformers cannot build a causal language model from {path}: {error}") from error
        self._name = type(self.model).__name__
        self._read_images_by(vision, train_vision)
        self._has_experts = num_experts(text.to_dict()) > 0
        self._needs_bounds = family is not None and bool(family.prepare)
        if family is not None and family.prepare:
            resolve_name(family.prepare)(self.model)
        self._stored = trained_shapes(path).keys()
        self._logit_factor, self._logit_cap = _logit_factor(text), getattr(text, "final_logit_softcapping", None)
        if "position_ids" not in inspect.signature(self.model.base_model.forward).parameters:
            raise ValueError(f"{self._name} takes no positions, so documents cannot be packed")
        projection = self.model.get_output_embeddings()
        if not isinstance(projection, nn.Linear) or "bias" in dict(projection.named_parameters()):
            raise ValueError(f"{self._name} ends in {projection}; a linear projection without a bias is needed")
        if self._has_values:
            self._replace_by_value_head(projection)

    def _replace_by_value_head(self, projection: nn.Linear) -> None:
        path = next(name for name, module in self.model.named_modules() if module is projection)
        parent, _, name = path.rpartition(".")
        delattr(self.model.get_submodule(parent), name)
        self.model.score = nn.Linear(projection.in_features, 1, bias=False, device="meta")

    def _read_images_by(self, vision: VisionParts | None, train_vision: bool) -> None:
        self._hidden: Hidden = resolve_name(vision.hidden) if vision else _hidden
        self._tower: tuple[str, ...] = vision.tower if vision else ()
        self._frozen_parts: tuple[str, ...] = () if train_vision else self._tower
        self._split = vision.split if vision else ""
        self._renamed: Mapping[str, str] = vision.renamed if vision else {}
        for parameter in self.frozen_parts():
            parameter.requires_grad_(False)

    def forward(self, compute: Callable[[object], T]) -> T:
        """Runs a function of the model. FSDP gathers shards around it, as around any forward pass."""
        return compute(self.model)

    def freeze(self, dtype: torch.dtype, *, adapt_vision: bool = False) -> None:
        """Freezes the parameters, which are not loaded yet, in `dtype`, and makes projections adaptable.

        With `adapt_vision` these are all linear layers that read images, too.
        """
        freeze(self.model, dtype)
        # Generators adapt no feed-forward network of a mixture: neither experts, nor shared ones, nor dense layers.
        adaptable = _ADAPTABLE if self._has_experts else (*_ADAPTABLE, *MLP_MODULES)
        for name, module in self.model.named_modules():
            can_adapt = adapt_vision if name.startswith(self._tower) else name.rpartition(".")[2] in adaptable
            if type(module) is nn.Linear and can_adapt:
                # The layer stays the same object, because the model may refer to it by several names.
                module.__class__ = Adaptable
                cast("Adaptable", module).hf_module = self._stored_name(name)

    def split(self, mesh: DeviceMesh) -> Sequence[nn.Module]:
        """What `VisionParts.split` says."""
        self._is_split = True
        return resolve_name(self._split)(self.model, mesh)

    def run_by(self, wrapper: nn.Module) -> None:
        """From now on computes through `wrapper`, which wraps this module."""
        self._run = wrapper.__call__

    def layers(self) -> list[nn.Module]:
        """The model's repeated blocks, the units of sharding."""
        names: set[str] = self.model._no_split_modules or set()
        named = self.model.named_modules()
        return [m for name, m in named if type(m).__name__ in names and not name.startswith(self._frozen_parts)]

    def frozen_parts(self) -> set[nn.Parameter]:
        """The parameters that are not trained although the model is. Every rank holds them whole."""
        return {p for name, p in self.model.named_parameters() if name.startswith(self._frozen_parts)}

    def materialize(self, device: torch.device) -> None:
        """Allocates the parameters on the device, uninitialized, and moves the buffers there."""
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        self.to_empty(device=device)
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])
        self.model.tie_weights()

    def load(self, path: Path, device: torch.device) -> dict[str, nn.Parameter]:
        """Materializes the model with the weights of a directory. Returns its parameters by name."""
        self.materialize(device)
        parameters = self.parameters_by_name()
        with torch.no_grad():
            tensors = ((name, parameter.data) for name, parameter in parameters.items())
            stored = {part: view for named in tensors for part, view in self.views(*named)}
            load_hf_weights({**stored, **self.buffers_by_name()}, path)
        return parameters

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its Hugging Face name; a tied output projection is the input embedding."""
        named = self.model.named_parameters()
        return {self._stored_name(n): p for n, p in named if not n.startswith(self._frozen_parts)}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """The buffers that checkpoints hold, such as a router's selection bias, and the parameters of frozen parts."""
        persistent = self.model.state_dict().keys()
        frozen = [(n, p.data) for n, p in self.model.named_parameters() if n.startswith(self._frozen_parts)]
        buffers = [(n, buffer) for n, buffer in self.model.named_buffers() if n in persistent]
        return {self._stored_name(name): tensor for name, tensor in buffers + frozen}

    def _stored_name(self, name: str) -> str:
        """The name that checkpoints have for a parameter of the model."""
        return renamed(name, self._renamed)

    def views(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The `Views` of a parameter: stacked experts one by one, unless the checkpoint stacks them as well."""
        layer, experts, projection = name.partition(".experts.")
        if not experts or name in self._stored or projection not in _STACKS:
            yield name, tensor
            return
        parts = _STACKS[projection]
        for index, expert in unstacked(tensor):
            for part, view in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{index}.{part}.weight", view

    def score(self, row: PackedRow, device: torch.device, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Scores a packed row on the device that holds the model.

        Returns log-probs [P] float32 of the row's scored pairs and, if asked for, entropies [P] float32. A value head
        returns values [P] float32 and None. Only scored positions go through the output projection. Positions
        begin at 0 in every document, by which transformers separates documents.
        """
        tokens, positions = to_tensor(row.tokens, device)[None], to_tensor(row.positions, device)[None]
        bounds = self._bounds([each.num_tokens for each in row.documents], device)
        scored, targets = to_tensor(row.scored, device), to_tensor(row.targets, device)
        distribution = Distribution.of_row(row, device, self._head_dtype)

        def compute(model: Any) -> tuple[Tensor, Tensor | None]:
            hidden = self._hidden(model, tokens, positions, bounds, row.images)[0].index_select(0, scored)
            if self._has_values:
                return values(hidden, model.score.weight), None
            head = model.get_output_embeddings()
            # The head is linear, so a factor of the logits can be taken before it. Published models have powers
            # of two, which cost no precision.
            hidden = hidden * self._logit_factor
            low_rank = head.low_rank if isinstance(head, Adaptable) else None
            if isinstance(head.weight, DTensor):  # ranks hold parts of the vocabulary and add to the gradient
                whole = DTensor.from_local(hidden, head.weight.device_mesh, [Replicate()], run_check=False)
                hidden = whole.to_local(grad_placements=[Partial()])
            return logprobs_and_entropy(
                *(hidden, head.weight, targets),
                entropy=entropy,
                low_rank=low_rank,
                distribution=distribution,
                cap=self._logit_cap,
            )

        return self._run(compute)

    def _bounds(self, sizes: Sequence[int], device: torch.device) -> Bounds | None:
        """The documents of a row, for a model that is to know them."""
        return Bounds(sizes, device) if self._by_documents or self._needs_bounds else None

    @torch.no_grad()
    def attend_by_documents(self, device: torch.device) -> str:
        """Has attention computed document by document from now on, unless this model's cannot be.

        The model is tried on a few tokens, with transformers' attention for comparison. Returns why it keeps that,
        empty if it does not. A collective, and its parameters must be there.
        """
        tokens, bounds = torch.arange(1, 5, device=device)[None], Bounds([4], device)
        positions = torch.arange(4, device=device)[None]
        expected = self._run(lambda model: self._hidden(model, tokens, positions, self._bounds([4], device))).float()
        config = self.model.config.get_text_config()
        part = "text_config" if config is not self.model.config else ""
        before = config._attn_implementation
        document_kernel.prepare_kernel(device)
        self.model.set_attn_implementation({part: document_kernel.NAME})
        try:
            found = self._run(lambda model: self._hidden(model, tokens, positions, bounds)).float()
            why = bounds.refused or (
                "" if (found - expected).norm() <= 0.05 * expected.norm() else "it computes another attention"
            )
        except (TypeError, ValueError, KeyError) as error:
            why = str(error)
        if why:
            self.model.set_attn_implementation({part: before})
        self._by_documents = not why
        return why

    @torch.no_grad()
    def check(self, device: torch.device) -> None:
        """Tests the module's assumptions on a few tokens. Raises ValueError if one does not hold for this model.

        Attention is computed document by document from then on, where the model allows that: in bfloat16 on a GPU, and
        for a model whose own masks do not keep documents apart (gpt-oss).
        """
        if device.type == "cuda" and self._dtype == torch.bfloat16:
            why = self.attend_by_documents(device)
            said = f"with a mask of the whole row, because {why}" if why else "by documents"
            print(f"attention of {self._name}: {said}", flush=True)
        if self._leaks(device) and (self._by_documents or self.attend_by_documents(device) or self._leaks(device)):
            raise ValueError(f"documents of one row of {self._name} attend to each other, so they cannot be packed")
        if not (self._has_values or self._is_split):  # a critic has no logits, and families that are split are known
            self._check_logits(device)

    def _leaks(self, device: torch.device) -> bool:
        """Whether a document of a packed row changes the hidden states of the next one."""
        tokens = torch.arange(1, 9, device=device)[None]
        alone = torch.arange(4, device=device)[None]
        both, one = self._bounds([4, 4], device), self._bounds([4], device)
        packed, single = self._run(
            lambda model: (
                self._hidden(model, tokens, torch.cat([alone, alone], dim=1), both)[:, 4:].float(),
                self._hidden(model, tokens[:, 4:], alone, one).float(),
            )
        )
        return bool((packed - single).norm() > 0.1 * single.norm())

    def _check_logits(self, device: torch.device) -> None:
        """Raises ValueError if logits are not the product of hidden states, with the factor and the cap."""
        tokens, positions = torch.arange(5, 9, device=device)[None], torch.arange(4, device=device)[None]
        bounds = self._bounds([4], device)

        def compute(model: Any) -> tuple[Tensor, Tensor]:
            head = model.get_output_embeddings()
            with head.register_forward_hook(lambda *args: _MAGNIFIED * args[-1]):
                more = document_kernel.arguments(bounds)
                logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **more).logits
            product = _MAGNIFIED * self._logit_factor * (self._hidden(model, tokens, positions, bounds) @ head.weight.T)
            cap = self._logit_cap
            return logits.float(), (product if cap is None else torch.tanh(product / cap) * cap).float()

        logits, product = self._run(compute)
        if (logits - product).norm() > 0.01 * logits.norm():
            raise ValueError(
                f"{self._name} changes its logits after the output projection, by a cap or an unknown factor, which "
                "is not computed here"
            )


def _options(config: PretrainedConfig) -> dict[str, object]:
    """How transformers builds the model. Its other kinds of attention leave a cap of logits (Gemma 2) out."""
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    return {"attn_implementation": attention, "trust_remote_code": False}


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """The settings without dropout, which would make log-probs random."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def _logit_factor(config: PretrainedConfig) -> float:
    """What logits are multiplied by after the output projection, under the names of Granite's and Cohere's config."""
    return getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)


def _hidden(
    model: Any, tokens: Tensor, positions: Tensor, bounds: Bounds | None, images: Sequence[PlacedImage] = ()
) -> Tensor:
    """The `Hidden` of text."""
    assert not images, "validate_batch refuses images for a model of text"
    more = document_kernel.arguments(bounds)
    return model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **more).last_hidden_state


def check_weight_names(model: Path, head: Head) -> None:
    """Raises ValueError if the engine cannot train the model, or if names or shapes differ, naming the weights."""
    policy = TransformersPolicy(model, head, torch.float32)
    policy.model.tie_weights()
    tensors = {**policy.parameters_by_name(), **policy.buffers_by_name()}
    built = {part: tuple(view.shape) for named in tensors.items() for part, view in policy.views(*named)}
    stored = trained_shapes(model)
    left_out = {VALUE_HEAD, "lm_head.weight"}  # made where the files lack it; not of a critic, or a copy of another
    problems = [
        f"{what} {first_names(names)}"
        for what, names in (
            ("the checkpoint lacks", built.keys() - stored.keys() - {VALUE_HEAD}),
            ("transformers has no", stored.keys() - built.keys() - left_out),
            ("of another shape in the checkpoint:", {n for n in built.keys() & stored.keys() if built[n] != stored[n]}),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"{model}: parameters of transformers and weights of the checkpoint do not match, so they cannot be pushed "
            f"to vLLM; {'; '.join(problems)}. A checkpoint written by save_pretrained may match"
        )
