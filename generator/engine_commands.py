"""What callers ask of an engine's thread. In a tensor-parallel group rank 0 broadcasts them to the other ranks."""

from dataclasses import dataclass

from rl.types import PullMode, SamplingParams
from rl.weights.manifest import VersionRecord


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample completions of one prompt."""

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int


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
    mode: PullMode
    keep_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread."""

    id: str


Command = Generate | Cancel | Update | Close
