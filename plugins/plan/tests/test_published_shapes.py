"""The published figures of a training step agree with each other by the formula that the benchmark uses."""

import pytest

from ownloop_plan.sizes import ModelSize
from plugins.plan.benchmarks.published_shapes import GPU, SHAPES, Shape, published_operations
from plugins.plan.tests.planned_models import write_qwen3
from rl.lora import LoRAConfig
from rl.system.hf_config import read_config, read_decoder_config


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_formula_gives_the_published_utilisation(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_qwen3(tmp_path_factory.mktemp("model"), shape.model.removeprefix("Qwen3-"))
    adapter = None
    if shape.rank is not None:
        layers = LoRAConfig(rank=shape.rank, train_unembed=False)
        adapter = ModelSize(read_decoder_config(model)).adapter(layers)
    of_token = published_operations(read_config(model), shape.length, adapter)
    assert of_token * shape.tokens_per_s / GPU.operations == pytest.approx(shape.mfu, rel=0.006)


def test_groups_fill_a_row() -> None:
    for shape in SHAPES.values():
        assert shape.num_groups * (shape.prompt + 16 * shape.answer) == shape.length
    assert (SHAPES["rl-16k"].prompt, SHAPES["rl-16k"].answer) == (1024, 960)
