"""Losses that the Tinker SDK traces run in the server: the SDK's own results, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from tinker.types.custom_loss_input import CustomLossInputRank
from torch import Tensor

from ownloop_server.wire import traced_loss
from ownloop_shelf.traced_loss import PREFIX, TracedLoss
from plugins.server.tests.running_server import RunningServer
from plugins.server.tests.sdk import datum, new_client, scores
from rl.losses.shared import LossInputs

TOKENS, TARGETS = [2, 3, 4, 7], [3, 4, 7, 1]
Q = [-2.5, -3.0, -2.0, -2.9]
ADVANTAGES = [1.0, -2.0, 0.5, 0.0]
Result = tuple[Tensor, dict[str, Tensor]]


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, cap: Tensor) -> Result:
    """PPO with a cap of the datum's own."""
    ratio = torch.exp(logprobs - old)
    terms = torch.minimum(ratio * advantages, ratio.clamp(1 - cap, 1 + cap) * advantages)
    return -terms.sum(), {"custom/ratio:mean": ratio.mean(), "custom/high:sum": (ratio > 1.0).float().sum()}


def sequence(logprobs: Tensor, old: Tensor, advantages: Tensor, cap: Tensor) -> Result:
    """A geometric mean, slices, conditions and a running sum."""
    gap = (logprobs - old)[1:]
    ratio = torch.where(gap.abs() > cap, torch.zeros_like(gap), torch.logsumexp(gap, dim=-1) - torch.cumsum(gap, 0))
    return -(ratio * advantages[1:]).mean() * logprobs.shape[0], {"custom/all:sum": gap.pow(2).max(dim=0)[0]}


RANKS: dict[str, CustomLossInputRank] = {"logprobs": 1, "old": 1, "advantages": 1, "cap": 0}


def _request(function: Callable[..., Result], ranks: Any) -> types.CreateCustomLossRequest:
    handle = trace_loss(function, ranks, "s")
    return types.CreateCustomLossRequest(
        session_id="s", custom_loss_seq_id=0, name=handle.name, inputs=list(handle.inputs), graph=encode_graph(handle)
    )


def _traced(function: Callable[..., Result], ranks: Any = RANKS) -> TracedLoss:
    # As it comes over the wire: what JSON makes of it.
    request = types.CreateCustomLossRequest.model_validate_json(_request(function, ranks).model_dump_json())
    loss = traced_loss(request).function
    assert isinstance(loss, TracedLoss)
    return loss


def _inputs(index: Tensor, **arrays: Tensor) -> LossInputs:
    named = {f"{PREFIX}{name}": array for name, array in arrays.items()}
    return LossInputs(arrays=named, datum_index=index, num_datums=int(index.max()) + 1)


@pytest.mark.parametrize("function", [clipped, sequence])
def test_it_computes_what_the_function_computes(function: Callable[..., Result]) -> None:
    """Three datums of different lengths in one micro-batch; the middle one has no scored position."""
    numbers = torch.Generator().manual_seed(0)
    lengths, caps = (5, 0, 9), (0.1, 0.2, 0.4)
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    logprobs = torch.randn(14, generator=numbers).requires_grad_()
    old, advantages = torch.randn(2, 14, generator=numbers)
    arrays = {"old": old, "advantages": advantages, "cap": torch.tensor(caps)[index]}
    total, metrics = _traced(function)(logprobs, None, _inputs(index, **arrays))
    parts = [
        function(logprobs[index == d], old[index == d], advantages[index == d], torch.tensor(caps[d])) for d in (0, 2)
    ]
    wanted = parts[0][0] + parts[1][0]
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(
        {key: parts[0][1][key].item() + parts[1][1][key].item() for key in parts[0][1]}
    )
    ours, theirs = (torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for loss in (total, wanted))
    torch.testing.assert_close(ours, theirs)


def test_a_loss_without_the_logprobs_has_a_gradient_of_zero() -> None:
    loss = _traced(lambda logprobs, a: ((a * 2).sum(), {}), {"logprobs": 1, "a": 1})
    logprobs = torch.randn(3).requires_grad_()
    total, _ = loss(logprobs, None, _inputs(torch.zeros(3, dtype=torch.long), a=torch.ones(3)))
    total.backward()
    assert (total.item(), logprobs.grad.tolist() if logprobs.grad is not None else None) == (6, [0, 0, 0])


