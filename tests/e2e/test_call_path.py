"""What runs for one dense `forward_backward` on a real mesh: how much of the controller, and the way that docs show."""

import asyncio
from collections import Counter

import pytest

from controller.handles import trainer_handle
from rl.tiny_models import random_batch, tiny_llama
from tests.call_tracing import TracedCall, check_hops, traced_calls
from tests.e2e.traced_trainer import FOLDERS
from trainer.config import TrainerConfig

pytestmark = pytest.mark.e2e

LENGTHS = (3, 17, 5, 40)
MOST_FILES = 5
MOST_CALLS = 80


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[TracedCall], list[TracedCall]]:
    """The calls in this process and those in the rank's."""
    folder = tmp_path_factory.mktemp("traced")

    async def main() -> tuple[list[TracedCall], list[TracedCall]]:
        config = TrainerConfig(model=tiny_llama(folder / "model"), compute_dtype="float32")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_handle, "ACTOR", "tests.e2e.traced_trainer:TracedTrainer")
            trainer = await trainer_handle.TrainerHandle.launch(config, None, folder / "logs")
        batch = random_batch(LENGTHS)
        try:
            await trainer.mesh.call("trace", [()])
            with traced_calls(*FOLDERS) as here:
                await trainer.forward_backward(batch, "ppo")
            (there,) = await trainer.mesh.call("traced", [()])
            return here, there
        finally:
            await trainer.stop()

    return asyncio.run(main())


def test_few_functions_of_the_controller_run(calls: tuple[list[TracedCall], list[TracedCall]]) -> None:
    here = [call for call in calls[0] if call.file.startswith("controller/")]
    counts = Counter((call.file, call.function) for call in here)
    shown = "\n".join(f"{count:4} {file} {function}" for (file, function), count in counts.most_common())
    assert len({call.file for call in here}) <= MOST_FILES, shown
    assert len(here) <= MOST_CALLS, f"{len(here)} calls:\n{shown}"


def test_a_batch_goes_the_way_that_the_page_shows(calls: tuple[list[TracedCall], list[TracedCall]]) -> None:
    here, there = calls
    check_hops("The way of a batch", [*here, *there])
