"""What callers ask of an engine's thread. In a tensor-parallel group rank 0 broadcasts them to the other ranks."""

from dataclasses import dataclass
from typing import Any

from rl.lora import Policy
from rl.types import PullMode, SamplingParams
from rl.weights.versions import VersionRecord


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample completions of one prompt."""

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int
    policy: Policy


@dataclass(frozen=True, slots=True)
class Stream:
    """Sample one prompt as vLLM's own parameters say, and pass on every output as it comes."""

    id: str
    prompt_tokens: tuple[int, ...]
    params: Any
    """vLLM's `SamplingParams`, with a seed."""
    policy: Policy


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request."""

    id: str
    """The id of the request."""


@dataclass(frozen=True, slots=True)
class Update:
    """Load a version of the weights."""

    id: str
    record: VersionRecord
    frozen: bool
    mode: PullMode
    keep_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Freeze:
    """Keep an adapter's newest version, if it is this one."""

    id: str
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Serve a policy no longer."""

    id: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Rest:
    """Free the GPU's memory once no request is running, or take it again."""

    id: str
    asleep: bool


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread."""

    id: str


Command = Generate | Stream | Cancel | Update | Freeze | Drop | Rest | Close
