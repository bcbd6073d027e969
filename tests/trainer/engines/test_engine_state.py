"""What is moved when, with devices that no machine needs to have: only their names matter here."""

import pytest
import torch

from trainer.engines.pytorch.engine_state import Offload, Part

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def moves() -> list[tuple[Part, str]]:
    return []


@pytest.fixture
def offload(moves: list[tuple[Part, str]]) -> Offload:
    return Offload(DEVICE, lambda part, device: moves.append((part, device.type)))


def test_parts_rest_where_they_were_sent_and_come_in_while_used(
    offload: Offload, moves: list[tuple[Part, str]]
) -> None:
    offload.rest(["model", "optimizer"], "cpu")
    offload.rest(["model"], "cpu")
    assert moves == [("model", "cpu"), ("optimizer", "cpu")]
    moves.clear()
    with offload.resident("model", "gradients"):
        assert (offload.device_of("model"), offload.device_of("optimizer")) == (DEVICE, HOST)
        with offload.resident("model", "optimizer"):
            pass
    assert moves == [("model", "cuda"), ("optimizer", "cuda"), ("optimizer", "cpu"), ("model", "cpu")]


def test_what_is_in_use_leaves_when_its_block_ends(offload: Offload, moves: list[tuple[Part, str]]) -> None:
    with offload.resident("model"):
        offload.rest(["model"], "cpu")
        assert not moves
    assert moves == [("model", "cpu")]
    offload.rest(["model"], "cuda")
    assert offload.device_of("model") == DEVICE


def test_parts_go_back_when_the_block_raises(offload: Offload) -> None:
    offload.rest(["model"], "cpu")
    with pytest.raises(ArithmeticError), offload.resident("model"):
        raise ArithmeticError
    assert offload.device_of("model") == HOST


def test_without_an_accelerator_nothing_moves(moves: list[tuple[Part, str]]) -> None:
    offload = Offload(HOST, lambda part, device: moves.append((part, device.type)))
    offload.rest(["model"], "cpu")
    with offload.resident("model"):
        pass
    offload.rest(["model"], "cuda")
    with offload.resident("model"):
        pass
    assert not moves
    with pytest.raises(ValueError, match="device is 'gpu'; it must be 'cpu' or 'cuda'"):
        offload.rest(["model"], "gpu")
