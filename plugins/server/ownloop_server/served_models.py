"""The models of a server: bases that adapters are trained over, and full fine-tunings.

A client that trains all weights has a trainer and a generator of its own, while it lives. That generator holds one
version at a time, so a new sampling client ends the one before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from controller.handles.generator_router import GeneratorRouter
from controller.launching.launcher import Launcher
from generator.openai_calls import OpenAICall, OpenAIReply
from ownloop_server.answers import Throughput
from ownloop_server.config import ModelOptions, ServeConfig
from ownloop_server.image_chunks import ReadImage
from ownloop_server.recovery import Snapshots
from ownloop_server.replica_calls import openai
from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.protocols import Generator, Trainer
from rl.types import Completion

_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeTraining:
    """A full fine-tuning that has begun."""

    trainer: Trainer
    served: "ServedModel"
    """What its sampling clients sample from."""
    end: Callable[[], Awaitable[None]]
    """Ends its processes. May be called again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """The frozen base with its generator. All adapters share both."""

    names: tuple[str, ...]
    """By which clients may ask for it. The first one is what the server calls it."""
    tokenizer: str
    """What clients load its tokenizer from: a directory or a name on the Hugging Face Hub."""
    adapter: Callable[[str, LoRAConfig], Awaitable[Trainer]]
    """Makes an adapter under a name."""
    generator: Generator
    max_rank: int
    """The highest rank of an adapter that the generator can serve."""
    max_context: int
    """Tokens of a prompt and its completion together."""
    vocab_size: int
    """Token ids are smaller."""
    snapshots: Snapshots
    """The versions that the generator keeps."""
    openai: Callable[[OpenAICall], Awaitable[OpenAIReply]] | None = None
    """Answers requests in OpenAI's form; None if the generator cannot."""
    read_image: ReadImage | None = None
    """Makes tokens of images; None for a model of text."""
    whole: Callable[[], Awaitable[WholeTraining]] | None = None
    """Begins a full fine-tuning; None if the server was started without room for one."""
    throughput: Throughput = field(default_factory=Throughput)

    @property
    def name_for_clients(self) -> str:
        """The model's name in answers from which clients load a tokenizer: where the tokenizer is, not an alias.

        The SDK takes a name with two slashes for a variant of a model, and leaves out the variant. A directory with two
        slashes gets a third one at its end.
        """
        # the SDK takes apart a name with two slashes, ORG/NAME/REVISION
        is_taken_apart = Path(self.tokenizer).is_absolute() and self.tokenizer.count("/") == 2
        return f"{self.tokenizer}/" if is_taken_apart else self.tokenizer


class ServedModels:
    """The models of a server."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """At least one. Raises ValueError if two have a name in common."""
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in self._models:
            for name in model.names:
                if name in self._by_name:
                    raise ValueError(f"two models are served as {name!r}; every name must mean one model")
                self._by_name[name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of all models."""
        return tuple(self._by_name)

    def find(self, name: str) -> ServedModel:
        """The model of this name. Raises ValueError, naming all models, for any other."""
        if Path(name).is_absolute():
            name = str(Path(name))  # without a slash at its end
        if name not in self._by_name:
            raise ValueError(f"base_model is {name!r}; this server serves {', '.join(self.names)}")
        return self._by_name[name]


@dataclass(slots=True)
class Places:
    """How many clients may train all weights at the same time."""

    num_free: int
    num_begun: int = 0