def test_the_sdk_runs_its_loss_in_the_server(server: RunningServer) -> None:
    """The step is that of the same loss computed in the client, and so are the metrics."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    ours, theirs = (service.create_lora_training_client("toy", rank=4, seed=0).result() for _ in range(2))
    handle = service.create_custom_loss(clipped, RANKS).result()
    assert handle.loss_id is not None
    cap = types.TensorData.from_torch(torch.tensor(0.2))
    batch = [datum(TOKENS, TARGETS, old=Q, advantages=[a * k for a in ADVANTAGES]) for k in (1.0, -2.0)]
    for each in batch:
        each.loss_fn_inputs["cap"] = cap

    def local(data: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        parts = [
            clipped(p, *(d.loss_fn_inputs[name].to_torch() for name in ("old", "advantages", "cap")))
            for d, p in zip(data, logprobs, strict=True)
        ]
        means = [part[1]["custom/ratio:mean"].item() for part in parts]
        return torch.stack([part[0] for part in parts]).sum(), {"custom/ratio:mean": float(np.mean(means))}

    before = len(server.host.calls)
    found = ours.forward_backward_custom(batch, handle).result()
    assert len(server.host.calls) == before + 1  # one pass; computed in the client, it takes two
    wanted = theirs.forward_backward_custom(batch, local).result()
    for name in ("loss:sum", "custom/ratio:mean"):
        assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-5)
    for client in (ours, theirs):
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_allclose(scores(ours), scores(theirs), rtol=1e-5)
    with pytest.raises(tinker.RequestFailedError, match="this session has made"):
        new_client(server).forward_backward(batch, "custom", {"loss_id": handle.loss_id}).result()


def _checked(request: types.CreateCustomLossRequest) -> None:
    loss = traced_loss(request).function
    assert isinstance(loss, TracedLoss)
    loss.check([], num_tokens=8)


def _node(op: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": "x", "target": target, "args": list(args), "kwargs": kwargs}


REF = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (_node("call_function", "os.system", "ls"), "'os.system', which this server does not run"),
        (_node("call_function", "torch.load", "file"), "'torch.load', which this server does not run"),
        (_node("call_method", "backward", REF), "'backward', which this server does not run"),
        (_node("get_attr", "weights"), "'weights', which this server does not run"),
        (_node("call_function", "getattr", REF, "grad_fn"), "is no argument that this server takes"),
        (_node("call_function", "operator.pow", 9, 9), "a power needs a tensor"),
        (_node("call_function", "operator.mul", [0], 9), "operands must be tensors and numbers"),
        (_node("call_function", "operator.mul", 1 << 62, 4), "an integer of more than 64 bits"),
        (_node("call_method", "new_ones", REF, [1 << 20, 1 << 20]), "makes a tensor of 1099511627776 numbers"),
        (_node("call_method", "to", REF, "cuda:0"), "is no argument that this server takes"),
        (_node("call_function", "torch.exp", {"ref": "later"}), "is no argument that this server takes"),
        (_node("call_function", "torch.exp", {"pickle": "gASV"}), "is no argument that this server takes"),
        (_node("call_function", "torch.add", REF), r"torch.add \(x\) failed"),
        (_node("call_function", "torch.exp", REF), "its loss must be a tensor of one number"),
    ],
)
def test_a_graph_that_does_anything_else_is_refused(node: dict[str, Any], message: str) -> None:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        node,
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "x"}, {"dict": {}}]}]},
    ]
    body = {"session_id": "s", "custom_loss_seq_id": 0, "name": "mine", "graph": {"format": 1, "nodes": nodes}}
    request = types.CreateCustomLossRequest.model_validate({**body, "inputs": [{"name": "logprobs", "rank": 1}]})
    with pytest.raises(ValueError, match=message):
        _checked(request)


def test_inputs_of_other_ranks_and_forms_are_named(server: RunningServer) -> None:
    with pytest.raises(ValueError, match=r"inputs of ranks \{'logprobs': 2\}; this server takes logprobs of rank 1"):
        traced_loss(_request(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 2}))
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    training = service.create_lora_training_client("toy", rank=4).result()
    loss_id = service.create_custom_loss(clipped, RANKS).result().loss_id
    assert loss_id is not None
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\].loss_fn_inputs lacks 'old'"):
        training.forward_backward([datum(TOKENS, TARGETS)], "custom", {"loss_id": loss_id}).result()
