"""Our server passes every check of the referee; a server with one fault fails the check that is for it.

The server is the gateway over the toy model, whose log-probs are a table: a fault is planted in the model or at one
place of the gateway.
"""

import asyncio
import json
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ownloop_referee.bench import Bench
from ownloop_referee.command import CHECKS, CheckTinker, judged, main
from ownloop_server import access, answers, training_client, wire
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.toy_model import CONTEXT, VOCAB, ToyGenerator, ToyHost, ToyTrainer

Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose log-probs are the toy's: its head is 0."""
    path = tmp_path_factory.mktemp("model")
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, **sizes))
    torch.nn.init.zeros_(made.lm_head.weight)
    made.save_pretrained(path)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Generator[RunningServer]:
    """A server with two users."""
    with running_server(tmp_path, max_snapshots=16, needs_key=True) as running:
        yield running


def command(server: RunningServer, model: Path, **options: Any) -> CheckTinker:
    """The command for this server, of two users."""
    ann, bob = (server.keys.add(name) for name in ("ann", "bob"))
    return CheckTinker(url=server.url, key=ann, other_key=bob, model=model, vocab_size=VOCAB, timeout_s=20, **options)


@pytest.mark.seconds
def test_our_server_passes_all_checks(
    server: RunningServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(server, model, json=tmp_path / "results.json").run() == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["check"] for row in found["checks"]] == list(CHECKS)
    assert (found["ok"], found["failed"], found["not applicable"]) == (len(CHECKS), 0, 0)
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(CHECKS)} ok, 0 failed, 0 not applicable"


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Fault:
    """Replaces a function by `wrapper(the function, its arguments ...)`."""
    own = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **options: wrapper(own, *args, **options))


def with_params(**fields: float) -> Fault:
    """Steps whose parameters the server knows better."""
    return around(ToyTrainer, "optim_step", lambda own, self, params: own(self, replace(params, **fields)))


def old_learning_rate(patch: pytest.MonkeyPatch) -> None:
    last: dict[Any, float] = {}

    def wrapper(own: Any, self: ToyTrainer, params: Any) -> Any:
        rate = last.get(self, params.learning_rate)
        last[self] = params.learning_rate
        return own(self, replace(params, learning_rate=rate))

    around(ToyTrainer, "optim_step", wrapper)(patch)


def newest_call_first(patch: pytest.MonkeyPatch) -> None:
    def put(own: Any, self: Any, number: int, call: Any, pending: Any) -> None:
        waiting = self._waiting  # a call that comes while another waits takes its place
        if (earlier := waiting.pop(number - 1, None)) is not None:
            own(self, number - 1, call, pending)
            own(self, number, *earlier)
        else:
            own(self, number, call, pending)

    async def work(own: Any, *args: Any) -> None:
        await asyncio.sleep(0.05)  # so that calls wait
        await own(*args)

    around(answers.Turns, "put", put)(patch)
    around(ToyHost, "work", work)(patch)


async def forgetful(own: Any, self: ToyTrainer, *args: Any, **options: Any) -> Any:
    """A gradient takes the place of the one before."""
    self.table.grad = None
    return await own(self, *args, **options)


async def mean(own: Any, self: ToyTrainer, batch: Any, *args: Any, **options: Any) -> Any:
    """The gradient is of the mean over datums."""
    before = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad.clone()
    output = await own(self, batch, *args, **options)
    assert self.table.grad is not None
    self.table.grad = before + (self.table.grad - before) / len(batch)
    return output


async def positive(own: Any, self: ToyTrainer, batch: Any, *args: Any, **options: Any) -> Any:
    """Weights are taken for a mask."""
    inputs = [{**d.loss_inputs, "weights": np.maximum(d.loss_inputs["weights"], 0)} for d in batch]
    return await own(self, [replace(d, loss_inputs=i) for d, i in zip(batch, inputs, strict=True)], *args, **options)


async def newest_weights(own: Any, self: ToyGenerator, *args: Any, policy: Any = None, **options: Any) -> Any:
    """A frozen version is the newest one of its adapter."""
    newest = max((known for known in self.tables if known and policy and known[0] == policy[0]), default=policy)
    return await own(self, *args, policy=newest, **options)


async def hot(own: Any, self: ToyGenerator, *args: Any, **options: Any) -> Any:
    """Log-probs of samples are those of another temperature."""
    found = await own(self, *args, **options)
    return [replace(each, logprobs=tuple(p / 2 for p in each.logprobs)) for each in found]


async def only_weights(own: Any, self: ToyTrainer, path: Path, **options: Any) -> Any:
    """Moments of the optimizer are not loaded."""
    return await own(self, path, weights_only=True)


