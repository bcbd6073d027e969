"""What all checks use: clients with equal weights, batches, steps of known size, log-probs, and what a check found.

Steps are Adam's with betas of 0 and an eps far above the gradient, so that each is a step of plain gradient descent:

    weights -= learning_rate * g / (|g| + eps)   ->   weights -= (learning_rate / eps) * g

Of such steps it is known by arithmetic how far they go, and rounding of the gradient stays rounding of the weights.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import tinker
import tyro
from numpy.typing import NDArray
from tinker import types
from tyro.conf import Positional

FloatArray = NDArray[np.float64]
_EPS = 1e3
_TARGET = 0.02
"""How far a step of scale 1 moves the log-prob that it moves most: above rounding, and still proportional to it."""
_PROPORTIONAL = 0.1
"""How far the proportion of two steps may be from what arithmetic says."""
REFUSALS = (tinker.TinkerError, ValueError)
"""What the SDK raises for an error of the server; before 0.38 for some of them a ValueError."""


class NotApplicableError(Exception):
    """A check cannot be made here; its text says why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user says of the server."""

    url: Annotated[str, Positional, tyro.conf.arg(metavar="URL")]
    """The server's address, such as http://127.0.0.1:8000."""
    key: str = os.environ.get("TINKER_API_KEY", "tml-local")
    """The key of the user. The default is TINKER_API_KEY, or else tml-local."""
    other_key: str | None = None
    """The key of another user, who must not see what the first one makes."""
    base_model: str | None = None
    """The model's name. The default is the first that the server names."""
    model: Path | None = None
    """The directory of the base model, for log-probs in float64."""
    vocab_size: int | None = None
    """Token ids are below this. The default is the size of the tokenizer that the server names."""
    context: int | None = None
    """Tokens of the longest sequence. The default is what the server says."""
    tolerance: float = 1e-5
    """How far log-probs may differ that should be equal: absolutely, and below -1 as a part of the log-prob."""
    timeout_s: float = 120.0
    """Seconds in which a call has to be answered."""
    restart: str | None = None
    """A command that restarts the server and returns when it answers; `resume` runs it between saving and loading."""


@dataclass(slots=True)
class Findings:
    """What a check measured."""

    tolerance: float
    wrong: list[str] = field(default_factory=list[str])
    right: list[str] = field(default_factory=list[str])

    def check(self, holds: Any, claim: str) -> None:
        """Notes a statement that should hold."""
        (self.right if holds else self.wrong).append(claim if holds else f"not so: {claim}")

    def equal(self, what: str, found: FloatArray, expected: FloatArray) -> None:
        """Notes the largest difference of two arrays of one shape, of numbers beyond 1 as a part of them."""
        if found.shape != expected.shape:
            self.wrong.append(f"{what}: {found.size} numbers instead of {expected.size}")
        else:
            gap = float((np.abs(found - expected) / np.maximum(1, np.abs(expected))).max())
            (self.right if gap <= self.tolerance else self.wrong).append(f"{what}: {gap:.1e}")

    def ratio(self, what: str, found: FloatArray, unit: FloatArray, expected: float) -> None:
        """Notes the length of a move in units of another, which should be `expected`, and point the same way."""
        length = float(found @ unit / (unit @ unit))
        aside = float(np.linalg.norm(found - length * unit) / np.linalg.norm(unit))
        holds = max(abs(length - expected), aside) <= _PROPORTIONAL * max(expected, 0.5)
        (self.right if holds else self.wrong).append(f"{what}: {length:.3f} for {expected:.3f}")


def of_datum(tokens: Sequence[int], **inputs: object) -> types.Datum:
    """A datum that predicts each token after the first, of weight 1 unless `inputs` say otherwise."""
    return raw_datum(tokens[:-1], tokens[1:], **{"weights": [1.0] * (len(tokens) - 1), **inputs})


def raw_datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Any) -> types.Datum:
    """A datum of tokens, targets and float inputs, which need not fit each other."""
    arrays = {
        name: types.TensorData(data=[float(v) for v in values], dtype="float32", shape=[len(values)])
        for name, values in inputs.items()
    }
    target = types.TensorData(data=list(targets), dtype="int64", shape=[len(targets)])
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs={"target_tokens": target, **arrays}
    )


def of_output(output: Any) -> FloatArray:
    """Log-probs of all targets of a `forward_backward`, one datum after the other."""
    return np.concatenate([np.array(each["logprobs"].tolist(), np.float64) for each in output.loss_fn_outputs])


