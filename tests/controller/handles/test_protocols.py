"""Every class that stands for a protocol has its methods with exactly the same signatures."""

import inspect

import pytest

from controller.handles.generator_handle import GeneratorHandle
from controller.handles.generator_router import GeneratorRouter
from controller.handles.offline import OfflineGenerator
from controller.handles.trainer_handle import TrainerHandle
from rl.protocols import Generator, Trainer
from tests.rl.fakes import ScriptedGenerator
from tests.trainer.engine_trainer import EngineTrainer


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [
        (Trainer, TrainerHandle),
        (Trainer, EngineTrainer),
        (Generator, GeneratorHandle),
        (Generator, GeneratorRouter),
        (Generator, OfflineGenerator),
        (Generator, ScriptedGenerator),
    ],
)
def test_signatures_are_those_of_the_protocol(protocol: type, implementation: type) -> None:
    methods = {name: method for name, method in vars(protocol).items() if inspect.iscoroutinefunction(method)}
    assert len(methods) >= 2
    for name, method in methods.items():
        found = getattr(implementation, name)
        assert inspect.iscoroutinefunction(found), name
        assert inspect.signature(found) == inspect.signature(method), name


def test_a_trainer_handle_has_no_verb_that_the_protocol_lacks() -> None:
    own = {name for name, value in vars(TrainerHandle).items() if inspect.iscoroutinefunction(value) and name[0] != "_"}
    assert own - {"stop", "take_memory", "free_memory"} == {name for name in vars(Trainer) if not name.startswith("_")}
