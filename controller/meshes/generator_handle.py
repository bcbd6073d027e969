"""`GeneratorHandle`: a mesh of `VLLMGenerator` ranks as the `Generator` that a controller script sees."""

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

from controller.meshes.errors import DeadlineError, MeshError
from controller.meshes.mesh import Mesh, visible_gpus
from controller.meshes.version_records import VersionRecords
from generator.actor import VLLMGenerator
from generator.config import GeneratorConfig, check_request
from generator.options import check_hardware, generator_env
from rl.checks import check_known
from rl.types import PULL_MODES, Completion, PullMode, SamplingParams

_ALIVE_S = 10.0  # to say no more than that it lives; an overloaded host takes seconds


class GeneratorHandle:
    """Implements `rl.protocols.Generator`."""

    def __init__(self, mesh: Mesh, config: GeneratorConfig, version_records: VersionRecords) -> None:
        """Use `launch`."""
        self.mesh = mesh
        self._version_records = version_records
        self.config = config

    @classmethod
    async def launch(
        cls,
        config: GeneratorConfig,
        log_dir: Path,
        *,
        name: str = "generator",
        gpus: Sequence[int] | None = None,
        version_records: VersionRecords | None = None,
    ) -> "GeneratorHandle":
        """Starts the generator's processes and waits until vLLM has loaded the model.

        `name` is in its logs' names and its errors. `gpus` are the host's GPUs to use, one per rank; by default all
        are visible. `version_records` are the trainer's; a version that is not in them is looked up in TorchStore.
        Raises ValueError, before any process starts, for a model directory that cannot be served.
        """
        config.check_model()
        check_hardware(config)
        mesh = await Mesh.spawn(
            name,
            VLLMGenerator,
            config,
            num_ranks=config.tensor_parallel,
            env={**generator_env(config), **visible_gpus(gpus)},
            log_dir=log_dir,
        )
        try:
            await mesh.answer(mesh.actors.version.call())
        except BaseException:
            await mesh.stop()
            raise
        return cls(mesh, config, version_records or VersionRecords())

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt; see `GenerationEngine.generate`.

        Many calls may be in flight; they are batched continuously. Cancelling one frees its place in vLLM.

        Raises `DeadlineError` after `GeneratorConfig.request_timeout_s`, and `MeshError` if the generator's processes
        are dead or hang.
        """
        tokens = check_request(prompt_tokens, sampling, num_samples, self.config)
        rank_0, call_id = self.mesh.rank(0), uuid.uuid4().hex
        try:
            return await self.mesh.answer(
                rank_0.generate.call_one(call_id, tokens, sampling, num_samples),
                self.config.request_timeout_s,
            )
        except asyncio.CancelledError:
            rank_0.cancel.broadcast(call_id)
            raise
        except DeadlineError:
            rank_0.cancel.broadcast(call_id)
            await self._check_alive()
            reason = f"a request took longer than {self.config.request_timeout_s:g} s (request_timeout_s)"
            raise DeadlineError(self.mesh.name, reason) from None

    async def pull_model_state_dict(
        self, version: int, *, mode: PullMode = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Takes exactly this version of the policy, as `rl.protocols.Generator` says.

        Raises ValueError naming the versions that can be pulled if this one cannot, and if it does not fit the model;
        the weights in use stay as they are then. Raises `MeshError` if the generator's processes are dead or hang.
        """
        check_known("mode", mode, PULL_MODES)
        record = self._version_records.find(version)
        call = self.mesh.rank(0).pull_model_state_dict.call_one(version, record, mode, keep_prefix_cache)
        pull = asyncio.create_task(self.mesh.answer(call))
        try:
            # A pull may take long: it waits for requests, and a large model's bytes. All it must do is live.
            while not (await asyncio.wait({pull}, timeout=self.config.request_timeout_s))[0]:
                await self._check_alive()
            pull.result()
        finally:
            pull.cancel()

    async def version(self) -> int:
        """Policy version of the weights in use; 0 before the first pull: the weights in the model's directory."""
        return await self.mesh.answer(self.mesh.rank(0).version.call_one())

    async def _check_alive(self) -> None:
        """Raises `MeshError` unless every rank's process answers."""
        try:
            await self.mesh.answer(self.mesh.actors.version.call(), _ALIVE_S)
        except DeadlineError:
            raise MeshError(
                self.mesh.name, f"it hangs: no answer within {_ALIVE_S:g} s", self.mesh.log_files, self.mesh.log_tail()
            ) from None

    async def stop(self) -> None:
        """Ends the generator's processes. May be called again."""
        await self.mesh.stop()
