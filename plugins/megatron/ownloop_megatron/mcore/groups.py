"""The groups of ranks among which Megatron-core divides the work.

Nothing global is set, so that a process can build one engine after the other, each in its own layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ownloop_megatron.mcore import core_api
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class RankGroups:
    """This rank's groups. Consecutive ranks are in one tensor-parallel group, or in one expert-parallel group."""

    mesh: DeviceMesh
    """The axes are `pipeline`, `tensor`, `data`. Ranks that share rows are different ranks of `data`."""
    context: dist.ProcessGroup
    """Ranks that compute the same rows together, which are some of `data`."""
    experts: DeviceMesh
    """The axes are `pipeline`, `expert_data`, `expert`."""

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.mesh.size() > 1

    @property
    def dense_mesh(self) -> DeviceMesh:
        """The ranks of this pipeline stage, among which everything but experts is sharded or replicated.

        Its axes are `tensor`, `data`: rows that tensor parallelism divides are divided again among data-parallel ranks.
        """
        return self.mesh["tensor", "data"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The ranks that hold the same experts."""
        return self.experts["expert_data"]

    @property
    def tensor(self) -> dist.ProcessGroup:
        """Ranks that share every matrix product."""
        return self.mesh.get_group("tensor")

    @property
    def data(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters and compute different rows, or different shards of a row."""
        return self.mesh.get_group("data")

    @property
    def pipeline(self) -> DeviceMesh:
        """Ranks that hold the stages of one pipeline."""
        return self.mesh["pipeline"]

    @property
    def expert_data(self) -> dist.ProcessGroup:
        """Ranks that hold the same experts."""
        return self.experts.get_group("expert_data")

    @property
    def expert(self) -> dist.ProcessGroup:
        """Ranks among which the experts of a layer are distributed."""
        return self.experts.get_group("expert")

    def collection(self) -> Any:
        """The groups in Megatron-core's form, with an expert tensor parallelism of 1.

        It knows of no context parallelism, which `layers.RowAttention` alone does.
        """
        alone = _adjacent(self.mesh.device_type, self.mesh.size(), 1, 1)
        return core_api.ProcessGroupCollection(
            tp=self.tensor,
            cp=alone,
            pp=self.mesh.get_group("pipeline"),
            dp=self.data,
            dp_cp=self.data,
            tp_cp=self.tensor,
            tp_dp_cp=self.data,
            ep=self.expert,
            expt_tp=alone,
            expt_dp=self.expert_data,
            tp_ep=self.expert,
            embd=None,
            pos_embd=None,
        )


def make_groups(config: TrainerConfig, device: torch.device) -> RankGroups:
    """Makes this rank's groups. A collective."""
    stages, tensor, expert = config.pipeline_parallel, config.tensor_parallel, config.expert_parallel
    data = config.num_data_parallel_ranks * config.context_parallel
    # tensor ranks are neighbours: they talk most
    ranks = torch.arange(stages * data * tensor).view(stages, data, tensor).transpose(1, 2)
    return RankGroups(
        # the data ranks that share rows
        DeviceMesh(device.type, ranks, mesh_dim_names=("pipeline", "tensor", "data")),
        _adjacent(device.type, config.num_ranks, config.context_parallel, tensor),
        init_device_mesh(
            device.type,
            (stages, data * tensor // expert, expert),
            mesh_dim_names=("pipeline", "expert_data", "expert"),
        ),
    )


def _adjacent(device_type: str, num_ranks: int, size: int, stride: int) -> dist.ProcessGroup:
    """This rank's group of `size` ranks that are `stride` apart."""
    ranks = torch.arange(num_ranks).view(-1, size, stride).transpose(1, 2).reshape(-1, size)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("every", "group")).get_group("group")
