"""Full fine-tuning (`rank=0`): a trainer and a generator of a client's own, and one version at a time."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from generator.config import GeneratorConfig
from ownloop_server.config import ServeConfig
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import new_client, scores, train

tinker: Any = pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), num_whole=1) as running:
        yield running


def test_a_sampling_client_keeps_its_version_until_the_next(server: RunningServer) -> None:
    with server.client() as service:
        training = service.create_lora_training_client("toy", rank=0).result()
        adapter, base = new_client(server), service.create_sampling_client(base_model="toy").result()
        untrained = scores(base)
        train(training)
        info = training.get_info()
        assert (info.is_lora, info.lora_rank) == (False, None)
        first = training.save_weights_and_get_sampling_client().result()
        before = scores(training)
        train(training)
        assert scores(first) == pytest.approx(before)
        second = training.save_weights_and_get_sampling_client().result()
        assert scores(second) == pytest.approx(scores(training))
        with pytest.raises(tinker.RequestFailedError, match="no longer kept: the server holds 1 version"):
            scores(first)
        assert scores(base) == scores(adapter) == untrained
        rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
        assert rest.get_training_run(training.model_id).result().is_lora is False


def test_places_are_limited_and_a_new_client_begins_at_the_base(server: RunningServer) -> None:
    with server.client() as service:
        training = service.create_lora_training_client("toy", rank=0).result()
        train(training)
        with pytest.raises(tinker.RequestFailedError, match=r"all 1 places.*--full"):
            server.client().create_lora_training_client("toy", rank=0).result()
        assert scores(training)
    with server.client() as service:
        again = service.create_lora_training_client("toy", rank=0).result()
        assert scores(again) == scores(service.create_sampling_client(base_model="toy").result())
    assert not server.host.adapters.keys() & {f"full-{number}" for number in range(10)}


def test_states_of_all_weights_are_saved_and_resumed(server: RunningServer) -> None:
    with server.client() as service:
        training = service.create_lora_training_client("toy", rank=0).result()
        train(training)
        path = training.save_state("one").result().path
        weights = training.save_weights_for_sampler("one").result().path
        sampler = service.create_sampling_client(model_path=weights).result()
        saved = scores(training)
        assert scores(sampler) == pytest.approx(saved)
        train(training)
        assert scores(sampler) == pytest.approx(saved)
        unbroken = scores(training)
        with pytest.raises((tinker.APIStatusError, ValueError), match="until its next optim_step"):
            service.create_sampling_client(model_path=weights).result()
    with server.client() as service:
        with pytest.raises((tinker.APIStatusError, ValueError), match="make a training client of the path"):
            service.create_sampling_client(model_path=weights).result()
        resumed: Any = service.create_training_client_from_state_with_optimizer(path).result()
        assert scores(resumed) == pytest.approx(saved)
        first = resumed.save_weights_and_get_sampling_client().result()
        train(resumed)
        assert scores(resumed) == pytest.approx(unbroken)
        assert scores(first) == pytest.approx(saved)
        with pytest.warns(FutureWarning):
            resumed.load_state(path).result()  # the version counts from 0 again
        sampler = resumed.save_weights_and_get_sampling_client().result()
        assert scores(sampler) == pytest.approx(saved)


def test_without_room_the_error_names_the_flag(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, pytest.raises(tinker.RequestFailedError, match="serve --full 1"):
        server.client().create_lora_training_client("toy", rank=0).result()


def test_several_whole_models_push_through_shared_memory_alone() -> None:
    with pytest.raises(ValueError, match=r"full is 2 and generator\.weight_transport is 'torchstore'"):
        ServeConfig(full=2, generator=GeneratorConfig(weight_transport="torchstore"))
