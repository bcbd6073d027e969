"""Who runs on which hosts and GPUs, and what is refused. No host is real."""

import asyncio
from pathlib import Path

import pytest

from controller.launching.assignments import Assignments
from controller.processes.errors import HostLostError
from generator.config import GeneratorConfig
from ownloop_hosts import cluster
from ownloop_hosts.cluster import Cluster, different_versions
from ownloop_hosts.connections import Address, open_server, read_from
from ownloop_hosts.host_groups import WorkerHosts
from ownloop_hosts.remote_host import Host, HostError
from plugins.hosts.tests.fake_hosts import fake_host
from tests.waiting import run_virtual
from trainer.config import TrainerConfig


def cluster_of(**groups: tuple[Host, ...]) -> Cluster:
    """A cluster with these groups."""
    return Cluster(groups, {}, "me", 20.0)


def test_ranks_are_spread_evenly_over_hosts() -> None:
    hosts = (fake_host("n1", gpus="0123"), fake_host("n2", gpus="4567"))
    place = cluster_of(trainer=hosts).trainer("trainer", TrainerConfig(data_parallel_shard=4))
    assert place is not None
    assert [place.coordinates(rank, 4) for rank in (1, 2)] == [
        {"hosts": 0, "gpus": 1},
        {"hosts": 1, "gpus": 0},
    ]
    logs = [Path(f"/run/logs/trainer-{rank}.log") for rank in range(4)]
    env = [place.env(rank, logs) for rank in range(4)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in env] == ["0,1", "0,1", "4,5", "4,5"]
    assert {each["GLOO_SOCKET_IFNAME"] for each in env} == {"eth1"}
    assert place.log_file(3, logs) == Path("/tmp/logs/trainer-3.log")


def test_roles_without_a_group() -> None:
    made = cluster_of(trainer=(fake_host("n1"),))
    reference = made.trainer("reference", TrainerConfig())
    assert reference is not None
    assert reference.hosts[0].name == "n1"
    assert made.generators("generator", GeneratorConfig()) is None
    assert made.has_gpu("generator", is_trainer=False) is None
    mixed = cluster_of(trainer=(fake_host("n1", gpus=("0",)), fake_host("n2")))
    with pytest.raises(ValueError, match="hosts of 'trainer' are n1, n2, and n2 has no GPU; all hosts of a mesh must"):
        mixed.trainer("trainer", TrainerConfig(data_parallel_shard=2))


def test_replicas_take_turns_on_hosts_and_move_when_one_is_lost() -> None:
    hosts = (fake_host("n1", gpus="0"), fake_host("n2", gpus="01"))
    made, config = cluster_of(generator=hosts), GeneratorConfig(num_replicas=2)
    first, second = made.generators("generator", config) or []
    assert [first.names, second.names] == ["n1", "n2"]
    assert asyncio.run(made.replaced(first, "generator", 0, config)) is first
    hosts[0].lose("it is gone")
    moved = asyncio.run(made.replaced(first, "generator", 0, config))
    assert moved.names == "n2"
    assert moved.gpus == (("1",),)  # the other replica has GPU 0


def test_replicas_are_spread_over_more_hosts_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = list[Host]()

    async def connect(address: Address, *_: object) -> Host:
        if not returned:
            raise HostError(f"{address.host}: no worker listens")
        return returned[0]

    monkeypatch.setattr(cluster, "connect_host", connect)
    hosts = tuple(fake_host(f"n{index}", gpus="01") for index in range(4))
    config = GeneratorConfig(num_replicas=2, tensor_parallel=2, evaluator=True)
    made = Cluster({"generator": hosts}, {host: Address("tcp", host.name, 1) for host in hosts}, "me", 20.0)
    used = made.generators("generator", config) or []
    assert [each.names for each in used] == ["n0, n1", "n2, n3", "n0, n1"]
    second = used[1]
    assert [each.gpus for each in used] == [(("0",), ("0",))] * 2 + [(("1",), ("1",))]
    assert asyncio.run(made.replaced(second, "generator", 1, config)) is second
    hosts[3].lose("it is gone")  # the two GPUs of n2 suffice
    moved = asyncio.run(made.replaced(second, "generator", 1, config))
    assert (moved.names, moved.gpus) == ("n2", (("0", "1"),))
    returned.append(fake_host("n3", gpus="0"))
    back = asyncio.run(made.replaced(second, "generator", 1, config))
    assert (back.names, back.gpus) == ("n2, n3", (("0",), ("0",)))
    with pytest.raises(ValueError, match="'other' has 4 hosts, num_replicas 3 and tensor_parallel 2; set num_replicas"):
        cluster_of(other=hosts).generators("other", GeneratorConfig(num_replicas=3, tensor_parallel=2))


