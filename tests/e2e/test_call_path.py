"""What runs for a `forward_backward`, a push and a pull on real meshes: how much, and in which order."""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import pytest

from controller.handles import generator_handle, trainer_handle
from controller.launching.launcher import launch
from generator.config import GeneratorConfig
from rl.tiny_models import random_batch, tiny_llama
from tests.call_tracing import TracedCall, check_hops, traced_calls
from tests.e2e.traced_trainer import FOLDERS
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig

pytestmark = pytest.mark.e2e

LENGTHS = (3, 17, 5, 40)
MOST_FILES_OF_A_BATCH, MOST_FILES_OF_A_PULL = 5, 8
MOST_CALLS = 80


class Calls(NamedTuple):
    """What ran in this process for a batch and for a pull, and in all processes for each of the two ways."""

    batch: list[TracedCall]
    pull: list[TracedCall]
    way_of_a_batch: list[TracedCall]
    way_of_a_weight: list[TracedCall]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """Of one trainer and one generator."""
    folder = tmp_path_factory.mktemp("traced")
    model = tiny_llama(folder / "model", hidden_size=128, num_attention_heads=4, num_kv_heads=2)
    configs = TrainerConfig(compute_dtype="float32"), GeneratorConfig(dtype="float32", max_model_len=64)

    async def main() -> Calls:
        async with launch(model, *configs, folder / "logs") as (trainer, generator):
            handles: tuple[Any, Any] = trainer, generator
            meshes = [handles[0].mesh, handles[1]._replicas[0].generator.mesh]
            await meshes[0].call("trace", [()])
            with traced_calls(*FOLDERS) as batch:
                await trainer.forward_backward(random_batch(LENGTHS), "ppo")
            (of_batch,) = await meshes[0].call("traced", [()])
            await generator.pull_model_state_dict(await trainer.push_model_state_dict())  # later ones repeat its copies
            for mesh in meshes:
                await mesh.call("trace", [()])
            with traced_calls("controller") as push:
                version = await trainer.push_model_state_dict()
            with traced_calls("controller") as pull:
                await generator.pull_model_state_dict(version)
            of_ranks = [call for mesh in meshes for each in await mesh.call("traced", [()]) for call in each]
        since = max(call.at for call in of_batch)
        later = [call for call in of_ranks if call.at > since]
        return Calls(batch, pull, [*batch, *of_batch], [*push, *pull, *later])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("controller.processes.calls._TICK_S", LIMIT_S)  # looks at a slow rank's process are no calls
        patch.setattr(trainer_handle, "ACTOR", "tests.e2e.traced_trainer:TracedTrainer")
        patch.setattr(generator_handle, "ACTOR", "tests.e2e.traced_generator:TracedGenerator")
        return asyncio.run(main())


def test_few_functions_of_the_controller_run(calls: Calls) -> None:
    here = [call for call in calls.batch if call.file.startswith("controller/")]
    counts = Counter((call.file, call.function) for call in here)
    shown = "\n".join(f"{count:4} {file} {function}" for (file, function), count in counts.most_common())
    assert len({call.file for call in here}) <= MOST_FILES_OF_A_BATCH, shown
    assert len(here) <= MOST_CALLS, f"{len(here)} calls:\n{shown}"
    files = {call.file for call in calls.pull}
    assert len(files) <= MOST_FILES_OF_A_PULL, sorted(files)


def test_a_batch_goes_the_way_that_the_page_shows(calls: Calls) -> None:
    check_hops("The way of a batch", calls.way_of_a_batch)


def test_a_weight_goes_the_way_that_the_page_shows(calls: Calls) -> None:
    check_hops("The way of a weight", calls.way_of_a_weight)
