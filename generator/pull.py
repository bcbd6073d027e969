"""The pulling side of weight synchronisation: loads a published version into a vLLM model of this process.

vLLM's own `load_weights` fuses and shards, so a tensor-parallel rank copies only its own part. Everything that can be
checked is checked before the first byte is copied, so a version of another model leaves the old weights as they are.
How a version gets here is the transport's business, and when to load it the engine's.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generator._compat import packed_experts
from generator._cpu_packing import packed_layers
from generator.copy_plan import CopyPlan, CopyRecorder, pack_weights
from rl.checks import first_names
from rl.system.model_files import stored_shapes
from rl.weights.copies import Workers
from rl.weights.transport import WeightMemory
from rl.weights.versions import VersionRecord, WeightsError, WeightsMismatchError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Backup = tuple[list[tuple[nn.Parameter, torch.Tensor]], list[tuple[nn.Module, Any]]]


class WeightLoader:
    """Loads published versions into one vLLM model."""

    def __init__(self, model: nn.Module, directory: Path, *, tied_embeddings: bool) -> None:
        """`directory` is where the model was loaded from: a version has to bring the tensors of its files.

        Raises ValueError for a model of experts that cannot be loaded into.
        """
        self._model = model
        self._dtype = next(model.parameters()).dtype
        self._expected = stored_shapes(directory)
        if tied_embeddings:
            self._expected.pop("lm_head.weight", None)  # some files repeat it; it is never published
        self._workers = Workers()
        self._plan: CopyPlan | None = None
        self._fitting = b""  # the layout that was last found to fit this model
        packed_experts(model)  # only to raise

    def check(self, record: VersionRecord) -> None:
        """Raises `WeightsMismatchError` if the version is not one of this model."""
        self.check_dtype(record)
        if record.layout != self._fitting:
            self._check_shapes(record)
            self._fitting = record.layout

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's tensors and of its output projection, by their Hugging Face names."""
        embedding = self._expected.get("model.embed_tokens.weight")
        return self._expected if embedding is None else {"lm_head.weight": embedding, **self._expected}

    def check_dtype(self, record: VersionRecord) -> None:
        """Raises `WeightsMismatchError` if the version was published in another dtype than this generator's."""
        if record.dtype != self._dtype:
            raise WeightsMismatchError(
                f"version {record.version} was published as {record.dtype}; this generator holds {self._dtype}"
            )

    def _check_shapes(self, record: VersionRecord) -> None:
        published = {spec.name: spec.shape for spec in record.manifest}
        problems = [
            f"{what}: {first_names(names)}"
            for what, names in (
                ("missing", self._expected.keys() - published.keys()),
                ("not of this model", published.keys() - self._expected.keys()),
                (
                    "of another shape",
                    {
                        f"{name} {published[name]} instead of {self._expected[name]}"
                        for name in published.keys() & self._expected.keys()
                        if published[name] != self._expected[name]
                    },
                ),
            )
            if names
        ]
        if problems:
            raise WeightsMismatchError(f"version {record.version} does not fit this model; {'; '.join(problems)}")

    def load_memory(self, memory: WeightMemory, record: VersionRecord) -> None:
        """Copies the version in `memory` into the model. Raises as `load` does.

        The first call goes through vLLM and records its copies; later calls repeat them.
        """
        if self._plan is None or not self._plan.fits(record):
            with CopyRecorder(memory) as recorder:
                self._load((spec.name, memory.tensor(spec)) for spec in record.manifest)
            pack_weights(self._model, self._workers)  # from then on it is known of every layer whether it is packed
            self._plan = CopyPlan(self._model, record, recorder)
        else:
            self._plan.load(memory, self._workers)

    def load(self, tensors: NamedTensors) -> None:
        """Copies the tensors into the model. Raises `WeightsError` if a parameter of the model was left out.

        After any exception the model is a mixture of versions. It must not be used until a later call succeeds, or
        `restore` is called.
        """
        self._load(tensors)
        pack_weights(self._model, self._workers)

    def backup(self) -> Backup:
        """A copy of this rank's weights for `restore`, in the host's memory."""
        with torch.no_grad():
            parameters = [(p, p.detach().to("cpu", copy=True)) for p in self._model.parameters()]
        # Packed weights are replaced, never overwritten, so references to them are enough.
        return parameters, [(layer, vars(layer)["cpu_linear"]) for layer in packed_layers(self._model)]

    def restore(self, backup: Backup) -> None:
        """Brings back the weights of `backup`."""
        parameters, packed = backup
        with torch.no_grad():
            for parameter, old in parameters:
                parameter.copy_(old)
        for layer, cpu_linear in packed:
            object.__setattr__(layer, "cpu_linear", cpu_linear)

    def _load(self, tensors: NamedTensors) -> None:
        with torch.no_grad():
            loaded: set[str] = self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        # vLLM puts adapters around the layers of the model, and leaves this out of the names of what it has loaded.
        left = {name.replace(".base_layer.", ".") for name, _ in self._model.named_parameters()} - loaded
        if left:
            raise WeightsError(f"vLLM loaded nothing into these parameters: {first_names(left)}")
