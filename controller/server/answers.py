"""Results of requests that take long: a request gets an id at once, and the client asks for its result by that id.

A client that loses a connection sends its request again, or asks for the same result again. So a request is known by a
key of the client's (model and sequence number), and its result is kept for a while after it was first fetched.
"""

import asyncio
import json
import uuid
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

_KEEP_S = 60.0
"""How long a result stays after it was fetched for the first time. A client that lost it asks again within 45 s."""
_KEEP_UNFETCHED_S = 1800.0
"""How long a result stays that nobody asks for. A client asks all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The body of a result."""

    content: bytes
    media_type: str = "application/json"

    @classmethod
    def json(cls, value: Mapping[str, Any]) -> "Answer":
        """A result in JSON."""
        return cls(content=json.dumps(value, allow_nan=False).encode())

    @classmethod
    def protobuf(cls, content: bytes) -> "Answer":
        """A result that is a protobuf message."""
        return cls(content=content, media_type="application/x-protobuf")

    @classmethod
    def failure(cls, error: BaseException) -> "Answer":
        """The protocol's form of a failed request: a mistake of the user's, or a fault of the server's."""
        if isinstance(error, ValueError):
            return cls.json({"error": str(error), "category": "user"})
        return cls.json({"error": f"{type(error).__name__}: {error}", "category": "server"})


class PendingAnswer:
    """A request that was accepted."""

    def __init__(self, owner: str) -> None:
        """`owner` is the session that sent it."""
        self.id = uuid.uuid4().hex
        self.owner = owner
        self._set_at: float | None = None
        self._fetched_at: float | None = None
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def set(self, answer: Answer) -> None:
        """Stores the result. The first one counts."""
        if not self._answer.done():
            self._answer.set_result(answer)
            self._set_at = self._now()

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._answer.done()

    async def wait(self, timeout_s: float) -> Answer | None:
        """The result, or None if it is not there in time."""
        done, _ = await asyncio.wait([self._answer], timeout=timeout_s)
        if not done:
            return None
        self._fetched_at = self._fetched_at or self._now()
        return self._answer.result()

    @property
    def is_old(self) -> bool:
        """Whether nobody will ask for the result any more."""
        now = self._now()
        if self._fetched_at is not None:
            return self._fetched_at < now - _KEEP_S
        return self._set_at is not None and self._set_at < now - _KEEP_UNFETCHED_S

    def _now(self) -> float:
        return self._answer.get_loop().time()


class Answers:
    """All requests whose results may still be asked for."""

    def __init__(self) -> None:
        """Empty."""
        self._by_key: dict[Hashable, str] = {}
        self._by_id: dict[str, PendingAnswer] = {}
        self._keys: dict[str, Hashable] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Requests without a result."""
        return sum(not pending.done for pending in self._by_id.values())

    def open(self, key: Hashable, owner: str) -> tuple[PendingAnswer, bool]:
        """The request with this key, and whether it is new. A repeated one is not run a second time."""
        if (known := self._by_key.get(key)) is not None:
            return self._by_id[known], False
        pending = PendingAnswer(owner)
        self._by_id[pending.id] = pending
        self._by_key[key] = pending.id
        self._keys[pending.id] = key
        return pending, True

    def take_back(self, pending: PendingAnswer) -> None:
        """Forgets a request that could not be begun. If it is repeated, it is new."""
        self._forget(pending.id)

    def find(self, request_id: str) -> PendingAnswer | None:
        """The request with this id, if it is known."""
        return self._by_id.get(request_id)

    def sweep(self) -> None:
        """Forgets results that were fetched a while ago, and those that nobody asks for."""
        for pending in [pending for pending in self._by_id.values() if pending.is_old]:
            self._forget(pending.id)

    def forget_owner(self, owner: str) -> None:
        """Ends all requests of a session."""
        for pending in [pending for pending in self._by_id.values() if pending.owner == owner]:
            pending.set(Answer.failure(ValueError(f"session {owner} has ended")))
            self._forget(pending.id)

    def _forget(self, request_id: str) -> None:
        del self._by_id[request_id]
        del self._by_key[self._keys.pop(request_id)]
