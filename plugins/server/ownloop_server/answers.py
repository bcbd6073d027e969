"""Results of requests that take long: a request gets an id at once, and the client asks for its result by that id.

    client --- request ---> Answers: id      Turns: calls of one model, in the order of their numbers
    client --- id -------->          result <--- one call at a time ---> trainer

A client that loses a connection sends its request again, or asks for the same result again. So a request is known by a
key of the client's (model and sequence number), and its result is kept for a while after it was first fetched.

The client numbers a model's calls without gaps and sends them concurrently. A call starts when all before it have
ended. So a client that sends very many lengthens only its own queue.
"""

import asyncio
import contextlib
import hashlib
import json
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel

_KEEP_S = 60.0
"""How long a result stays after it was fetched for the first time. A client that lost it asks again within 45 s."""
_KEEP_UNFETCHED_S = 1800.0
"""How long a result stays that no client asks for. A client asks all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBody:
    """The body of a result."""

    content: bytes
    media_type: str = "application/json"

    @classmethod
    def json(cls, value: Mapping[str, object]) -> "ResponseBody":
        """A result in JSON."""
        return cls(content=json.dumps(value, allow_nan=False).encode())

    @classmethod
    def protobuf(cls, content: bytes) -> "ResponseBody":
        """A result that is a protobuf message."""
        return cls(content=content, media_type="application/x-protobuf")

    @classmethod
    def failure(cls, error: BaseException) -> "ResponseBody":
        """The protocol's form of a failed request: a mistake of the user's, or a fault of the server's."""
        if isinstance(error, ValueError):
            return cls.json({"error": str(error), "category": "user"})
        return cls.json({"error": f"{type(error).__name__}: {error}", "category": "server"})


class PendingAnswer:
    """A request that was accepted."""

    def __init__(self, owner: str, digest: bytes) -> None:
        """`owner` is the session that sent it, `digest` says what was asked."""
        self.id = uuid.uuid4().hex  # cannot be guessed by other users
        self.owner = owner
        self.digest = digest
        self._set_at: float | None = None
        self._fetched_at: float | None = None
        self._answer: asyncio.Future[ResponseBody] = asyncio.get_running_loop().create_future()

    def set(self, answer: ResponseBody) -> None:
        """Stores the result. The first one counts."""
        if not self._answer.done():
            self._answer.set_result(answer)
            self._set_at = self._now()

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._answer.done()

    async def wait(self, timeout_s: float) -> ResponseBody | None:
        """The result, or None if it is not there in time."""
        # `wait` leaves the future alone when time is up; `wait_for` would cancel it
        done, _ = await asyncio.wait([self._answer], timeout=timeout_s)
        if not done:
            return None
        # the first time counts, so that asking again does not keep a result
        self._fetched_at = self._fetched_at or self._now()
        return self._answer.result()

    @property
    def is_old(self) -> bool:
        """Whether no client will ask for the result any more."""
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

    def open(self, key: Hashable, owner: str, digest: bytes) -> tuple[PendingAnswer, bool]:
        """The request with this key, and whether it is new. A repeated one is not run a second time.

        `digest` is `digest_of` the request. Raises ValueError if the key was that of another request: two clients
        count by themselves, and the answer would be the other one's.
        """
        if (known := self._by_key.get(key)) is not None:
            if self._by_id[known].digest != digest:
                raise ValueError(f"{_words(key)} was that of another request; {ONE_WRITER}")
            return self._by_id[known], False  # the SDK repeats requests whose answer was lost on the way
        pending = PendingAnswer(owner, digest)
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
        """Forgets results that were fetched a while ago, and results that no client asks for."""
        for pending in [pending for pending in self._by_id.values() if pending.is_old]:
            self._forget(pending.id)

    def forget_owner(self, owner: str) -> None:
        """Ends all requests of a session."""
        for pending in [pending for pending in self._by_id.values() if pending.owner == owner]:
            pending.set(ResponseBody.failure(ValueError(f"session {owner} has ended")))
            self._forget(pending.id)

    def _forget(self, request_id: str) -> None:
        del self._by_id[request_id]
        del self._by_key[self._keys.pop(request_id)]


ONE_WRITER = "what has numbers is for one client alone: make another of its own in each process"


def digest_of(request: BaseModel | Message) -> bytes:
    """What a request asks for. A request that the SDK sends again has the same."""
    if isinstance(request, Message):
        content = request.SerializeToString(deterministic=True)
    else:
        content = repr(request).encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=16).digest()


