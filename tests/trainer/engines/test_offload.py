"""What is moved when, with devices that no machine needs to have: only their names matter here."""

import pytest
import torch

from trainer.engines.pytorch.offload import Part, Placement

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def moves() -> list[tuple[Part, str]]:
    return []


@pytest.fixture
def placement(moves: list[tuple[Part, str]]) -> Placement:
    return Placement(DEVICE, lambda part, device: moves.append((part, device.type)))


def test_parts_rest_where_they_were_sent_and_come_in_while_used(
    placement: Placement, moves: list[tuple[Part, str]]
) -> None:
    placement.rest(["model", "optimizer"], "cpu")
    placement.rest(["model"], "cpu")
    assert moves == [("model", "cpu"), ("optimizer", "cpu")]
    moves.clear()
    with placement.resident("model", "gradients"):
        assert (placement.device_of("model"), placement.device_of("optimizer")) == (DEVICE, HOST)
        with placement.resident("model", "optimizer"):
            pass
    assert moves == [("model", "cuda"), ("optimizer", "cuda"), ("optimizer", "cpu"), ("model", "cpu")]


def test_what_is_in_use_leaves_when_its_block_ends(placement: Placement, moves: list[tuple[Part, str]]) -> None:
    with placement.resident("model"):
        placement.rest(["model"], "cpu")
        assert not moves
    assert moves == [("model", "cpu")]
    placement.rest(["model"], "cuda")
    assert placement.device_of("model") == DEVICE


def test_parts_go_back_when_the_block_raises(placement: Placement) -> None:
    placement.rest(["model"], "cpu")
    with pytest.raises(ArithmeticError), placement.resident("model"):
        raise ArithmeticError
    assert placement.device_of("model") == HOST


def test_without_an_accelerator_nothing_moves(moves: list[tuple[Part, str]]) -> None:
    placement = Placement(HOST, lambda part, device: moves.append((part, device.type)))
    placement.rest(["model"], "cpu")
    with placement.resident("model"):
        pass
    assert not moves
    with pytest.raises(ValueError, match="device is 'cuda'; this trainer's state can be on 'cpu'"):
        placement.rest(["model"], "cuda")