class WholeModels:
    """Begins full fine-tunings of one model."""

    def __init__(
        self,
        launcher: Launcher,
        config: ServeConfig,
        options: ModelOptions,
        vocab_size: int,
        throughput: Throughput,
        places: Places,
        read_image: ReadImage | None = None,
    ) -> None:
        """`places` are shared by all models of the server; what else there is, is this one's."""
        self._launcher = launcher
        self._config = config
        self._places = places
        self._options = options
        self._vocab_size = vocab_size
        self._throughput = throughput
        self._read_image = read_image
        self._running: list[AsyncExitStack] = []

    async def begin(self) -> WholeTraining:
        """Starts a trainer and a generator, which takes seconds.

        Raises ValueError if all places are taken, and as `Launcher` does for what cannot be trained or served.
        """
        if self._places.num_free == 0:
            raise ValueError(
                f"all {self._config.full} places for full fine-tuning are taken, which `ownloop serve --full` sets; "
                "wait until a client ends, or train an adapter: choose a rank above 0"
            )
        self._places.num_free -= 1  # before the first await: two clients cannot take the same place
        self._places.num_begun += 1
        stack = AsyncExitStack()
        try:
            trainer, generator = await self._launch(stack, f"full-{self._places.num_begun}")
        except BaseException:  # also when cancelled: the place must come back
            await stack.aclose()
            self._places.num_free += 1
            raise
        self._running.append(stack)

        async def end() -> None:
            if stack in self._running:
                self._running.remove(stack)
                await stack.aclose()
                self._places.num_free += 1

        return WholeTraining(trainer=trainer, served=self._as_served(generator), end=end)

    async def close(self) -> None:
        """Ends all of them."""
        while self._running:
            await self._running.pop().aclose()

    async def _launch(self, stack: AsyncExitStack, name: str) -> tuple[Trainer, Generator]:
        launcher = await stack.enter_async_context(Launcher(self._config.folder / "logs", beside=self._launcher))
        generator_config = self._config.generator
        if self._config.full > 1:  # in the weight store, versions of two models without a name would be the same
            generator_config = replace(generator_config, weight_transport="shared_memory")
        trainer, generator = await asyncio.gather(
            launcher.trainer(
                self._options.directory, self._config.trainer, name=f"{name}-trainer", generator=generator_config
            ),
            launcher.generator(self._options.directory, generator_config, name=f"{name}-generator"),
        )
        return trainer, generator

    def _as_served(self, generator: Generator) -> ServedModel:
        async def answer(call: OpenAICall) -> OpenAIReply:
            assert isinstance(generator, GeneratorRouter), "without `lora` it is"
            return await openai(generator, replace(self._options.parse(call), policy=None))

        by_names = WholeGenerator(generator)
        return ServedModel(
            names=self._options.names,
            tokenizer=str(self._options.directory),
            adapter=_no_adapter,
            generator=by_names,
            max_rank=0,
            max_context=self._config.generator.max_model_len,
            vocab_size=self._vocab_size,
            snapshots=OneVersion(by_names, 1),
            openai=answer,
            read_image=self._read_image,
            throughput=self._throughput,
        )


class OneVersion(Snapshots):
    """The one version that a generator of a whole model holds."""

    async def _make_room(self) -> None:
        for policy in list(self._kept):
            del self._kept[policy]  # later requests of it fail, and running ones finish
            while self._running[policy] > 0:
                await asyncio.sleep(_POLL_S)


class WholeGenerator:
    """Implements `rl.protocols.Generator`. Its model goes by the names that versions of an adapter have."""

    def __init__(self, unbound: Generator) -> None:
        """`Snapshots` knows which name the model has now."""
        self._unbound = unbound

    async def generate(self, *args: Any, policy: Policy = None, **options: Any) -> list[Completion]:
        """As `Generator.generate`."""
        del policy
        return await self._unbound.generate(*args, **options)

    async def pull_model_state_dict(
        self, version: int, *, policy: LivePolicy = None, frozen: bool = False, **options: Any
    ) -> None:
        """As `Generator.pull_model_state_dict`."""
        del policy, frozen
        await self._unbound.pull_model_state_dict(version, **options)

    async def drop_policy(self, policy: Policy) -> None:
        """The weights stay until the next pull."""


async def _no_adapter(name: str, lora: LoRAConfig) -> Trainer:
    raise AssertionError(f"{name}: a model whose weights are trained has no adapters, and none of {lora}")