def _words(key: Hashable) -> str:
    name, *_, number = key if isinstance(key, tuple) else (key, "")
    return f"sequence number {number} of {name}"


Work = Literal["trained", "sampled"]
BUCKET_S = 5.0
"""The length of one point of the history."""
_NUM_BUCKETS = 60


class Throughput:
    """Counts the tokens of one model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._buckets: deque[tuple[int, Counter[Work]]] = deque(maxlen=_NUM_BUCKETS)
        self.totals: Counter[Work] = Counter()
        """Tokens since the server began."""

    def add(self, work: Work, num_tokens: int) -> None:
        """Counts tokens that were just trained or sampled."""
        self.totals[work] += num_tokens
        now = int(self._clock() / BUCKET_S)
        if not self._buckets or self._buckets[-1][0] != now:
            self._buckets.append((now, Counter()))
        self._buckets[-1][1][work] += num_tokens

    def history(self, work: Work) -> list[float]:
        """Tokens per second, oldest first, of the last five minutes. The bucket that is being filled is left out."""
        now = int(self._clock() / BUCKET_S)
        counted = dict(self._buckets)
        # a time without tokens has no bucket, and counts 0
        return [counted.get(now - age, Counter[Work]())[work] / BUCKET_S for age in range(_NUM_BUCKETS, 0, -1)]


PendingCall = Callable[[], Awaitable[ResponseBody]]
T = TypeVar("T")

GAP_S = 300.0
"""How long later calls wait for one that does not arrive. The client tries to send for five minutes."""


@contextlib.contextmanager
def errors_logged() -> Generator[None]:
    """Within the block, an exception is written to the log, and the code after the block continues."""
    try:
        yield
    except Exception:
        traceback.print_exc()


class Turns:
    """The calls of one model."""

    def __init__(self, name: str, gap_s: float = GAP_S) -> None:
        """The first call has the number 0. `name` appears in errors."""
        self._name = name
        self.gap_s = gap_s
        self._next = 0
        self._waiting: dict[int, tuple[PendingCall, PendingAnswer]] = {}
        self._closed = False  # set by `close`; the runner sees it between two calls
        self._arrived = asyncio.Event()
        self._free = asyncio.Lock()
        self._runner = asyncio.create_task(self._run())

    @property
    def num_waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether a call is at the trainer."""
        return self._free.locked()

    def put(self, number: int, call: PendingCall, pending: PendingAnswer) -> None:
        """Adds a call. Its result, or its error, goes to `pending`."""
        if number < self._next:  # the client counts on from its own number, so it would never repeat one
            done = f"sequence number {number} of {self._name} has been used; the next is {self._next}; {ONE_WRITER}"
            pending.set(ResponseBody.failure(ValueError(done)))
            return
        self._waiting[number] = (call, pending)
        self._arrived.set()

    async def between(self, call: Callable[[], Awaitable[T]]) -> T:
        """Runs a call that has no number when none of the others runs."""
        async with self._free:
            return await call()

    async def close(self) -> None:
        """Ends the calls that wait. Returns when the one that runs has ended: cut off, it could leave things behind."""
        self._closed = True
        self._arrived.set()
        await asyncio.wait([self._runner])  # which may have been cancelled with the whole server
        for _, pending in self._waiting.values():
            pending.set(ResponseBody.failure(ValueError(f"{self._name} has ended")))
        self._waiting.clear()

    async def _run(self) -> None:
        while not self._closed:
            while self._next in self._waiting and not self._closed:  # later ones stay until their turn comes
                call, pending = self._waiting.pop(self._next)
                self._next += 1
                async with self._free:
                    pending.set(await answer(call))
            if self._closed:
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(self.gap_s if self._waiting else None):
                    await self._arrived.wait()
            except TimeoutError:
                self._skip_gap()

    def _skip_gap(self) -> None:
        """Fails the calls behind one that never came, so that the next call works again."""
        missing = self._next
        for number, (_, pending) in sorted(self._waiting.items()):
            lost = f"call {number} of {self._name} waited {self.gap_s:g} s for call {missing}, which never arrived"
            pending.set(ResponseBody.failure(ValueError(f"{lost}; nothing was computed")))
        self._next = max(self._waiting) + 1  # the client will not send these again
        self._waiting.clear()


async def answer(call: PendingCall) -> ResponseBody:
    """The call's result, or its error in the protocol's form. Faults of the server's are also printed."""
    try:
        return await call()
    except Exception as error:
        if not isinstance(error, ValueError):
            traceback.print_exc()
        return ResponseBody.failure(error)
