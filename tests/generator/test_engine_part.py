"""A plug-in's part is checked before anything starts, and has its say in a rank's environment and engine."""

import sys
from pathlib import Path

import pytest

from generator.config import GeneratorConfig, Speculation
from generator.options import check_hardware, engine_options, generator_env
from tests.generator.served_models import served_llama
from tests.made_up_plugin import write_plugin

PART = """
from generator.engine_part import EnginePart


class Part(EnginePart):
    def check(self):
        if self.config.max_num_seqs == 7 and not self.has_gpu:
            raise ValueError(f"GeneratorConfig.max_num_seqs is 7 for {self.config.model.name}")

    def env(self):
        return {"MADE_UP": str(self.config.speculation.max_draft), "HF_HUB_OFFLINE": "2"}

    def engine_args(self):
        return {"block_size": 48}
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GeneratorConfig:
    """A configuration with a part of a made-up plug-in, and a model."""
    entries = {"generators.made_up": "made_up_part:Part", "generators.no_part": "made_up_part:EnginePart.check"}
    write_plugin(tmp_path / "site", entries, made_up_part=PART)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "made_up_part", raising=False)
    model = served_llama(tmp_path / "model", tied=True)
    return GeneratorConfig(model=model, max_num_seqs=7, speculation=Speculation(source="made_up", max_draft=3))


def test_a_part_is_checked_before_a_process_starts(made_up: GeneratorConfig) -> None:
    check_hardware(made_up, has_gpu=True)
    with pytest.raises(ValueError, match=r"GeneratorConfig.max_num_seqs is 7 for model"):
        check_hardware(made_up, has_gpu=False)


def test_a_part_sets_environment_and_options_last(made_up: GeneratorConfig) -> None:
    env = generator_env(made_up, has_gpu=False)
    assert (env["MADE_UP"], env["HF_HUB_OFFLINE"]) == ("3", "2")
    assert engine_options(made_up)["block_size"] == 48


@pytest.mark.usefixtures("made_up")
def test_what_is_no_part_of_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Speculation\.source is 'made up': not known; did you mean 'made_up'\?"):
        Speculation(source="made up")
    with pytest.raises(ValueError, match=r"'no_part' .* a subclass of EnginePart is needed"):
        check_hardware(GeneratorConfig(speculation=Speculation(source="no_part")))
