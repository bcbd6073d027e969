"""AdamW and Muon over plain or sharded float32 parameters. Every hyper-parameter comes with the step.

Muon replaces the mean of a matrix's gradient by the nearest matrix whose singular values are about 1, found by a
polynomial of products of the matrix with itself: https://kellerjordan.github.io/posts/muon. A sharded matrix is
gathered for that, and every rank that holds a part computes the whole; a stack of experts, sharded by experts, is not.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rl.types import AdamParams, MuonParams
from trainer.engines.pytorch.engine_state import HostMemory

PIECE_BYTES = 256 << 20
"""Moments in float32 that are updated at a time while they are kept elsewhere, or in another dtype."""

States = dict[torch.nn.Parameter, dict[str, torch.Tensor]]
"""Moments and step count of each parameter. Below 0, `step` counts Muon's steps, whose state has no second moment."""

_IS_MUON = "is_muon"
"""Key of a parameter group whose matrices take Muon's step."""
_NO_HIDDEN_MATRIX = ("embed", "wte", "wpe", "lm_head", "score", "norm", "bias", "scale")
"""Words in names of parameters that are no hidden layer's matrix, whatever their shape: a table has a row for each
token or position, a head one for each token, and the biases, norms and scales of several experts or heads are
stacked."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 for the singular values, from the page cited above."""
_SMALLEST_NORM = 1e-7
_LARGEST_NORM = 1e19
"""The largest norm of a clipped gradient. The square of a larger number overflows float32, and its parameter would
never move again."""
_LARGEST_FACTOR = torch.finfo(torch.float32).max
_MAX_BETA2 = 0.99  # in bfloat16, smaller changes of the second moment than this leaves are rounded away


