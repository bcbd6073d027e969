"""Checkpoints that clients sample from: loaded once, for all sampling clients and requests that name the same path."""

import asyncio
from collections.abc import Mapping
from datetime import datetime

from controller.server.archive import Archive
from controller.server.database import Database
from controller.server.served_model import ServedModel, ServedModels
from controller.server.training_client import TrainingClient, unloaded_whole
from rl.lora import Policy


class LoadedCheckpoints:
    """Which checkpoint a generator has under which policy."""

    def __init__(
        self, models: ServedModels, archive: Archive, database: Database, training: Mapping[str, TrainingClient]
    ) -> None:
        """None at first. `training` are the training clients by their run ids."""
        self._models = models
        self._archive = archive
        self._database = database
        self._training = training
        self._policies: dict[str, tuple[datetime, Policy]] = {}
        self._loading = asyncio.Lock()
        self._num_loaded = 0

    async def load(self, path: str) -> tuple[ServedModel, str, Policy]:
        """The model, the name by which its client asked for it, and the policy. Raises ValueError without the path."""
        row, folder = self._archive.find_ours(path)
        run = self._database.run(row.run_id)
        assert run is not None, "a checkpoint's run is in the database before the checkpoint"
        if run.rank == 0:
            if (client := self._training.get(run.id)) is None:
                raise ValueError(unloaded_whole(path))
            policy = await client.freeze_saved(path)
            return client.model, run.base_model, policy
        async with self._loading:
            model = self._models.find(run.base_model)
            saved_at, known = self._policies.get(path, (None, None))
            if known is not None and saved_at == row.created_at and known in model.snapshots:
                return model, run.base_model, known
            self._num_loaded += 1
            name = f"loaded.{self._num_loaded}"
            # The checkpoint goes to the generator by way of an adapter of the trainer, which reads its format.
            trainer = await model.adapter(name, run.lora)
            try:
                await trainer.load_checkpoint(folder, weights_only=True)
                policy = await model.snapshots.freeze(name, trainer)
            finally:
                await trainer.drop()
            self._policies[path] = row.created_at, policy
            kept = {
                path: of_path
                for path, of_path in self._policies.items()
                if any(of_path[1] in m.snapshots for m in self._models)
            }
            self._policies = kept
            return model, run.base_model, policy