def test_a_lost_host_is_left_out_if_the_ranks_fit_on_others() -> None:
    hosts = (fake_host("n1", gpus="01"), fake_host("n2", gpus="01"))
    hosts[0].lose("it is gone")
    made = cluster_of(trainer=hosts)
    with pytest.raises(ValueError, match=r"on host n2: 'trainer' needs 4 GPUs"):
        made.trainer("trainer", TrainerConfig(data_parallel_shard=4))
    place = cluster_of(trainer=hosts).trainer("trainer", TrainerConfig(data_parallel_shard=2))
    assert place is not None
    assert place.names == "n2"
    hosts[1].lose("it is gone too")
    with pytest.raises(HostLostError, match="no host is left"):
        cluster_of(trainer=hosts).trainer("trainer", TrainerConfig())


@pytest.mark.parametrize(
    ("group", "config", "message"),
    [
        (
            "trainer",
            TrainerConfig(data_parallel_shard=3),
            r"'trainer' has 3 ranks on the 2 hosts n1, n2; .* multiple of 2",
        ),
        ("trainer", TrainerConfig(data_parallel_shard=2, placement="colocated"), "'colocated', which is for this host"),
        ("generator", GeneratorConfig(), "'generator' has 2 hosts, num_replicas 1 and tensor_parallel 1; set num_re"),
    ],
)
def test_what_does_not_fit_is_refused(group: str, config: TrainerConfig | GeneratorConfig, message: str) -> None:
    made = cluster_of(**{group: (fake_host("n1"), fake_host("n2"))})
    with pytest.raises(ValueError, match=message):
        made.trainer(group, config) if isinstance(config, TrainerConfig) else made.generators(group, config)


def test_weights_between_hosts_do_not_go_through_shared_memory() -> None:
    n1, n2 = fake_host("n1"), fake_host("n2")
    apart, together = Assignments(), Assignments()
    apart.use(cluster_of(trainer=(n1,), generator=(n2,)))
    together.use(cluster_of(trainer=(n1,), generator=(n1,)))
    assert (apart.transport("auto"), together.transport("auto")) == ("auto", "auto")
    with pytest.raises(ValueError, match="'shared_memory', and trainer and generator are on several hosts"):
        apart.transport("shared_memory")
    for between_hosts in ("network", "nccl"):
        with pytest.raises(ValueError, match=f"'{between_hosts}', and trainer and generator are on one host"):
            together.transport(between_hosts)
    with pytest.raises(ValueError, match="'gpu_memory', and trainer and generator are on several hosts"):
        apart.transport("gpu_memory")
    for of_gpus, placed in (("gpu_memory", together), ("nccl", apart)):
        with pytest.raises(ValueError, match=f"'{of_gpus}', and the trainer's host has no GPU; use 'auto'"):
            placed.transport(of_gpus)


def test_every_host_with_generators_receives_weights() -> None:
    n1, n2, n3 = fake_host("n1"), fake_host("n2"), fake_host("n3")
    made = cluster_of(trainer=(n1,), generator=(n2,), judge=(n3,))
    made.generators("generator", GeneratorConfig())
    assert [host.name for host in made.generator_hosts()] == ["n2"]
    made.generators("judge", GeneratorConfig())
    made.generators("helper", GeneratorConfig())  # has no group, so it is on the controller's host
    assert [host.name for host in made.generator_hosts()] == ["n2", "n3", "controller"]


def test_all_hosts_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reachable = {"n1"}

    async def connect(address: Address, controller: str, lost_after_s: float) -> Host:
        if address.host not in reachable:
            raise HostError(f"{address.host}: no worker listens")
        return fake_host(address.host)

    monkeypatch.setattr(cluster, "connect_host", connect)
    monkeypatch.setattr(cluster, "prepare_transport", lambda *_: None)
    monkeypatch.setattr(cluster, "versions_here", lambda: {"torch": "2"})
    monkeypatch.setattr(cluster.KnownWorkers, "addresses", set[Address]())
    hosts = WorkerHosts({"trainer": ("n1", "n2"), "generator": ("n3",)})
    with pytest.raises(ValueError, match=r"n2: no worker listens; n3: no worker listens"):
        run_virtual(Cluster.connect(hosts))
    reachable |= {"n3"}
    with pytest.raises(ValueError, match=r"^n2: no worker listens$"):
        run_virtual(Cluster.connect(hosts))
    reachable |= {"n2"}
    assert len(run_virtual(Cluster.connect(hosts)).hosts) == 3
    reachable -= {"n2"}  # a run goes on without it
    assert [host.name for host in run_virtual(Cluster.connect(hosts)).groups["trainer"]] == ["n1"]
    reachable -= {"n3"}
    with pytest.raises(ValueError, match="n3: no worker listens"):
        run_virtual(Cluster.connect(hosts))


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "versions_here", lambda: {"torch": "3"})
    assert different_versions([fake_host("n1")]) == ["n1 has torch 2, and the controller 3"]


def test_bandwidth_counts_what_arrives() -> None:
    port = open_server("127.0.0.1", 8 << 20)
    assert read_from("127.0.0.1", port, 5.0) > 1e6
    with pytest.raises(OSError, match=r"[Rr]efused"):
        read_from("127.0.0.1", port, 5.0)  # it serves one
