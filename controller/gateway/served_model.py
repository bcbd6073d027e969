"""A base model that the server trains adapters of and samples from."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rl.lora import LoRAConfig
from rl.protocols import Generator, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
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
    max_snapshots: int
    """Versions of adapters that the generator keeps at the same time."""
