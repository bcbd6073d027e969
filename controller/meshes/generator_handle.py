"""`GeneratorHandle`: a mesh of `VLLMGenerator` ranks as the `Generator` that a controller script sees."""

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

from controller.meshes.errors import DeadlineError, MeshError
from controller.meshes.gpus import gpu_env
from controller.meshes.mesh import Mesh
from controller.meshes.version_records import VersionRecords
from generator.actor import VLLMGenerator
from generator.config import GeneratorConfig, check_request
from generator.options import check_hardware, generator_env
from rl.checks import check_known
from rl.types import PULL_MODES, Completion, PullMode, SamplingParams

_ALIVE_S = 10.0  # for an answer that costs no work; on an overloaded host even that takes seconds


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
        gpus: Sequence[str] | None = None,
        version_records: VersionRecords | None = None,
    ) -> "GeneratorHandle":
        """Starts the generator's processes and waits until vLLM has loaded the model.

        `name` appears in log file names and errors. `gpus` are the GPUs of this host to use, one per rank; by default
        every rank sees all of them. `version_records` are the trainer's; a version that is not in them is looked up in
        TorchStore. Raises ValueError, before any process starts, if the model directory cannot be served.
        """
        config.check_model()
        check_hardware(config)
        mesh = await Mesh.spawn(
            name,
            VLLMGenerator,
            config,
            num_ranks=config.tensor_parallel,
            env={**generator_env(config), **gpu_env(gpus)},
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

        Many calls may be in flight; they are batched continuously. Cancelling a call aborts its requests in vLLM.

        Raises `DeadlineError` after `GeneratorConfig.request_timeout_s`, and `MeshError` if the generator's processes
        have died or hang.
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
        """Loads exactly this policy version; see `rl.protocols.Generator.pull_model_state_dict`.

        Raises ValueError if this version cannot be pulled, naming those that can, and if it does not fit the model; the
        weights in use then stay as they are. Raises `MeshError` if the generator's processes have died or hang.
        """
        check_known("mode", mode, PULL_MODES)
        record = self._version_records.find(version)
        call = self.mesh.rank(0).pull_model_state_dict.call_one(version, record, mode, keep_prefix_cache)
        pull = asyncio.create_task(self.mesh.answer(call))
        try:
            # A pull has no deadline, because it waits for running requests and for a large model's bytes. The process
            # only has to show now and then that it is alive.
            while not (await asyncio.wait({pull}, timeout=self.config.request_timeout_s))[0]:
                await self._check_alive()
            pull.result()
        finally:
            pull.cancel()

    async def version(self) -> int:
        """The policy version in use. Before the first pull it is 0: the weights in the model's directory."""
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
