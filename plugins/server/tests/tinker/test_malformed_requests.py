"""Malformed requests to real processes: `python -m pytest -m slow test_malformed_requests.py`."""

from pathlib import Path
from typing import Any

import pytest

from ownloop_server.child_server import served
from plugins.server.tests.fuzzing import Known, Sender, check_many, requests
from plugins.server.tests.sdk import datum, scores
from plugins.server.tests.tinker.conftest import FLOAT32
from rl.tiny_models import SERVABLE, tiny_llama
from tests.waiting import LIMIT_S

tinker: Any = pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")
types: Any = tinker.types


@pytest.mark.slow
def test_3000_malformed_requests_to_real_processes(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SERVABLE)
    with served(model, tmp_path, *FLOAT32, "--generator.max-model-len", "64", "--max-rank", "8") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        training = service.create_lora_training_client(str(model), rank=4).result(LIMIT_S)
        rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
        session = training.model_id.partition(":")[0]
        service.create_sampling_client(base_model=str(model)).result(LIMIT_S)
        (sampler,) = rest.get_session(session).result(LIMIT_S).sampler_ids
        base = service.create_sampling_client(base_model=str(model)).result(LIMIT_S)  # whose numbers nobody else uses
        # Numbers that jump are waited for for five minutes here, so training calls name a client that does not exist.
        known = Known(session=session, run="no:train:0", sampler=sampler, model=str(model))

        def good_call() -> None:
            before = scores(training)
            training.forward_backward([datum([2, 3, 4], [3, 4, 5])], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(LIMIT_S)
            assert scores(training) != before
            assert scores(base)

        check_many(Sender(server.url), good_call, requests(known), 3000)
        assert "restarts" not in server.said()