class Bench:
    """A server, and training clients of it whose weights are equal."""

    def __init__(self, settings: Settings) -> None:
        """Connects and saves the state with which clients begin. `sessions` ends what was begun."""
        self.settings, self.sessions = settings, contextlib.ExitStack()
        self.service: Any = self.connect(settings.key)
        served = {model.model_name: model for model in self.service.get_server_capabilities().supported_models}
        self.base_model = settings.base_model or next(name for name in served if name)
        named = served.get(self.base_model)
        self.context = settings.context or (named.max_context_length if named else None)
        self.rng = np.random.default_rng(0)
        self.vocab_size = settings.vocab_size or len(self.new().get_tokenizer())
        self.sequences = [self.rng.integers(3, self.vocab_size, length).tolist() for length in (9, 12, 5, 12)]
        first = self.new()
        for _ in range(3):
            self.forward_backward(first, self.batch())
            self.get(first.optim_step(types.AdamParams(learning_rate=5e-3, eps=1e-8)))
        self.start = str(self.get(first.save_state(self.name())).path)
        self.at_start = self.scores(self.fresh())
        self.alpha = self._find_alpha()

    def connect(self, key: str) -> Any:
        """A new session."""
        service = tinker.ServiceClient(base_url=self.settings.url, api_key=key)
        if hasattr(service, "close"):  # an old SDK has it not; its sessions end without a heartbeat
            self.sessions.callback(lambda: self.get(service.close("success")))
        return service

    def get(self, future: Any) -> Any:
        """The result of a call. Raises TimeoutError if it does not come in time. Old SDKs return clients at once."""
        try:
            return future.result(timeout=self.settings.timeout_s) if hasattr(future, "result") else future
        except TimeoutError:
            raise TimeoutError(f"no answer within {self.settings.timeout_s:g} s") from None

    def new(self, **options: Any) -> Any:
        """A training client of a new adapter."""
        given = {"base_model": self.base_model, "rank": 8, "seed": 1, **options}
        return self.get(self.service.create_lora_training_client(**given))

    def fresh(self, service: Any = None) -> Any:
        """A training client with the weights of `at_start` and a new optimizer."""
        return self.get((service or self.service).create_training_client_from_state(self.start))

    def sampler(self, client: Any) -> Any:
        """A sampling client of a training client's weights as they are now."""
        return self.get(client.save_weights_and_get_sampling_client())

    def second_writer(self, client: Any, service: Any) -> Any:
        """Another object of the SDK that writes to a client's model, and counts its calls by itself."""
        needs_info = "info" in inspect.signature(tinker.TrainingClient).parameters
        known = {"info": client.get_info()} if needs_info else {}
        return cast("Any", tinker.TrainingClient)(service.holder, 0, client.model_id, **known)

    def name(self) -> str:
        """A name that no state has."""
        return f"check-{np.random.default_rng().integers(10**9)}"

    def batch(self, weight: float = 1.0) -> list[types.Datum]:
        """Four datums of cross-entropy, of three lengths."""
        return [of_datum(tokens, weights=[weight] * (len(tokens) - 1)) for tokens in self.sequences]

    def batch_of(self, **inputs: FloatArray) -> list[types.Datum]:
        """The same datums with inputs of their own, each of which has the tokens of all datums in a row."""
        cuts = np.cumsum([len(tokens) - 1 for tokens in self.sequences])[:-1]
        parts = {name: np.split(values, cuts) for name, values in inputs.items()}
        rows = [{name: part[i] for name, part in parts.items()} for i in range(len(self.sequences))]
        return [raw_datum(t[:-1], t[1:], **row) for t, row in zip(self.sequences, rows, strict=True)]

    def forward_backward(self, client: Any, data: list[types.Datum], loss: Any = "cross_entropy", **config: Any) -> Any:
        """Calls it and waits."""
        return self.get(client.forward_backward(data, loss, config or None))

    def params(self, scale: float = 1.0, **fields: float) -> types.AdamParams:
        """Those of a step of plain gradient descent, of `scale` times `alpha`."""
        usual = {"learning_rate": scale * self.alpha * _EPS, "beta1": 0.0, "beta2": 0.0, "eps": _EPS}
        return types.AdamParams(**{**usual, **fields})

    def step(self, client: Any, scale: float = 1.0, **fields: float) -> None:
        """Takes such a step and waits."""
        self.get(client.optim_step(self.params(scale, **fields)))

    def learn(self, client: Any, scale: float = 1.0, weight: float = 1.0, **fields: float) -> None:
        """Takes a step with the gradient of `batch`; of weight 0 where a server may refuse a step without one."""
        self.forward_backward(client, self.batch(weight))
        self.step(client, scale, **fields)

    def move(self, act: Callable[[Any], None], client: Any = None) -> FloatArray:
        """How the log-probs of `batch` change when a client, or else a fresh one, does this."""
        client = client or self.fresh()
        before = self.scores(client)
        act(client)
        return self.scores(client) - before

    def scores(self, client: Any, sequences: Sequence[Sequence[int]] | None = None) -> FloatArray:
        """Log-probs of the sequences' tokens after the first, one after the other, by a client of either kind."""
        sequences = sequences or self.sequences
        if hasattr(client, "optim_step"):
            return of_output(self.get(client.forward([of_datum(tokens) for tokens in sequences], "cross_entropy")))
        futures = [client.compute_logprobs(types.ModelInput.from_ints(list(tokens))) for tokens in sequences]
        rows = [self.get(future)[1 - len(tokens) :] for future, tokens in zip(futures, sequences, strict=True)]
        return np.array([value for row in rows for value in row], np.float64)

    def _find_alpha(self) -> float:
        client, self.alpha = self.fresh(), 1e-9
        while self.alpha < 1e3:
            moved = float(np.abs(self.move(self.learn, client)).max())
            if moved > _TARGET / 4:
                return self.alpha * _TARGET / moved
            self.alpha *= 10
        raise ValueError("no learning rate moves the log-probs of the tokens that are learned")
