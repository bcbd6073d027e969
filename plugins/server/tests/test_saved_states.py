"""Checkpoints through the official SDK: saved, listed, resumed by another client and by another server, deleted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.sdk import new_client, scores, train

tinker: Any = pytest.importorskip("tinker")


def test_a_restarted_server_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        training = new_client(server)
        train(training, 2)
        path = training.save_state("step-2", user_metadata={"note": "x"}).result().path
        train(training)
        unbroken = scores(training)
    with running_server(tmp_path) as server:
        service = server.client()
        resumed = service.create_training_client_from_state_with_optimizer(path, base_model="toy").result()
        train(resumed)
        np.testing.assert_allclose(scores(resumed), unbroken, rtol=1e-6)
        reset = service.create_training_client_from_state(path, base_model="toy").result()
        train(reset)
        assert scores(reset) != pytest.approx(unbroken, rel=1e-6)  # without the optimizer's moments
        run = tinker.RestClient(base_url=server.url, api_key="tml-local").get_training_run_by_tinker_path(path).result()
        assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("toy", 4, path)


def test_a_loaded_state_replaces_weights_but_no_snapshot(server: RunningServer) -> None:
    training: Any = new_client(server)
    train(training)
    path, saved = training.save_state("one").result().path, scores(training)
    train(training)
    snapshot = training.save_weights_and_get_sampling_client().result()
    of_snapshot = scores(snapshot)
    with pytest.warns(FutureWarning):
        training.load_state_with_optimizer(path).result()
    assert scores(training) == saved
    train(training)  # the same number of steps as the snapshot, and other weights
    train(training)
    training.save_weights_and_get_sampling_client().result()
    assert scores(snapshot) == of_snapshot


def test_a_name_is_not_overwritten_unless_it_is_asked_for(server: RunningServer) -> None:
    training = new_client(server)
    training.save_state("last").result()
    train(training)
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name"):
        training.save_state("last").result()
    path = training.save_state("last", overwrite=True).result().path
    again = server.client().create_training_client_from_state(path, base_model="toy").result()
    assert scores(again) == scores(training)


@pytest.mark.parametrize("name", ["../escape", "a/b", "..", "", ".hidden", "x" * 200, "new\nline"])
def test_a_name_cannot_leave_the_servers_folder(server: RunningServer, name: str) -> None:
    training = new_client(server)
    with pytest.raises(tinker.RequestFailedError, match="must start with a letter or a digit"):
        training.save_state(name).result()
    assert scores(training)


@pytest.mark.parametrize("path", ["tinker://no:train:0/weights/x", "tinker://../weights/x", "/etc/passwd"])
def test_a_path_without_a_checkpoint_is_the_users_mistake(server: RunningServer, path: str) -> None:
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError, ValueError), match=r"path|checkpoint|run"):
        server.client().create_training_client_from_state(path, base_model="toy").result()
    with pytest.raises((tinker.APIStatusError, ValueError), match=r"path|checkpoint"):
        server.client().create_sampling_client(model_path=path).result()


def test_checkpoints_are_listed_and_deleted_and_expire(server: RunningServer) -> None:
    training, rest = new_client(server), tinker.RestClient(base_url=server.url, api_key="tml-local")
    kept = training.save_state("kept", ttl_seconds=7200).result().path
    deleted = training.save_weights_for_sampler("deleted").result().path
    run = training.model_id
    listed = {checkpoint.tinker_path: checkpoint for checkpoint in rest.list_checkpoints(run).result().checkpoints}
    assert {path: c.checkpoint_type for path, c in listed.items()} == {kept: "training", deleted: "sampler"}
    assert listed[kept].expires_at is not None
    assert listed[kept].size_bytes > 0
    rest.delete_checkpoint_from_tinker_path(deleted).result()
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
    (left,) = rest.list_checkpoints(run).result().checkpoints
    assert (left.tinker_path, left.expires_at) == (kept, None)
    assert run in {found.training_run_id for found in rest.list_training_runs(limit=100).result().training_runs}
    with pytest.raises(tinker.APIStatusError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(deleted).result()
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds is 5"):
        training.save_state("short", ttl_seconds=5).result()
