"""Full fine-tuning of the toy model: everything but the processes is real."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig
from ownloop_server.config import ModelOptions, ServeConfig
from ownloop_server.served_models import Places, ServedModel, WholeModels
from plugins.server.tests.toy_model import CONTEXT, ToyGenerator, ToyHost, ToyTrainer
from rl.lora import LivePolicy, LoRAConfig
from rl.protocols import Generator, Trainer
from rl.types import PullMode


class ToyWholeGenerator(ToyGenerator):
    """Samples from the one table that it pulled last."""

    def __init__(self, host: ToyHost, trainer: ToyTrainer) -> None:
        """Begins with the base."""
        super().__init__(host)
        self._trainer = trainer

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        assert (policy, frozen) == (None, False), "it has no names"
        self.tables[None] = self.host.pushed[self._trainer.name, version]


class ToyWholeModels(WholeModels):
    """Starts no processes."""

    host: ToyHost

    async def _launch(self, stack: AsyncExitStack, name: str) -> tuple[Trainer, Generator]:
        trainer = ToyTrainer(name, LoRAConfig(), self.host)
        self.host.adapters[name] = trainer
        stack.push_async_callback(trainer.drop)
        return trainer, ToyWholeGenerator(self.host, trainer)


def with_whole_models(served: ServedModel, host: ToyHost, num_places: int) -> ServedModel:
    """The model with room for so many full fine-tunings."""
    if num_places == 0:
        return served
    config = ServeConfig(full=num_places, generator=GeneratorConfig(max_model_len=CONTEXT))
    launcher, places = Launcher(Path()), Places(num_places)
    options = ModelOptions(directory=Path("toy"), names=served.names)
    models = ToyWholeModels(launcher, config, options, served.vocab_size, served.throughput, places)
    models.host = host
    return replace(served, whole=models.begin)