async def shared_gradient(own: Any, self: ToyTrainer, params: Any) -> Any:
    """A step empties the gradients of all adapters."""
    output = await own(self, params)
    for other in self.host.adapters.values():
        other.table.grad = None
    return output


def unclipped(own: Any, name: str, config: Any) -> Any:
    """PPO without its clipping."""
    return own("importance_sampling") if name == "ppo" else own(name, config)


def first_answer(own: Any, self: Any, key: Any, owner: str, digest: bytes) -> Any:
    """A number that was used gives the result of then, whoever asks."""
    return own(self, key, owner, b"")


def encoded(own: Any, batch: Any, logprobs: Any, metrics: Any) -> Any:
    """Log-probs are a little too large."""
    return own(batch, [each + 1e-4 for each in logprobs], metrics)


def wrapped(own: Any, self: ToyTrainer, datum: Any) -> Any:
    """Positions beyond half of the context count from 0 again."""
    found = own(self, datum)
    return torch.cat([found[: CONTEXT // 2], found[: max(0, len(found) - CONTEXT // 2)]])


async def lenient(own: Any, self: ToyTrainer, batch: Any, *args: Any, **options: Any) -> Any:
    """Any token is taken."""
    targets = [d.loss_inputs | {"target_tokens": d.loss_inputs["target_tokens"].clip(0, VOCAB - 1)} for d in batch]
    taken = [replace(d, tokens=d.tokens.clip(0, VOCAB - 1), loss_inputs=i) for d, i in zip(batch, targets, strict=True)]
    return await own(self, taken, *args, **options)


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "calls change places": ("order", newest_call_first, "after step"),
    "an accumulation is dropped": ("accumulation", around(ToyTrainer, "forward_backward", forgetful), "calls of"),
    "means": ("sums", around(ToyTrainer, "forward_backward", mean), "a datum twice"),
    "no clipping": (
        "losses",
        around(wire, "get_loss", unclipped),
        "ppo",
    ),
    "no negative weights": ("custom", around(ToyTrainer, "forward_backward", positive), "less that of NumPy"),
    "the old learning rate": ("optimizer", old_learning_rate, "learning_rate 0 after another"),
    "one beta1": ("optimizer", with_params(beta1=0.9), "beta1 0.5"),
    "one beta2": ("optimizer", with_params(beta2=0.95), "beta2 0.3"),
    "one eps": ("optimizer", with_params(eps=1e-8), "eps large"),
    "no weight decay": ("optimizer", with_params(weight_decay=0.0), "weight_decay"),
    "no gradient clipping": ("optimizer", with_params(grad_clip_norm=0.0), "grad_clip_norm 0.5"),
    "frozen samplers move": ("samplers", around(ToyGenerator, "generate", newest_weights), "later"),
    "log-probs of another temperature": ("sampling", around(ToyGenerator, "generate", hot), "sampler and trainer"),
    "no moments": ("resume", around(ToyTrainer, "load_checkpoint", only_weights), "two steps later"),
    "the other's results": ("two-writers", around(answers.Answers, "open", first_answer), "its own result"),
    "one gradient for all": ("isolation", around(ToyTrainer, "optim_step", shared_gradient), "as if alone"),
    "no owners": ("users", around(access, "check_owner", lambda own, *args: None), "what is another's"),
    "log-probs off by 1e-4": ("logprobs", around(training_client, "encode_output", encoded), "trainer"),
    "positions wrap": ("context", around(ToyTrainer, "_logprobs", wrapped), "trainer"),
    "any token": ("bad-input", around(ToyTrainer, "forward_backward", lenient), "beyond the vocabulary: accepted"),
}
"""What is wrong -> the check that is for it, how it is planted, and what the check says."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_its_check(
    server: RunningServer, model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    name, plant, says = FAULTS[fault]
    bench = Bench(command(server, model))
    plant(monkeypatch)
    result = judged(bench, name)
    assert (result["verdict"], says in result["says"]) == ("failed", True), result


def test_every_check_has_a_fault() -> None:
    assert {name for name, *_ in FAULTS.values()} == set(CHECKS)


def test_what_does_not_apply_says_so(server: RunningServer) -> None:
    settings = CheckTinker(url=server.url, key=server.keys.add("ann"), vocab_size=VOCAB)
    bench = Bench(settings)
    bench.context = None
    for name, option in (("users", "--other-key"), ("logprobs", "--model"), ("context", "--context")):
        result = judged(bench, name)
        assert result["verdict"] == "not applicable"
        assert option in result["says"]


def test_mistakes_are_named(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check-tinker", server.url, "--only", "no-check"])
    assert main() == 2
    assert "--only has 'no-check'" in capsys.readouterr().out
