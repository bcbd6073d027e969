"""What a generator's requests sample from, and which version of it sampled which token.

vLLM notes for every token one version of the weights of the whole engine. Here that is the number of the updates
before the token, and each policy knows at which of them it changed.
"""

import bisect
from collections.abc import Iterable
from typing import Any

from rl.lora import Policy


class ServedPolicy:
    """One policy of an engine. Requests refer to it until they have finished, even if it was dropped."""

    def __init__(self, policy: Policy, version: int, update: int, lora_request: Any = None) -> None:
        """`update` is the number of the update that loaded it; `lora_request` is how vLLM is asked for it."""
        self.policy = policy
        self.lora_request = lora_request
        self._updates = [update]
        self._versions = [version]

    @property
    def version(self) -> int:
        """The newest version."""
        return self._versions[-1]

    def replace(self, version: int, update: int, lora_request: Any = None) -> None:
        """Notes that another version is in use since an update."""
        self.lora_request = lora_request
        self._updates.append(update)
        self._versions.append(version)

    def version_at(self, update: int) -> int:
        """The version that was in use when so many updates had been made."""
        return self._versions[bisect.bisect_right(self._updates, update) - 1]


def unknown_policy(policy: Policy, known: Iterable[Policy]) -> ValueError:
    """The error for a policy that was never pulled, or was dropped."""
    names = ", ".join(map(repr, known))
    return ValueError(f"policy is {policy!r}, which this generator does not have; it has {names}")
