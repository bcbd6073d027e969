"""An engine that pulls what came over the network equals a fresh one."""

from pathlib import Path

import pytest

from ownloop_hosts.weights.receiving_process import ReceivingProcess
from plugins.hosts.tests.weights.receiving_hosts import host_entry, register
from tests.generator.engines import EngineFactory
from tests.generator.published import check_pulls
from tests.generator.served_models import served_qwen3
from tests.stores import FakeStore

pytestmark = pytest.mark.vllm


def test_pulled_weights_equal_a_fresh_engines(tmp_path: Path, build_engine: EngineFactory) -> None:
    register(store := FakeStore(), host_entry(ReceivingProcess()))
    check_pulls(served_qwen3(tmp_path / "model", tied=True), "bfloat16", "network", store, build_engine)