class Optimizer:
    """Owns the moments and step counts. Keeps no hyper-parameter from one step to the next."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], replicas: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        """`parameters` by Hugging Face name. One that is not a DTensor is held alike by `replicas` ranks.

        Moments are kept in `dtype`, and updated in float32.
        """
        self._dtype = dtype
        self._replicas = replicas
        self._parameters = parameters
        self._host = HostMemory()
        self._of_muon = set[torch.nn.Parameter]()
        """Those whose last step was Muon's: `States` without a look at the device."""
        self._adamw = torch.optim.AdamW(parameters.values(), lr=0.0, fused=True)

    def check(self, params: AdamParams, device: torch.device) -> None:
        """Raises ValueError, on every rank, for a learning-rate multiplier that matches no parameter of any rank.

        And for a beta2 that the moments' dtype does not allow. A collective if there are multipliers, because a rank
        may hold the parameters of a few layers only.
        """
        if self._dtype == torch.bfloat16 and params.beta2 > _MAX_BETA2:
            raise ValueError(
                f"AdamParams.beta2 is {params.beta2}; with TrainerConfig.moments_dtype 'bfloat16' it must be at most "
                f"{_MAX_BETA2}, because bfloat16 rounds smaller changes of the second moment away"
            )
        patterns = list(params.learning_rate_multipliers)
        if not patterns:
            return
        found = [any(fnmatchcase(name, pattern) for name in self._parameters) for pattern in patterns]
        num_ranks = torch.tensor(found, dtype=torch.float32, device=device)
        if dist.is_initialized():
            dist.all_reduce(num_ranks)
        for pattern, ranks in zip(patterns, num_ranks.tolist(), strict=True):
            if not ranks:
                names = list(self._parameters)
                some = ", ".join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
                raise ValueError(
                    f"AdamParams.learning_rate_multipliers[{pattern!r}] matches no parameter; names are such as {some}"
                )

    def step(self, params: AdamParams, grad_scale: float, *, fetch_to: torch.device | None = None) -> float:
        """Scales, clips and applies the gradient. Returns its norm after scaling, before clipping.

        If it is not finite, or too large for moments in float32, nothing is applied, and NaN or infinity is returned.
        With `fetch_to`, moments are on the host: a few parameters' moments at a time are brought to this device,
        updated and sent back. So are moments that are not in float32.
        """
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = abs(grad_scale) * math.sqrt(_square_sum(grads, self._replicas))
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        factor = grad_scale * clip
        if not norm * clip <= _LARGEST_NORM or abs(factor) > _LARGEST_FACTOR:
            return norm + math.inf  # NaN stays NaN
        if factor != 1.0:
            torch._foreach_mul_([_local(grad) for grad in grads], factor)  # pyright: ignore[reportPrivateUsage]
        groups = self._groups(params)
        if fetch_to is None and self._dtype == torch.float32:
            self._update(groups, params)
        else:
            self._step_in_pieces(list(_pieces(groups)), params, fetch_to)
        return norm

    def _update(self, groups: Sequence[dict[str, Any]], params: AdamParams) -> None:
        """One step of these groups' parameters, with the moments where they are."""
        self._adamw.param_groups = [group for group in groups if not group[_IS_MUON]]
        adamws = {parameter for group in groups if not group[_IS_MUON] for parameter in group["params"]}
        for parameter in self._of_muon & adamws:
            for value in self._adamw.state[parameter].values():  # AdamW divides by a moment that Muon does not have
                value.zero_()
        self._of_muon -= adamws
        self._adamw.step()
        if not isinstance(params, MuonParams):
            return
        for matrix, rate in ((each, group["lr"]) for group in groups if group[_IS_MUON] for each in group["params"]):
            if matrix.grad is None:
                continue
            state = self._adamw.state[matrix]
            if not state:  # as AdamW makes one; the second moment is for a later step of AdamW
                state["step"] = torch.zeros((), device=matrix.device)
                state |= {name: torch.zeros_like(matrix, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            state["step"].clamp_(max=0).sub_(1)
            self._of_muon.add(matrix)
            _muon_update(matrix, matrix.grad, state["exp_avg"], params, rate)

    def _step_in_pieces(
        self, pieces: Sequence[dict[str, object]], params: AdamParams, device: torch.device | None
    ) -> None:
        """Updates a piece while the next one comes and the last one goes back, so three are on the device at most."""
        on_gpu = device is not None and device.type == "cuda"
        incoming, outgoing = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if on_gpu else (None, None)
        back: torch.Event | None = None
        ahead = self._fetch(pieces[0], device)
        for piece, following in itertools.zip_longest(pieces, pieces[1:]):
            at_home = ahead
            with _beside(incoming):
                ahead = {} if following is None else self._fetch(following, device)
            self._update([piece], params)
            if incoming is not None and outgoing is not None:
                self._hold(piece, outgoing)
            with _beside(outgoing):
                self._return(at_home, on_host=device is not None)
            if incoming is not None and outgoing is not None:
                if back is not None:
                    back.synchronize()
                back = outgoing.record_event()
                torch.cuda.current_stream().wait_stream(incoming)
        if outgoing is not None:
            outgoing.synchronize()  # the host may read the moments now

    def _hold(self, piece: Mapping[str, Any], stream: torch.cuda.Stream) -> None:
        """Keeps the memory of moments until their computation and their copies on `stream`, which waits, are done."""
        stream.wait_stream(torch.cuda.current_stream())
        for value in (value for parameter in piece["params"] for value in self._adamw.state[parameter].values()):
            for user in (torch.cuda.current_stream(), stream):
                _local(value).record_stream(user)

    def _fetch(self, piece: Mapping[str, Any], device: torch.device | None) -> States:
        """Brings moments to the device in float32; None is where they are. Returns them as they are kept."""
        at_home: States = {parameter: dict(self._adamw.state[parameter]) for parameter in piece["params"]}
        for parameter, state in at_home.items():
            self._adamw.state[parameter] = {
                name: value.to(device or value.device, non_blocking=True).float() for name, value in state.items()
            }
        return at_home

    def _return(self, at_home: States, *, on_host: bool) -> None:
        for parameter, state in at_home.items():
            for name, value in self._adamw.state[parameter].items():
                cast = value if name == "step" else value.to(self._dtype)
                # The first step makes a state, which has no memory of its own yet.
                home = state.get(name)
                if home is not None:
                    home.copy_(cast, non_blocking=True)
                self._adamw.state[parameter][name] = (
                    home if home is not None else self._host.keep(cast) if on_host else cast
                )

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns moments and step count of every parameter, by name. Allocates zeros before the first step."""
        return {name: self._state_of(parameter) for name, parameter in self._parameters.items()}

    def to(self, device: torch.device) -> None:
        """Moves all moments and step counts."""
        move = self._host.mover(device)
        for state in self._adamw.state.values():
            state.update({name: move(value) for name, value in state.items()})

    def loaded(self) -> None:
        """Must be called after the tensors of `state` were filled."""
        self._of_muon = {parameter for parameter, state in self._adamw.state.items() if state["step"] < 0}
        self.forget_unused()

    def forget_unused(self) -> None:
        """Frees the zeros that `state` allocated, if no step has been taken."""
        if not any(bool(state["step"]) for state in self._adamw.state.values()):
            self.reset()

    def reset(self) -> None:
        """Drops all moments and step counts."""
        self._adamw.state.clear()
        self._of_muon.clear()

    def _state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        if not self._adamw.state[parameter]:
            moments = {
                name: torch.zeros_like(parameter, dtype=self._dtype, requires_grad=False)
                for name in ("exp_avg", "exp_avg_sq")
            }
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self._adamw.state[parameter] = {"step": step, **moments}
        return self._adamw.state[parameter]

    def _groups(self, params: AdamParams) -> list[dict[str, Any]]:
        """One group per kind of step, learning-rate multiplier and mesh, because the fused step cannot mix them."""
        members: dict[tuple[bool, float, DeviceMesh | None], list[torch.nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            multiplier = _multiplier(name, params.learning_rate_multipliers)
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            is_muon = isinstance(params, MuonParams) and is_hidden_matrix(name, parameter)
            members.setdefault((is_muon, multiplier, mesh), []).append(parameter)
        return [
            {
                **self._adamw.defaults,
                "params": parameters,
                "lr": params.learning_rate * multiplier,
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay,
                _IS_MUON: is_muon,
            }
            for (is_muon, multiplier, _), parameters in members.items()
        ]


def _beside(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Within the block, a GPU's work is queued on another stream than its computation."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _pieces(groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Cuts groups into pieces of parameters whose moments take at most `PIECE_BYTES`, or of one parameter."""
    for group in groups:
        piece: list[torch.nn.Parameter] = []
        num_bytes = 0
        for parameter in group["params"]:
            moments = 2 * _local_bytes(parameter)
            if piece and num_bytes + moments > PIECE_BYTES:
                yield {**group, "params": piece}
                piece, num_bytes = [], 0
            piece.append(parameter)
            num_bytes += moments
        yield {**group, "params": piece}


def _local_bytes(parameter: torch.Tensor) -> int:
    return _local(parameter).nbytes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _multiplier(name: str, multipliers: Mapping[str, float]) -> float:
    return next((factor for pattern, factor in multipliers.items() if fnmatchcase(name, pattern)), 1.0)


def _square_sum(grads: Sequence[torch.Tensor], plain_replicas: int) -> float:
    """Sums squares over all ranks in float64. In float32, a sum over 1e8 elements is wrong in the fifth digit."""
    total = torch.zeros((), dtype=torch.float64)
    if grads:
        # One call for all: a call for each gradient would be hundreds of kernels, and milliseconds of the host.
        norms = torch._foreach_norm([_local(grad) for grad in grads], 2, dtype=torch.float64)  # pyright: ignore[reportPrivateUsage]
        replicas = torch.tensor([_replicas(grad, plain_replicas) for grad in grads], device=norms[0].device)
        total = (torch.stack(norms).square() / replicas).cumsum(0)[-1]
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def _replicas(grad: torch.Tensor, plain_replicas: int) -> int:
    """How many ranks have the same shard. Each adds its square to the sum over ranks, so it counts for one part."""
    if not isinstance(grad, DTensor):
        return plain_replicas
    placements = enumerate(grad.placements)
    return math.prod(grad.device_mesh.size(i) for i, placement in placements if placement.is_replicate())


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon updates the parameter of this Hugging Face name: a matrix, or a stack of experts' matrices."""
    of_experts = parameter.ndim == 3 and "expert" in name
    is_matrix = (parameter.ndim == 2 or of_experts) and min(parameter.shape[-2:]) > 1
    return is_matrix and not any(word in name for word in _NO_HIDDEN_MATRIX)


@torch.no_grad()
def _muon_update(
    matrix: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, params: MuonParams, learning_rate: float
) -> None:
    """Updates `matrix` [..., m, n] and `mean`, its gradient's running mean, in place."""
    local, gradient, average = (_local(each) for each in (matrix, grad, mean))
    average.lerp_(gradient, 1 - params.beta1)
    direction = gradient.lerp(average, params.beta1) if params.nesterov else average
    size = 0.2 * math.sqrt(max(matrix.shape[-2:]))
    local.mul_(1 - learning_rate * params.weight_decay)
    local.add_(_orthogonal_part(matrix, direction, params.num_iterations), alpha=-learning_rate * size)


def _orthogonal_part(matrix: torch.Tensor, direction: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """This rank's part of the orthogonalised direction, of which `direction` is this rank's part."""
    if not isinstance(matrix, DTensor):
        return _orthogonalized(direction, num_iterations)
    mesh, placements = matrix.device_mesh, matrix.placements
    if matrix.ndim == 3 and all(each.is_replicate() or each.is_shard(0) for each in placements):
        return _orthogonalized(direction, num_iterations)
    shape, stride = matrix.shape, matrix.stride()
    sharded = DTensor.from_local(direction, mesh, placements, run_check=False, shape=shape, stride=stride)
    whole = _orthogonalized(sharded.full_tensor(), num_iterations)
    return (
        DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        .redistribute(mesh, placements)
        .to_local()
    )


def _orthogonalized(matrix: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """[..., m, n] -> the same singular vectors with singular values of about 1, by Newton-Schulz iterations."""
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix  # products of the shorter side cost less
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    a, b, c = _QUINTIC
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x
