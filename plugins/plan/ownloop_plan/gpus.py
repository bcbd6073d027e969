"""Kinds of GPUs, by their data sheets, and the shares of these rates that are assumed."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One kind. Rates are a second's, of dense bfloat16 products and of bytes in one direction."""

    memory_gib: float
    """The memory of one GPU, as torch reports it."""
    operations: float
    memory_rate: float
    nvlink_rate: float
    """That of PCIe, for a GPU without NVLink."""
    pcie_rate: float
    network_rate: float
    """Bytes a second of each GPU's share of its host's network."""
    batched_tokens: int = 8192
    """vLLM's default of the tokens that a step of the generator computes, and below, of the sequences."""
    num_seqs: int = 256
    context_gib: float = 0.6
    nccl_gib: float = 1.5

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return int(self.memory_gib * GIB)

    @property
    def context_bytes(self) -> int:
        """What CUDA takes for itself in each process: an allowance."""
        return int(self.context_gib * GIB)

    @property
    def nccl_bytes(self) -> int:
        """Buffers of NCCL: an allowance."""
        return int(self.nccl_gib * GIB)


GPUS: Mapping[str, GPU] = {
    "rtx4090": GPU(
        memory_gib=23.6, operations=165e12, memory_rate=1.01e12, nvlink_rate=25e9, pcie_rate=25e9, network_rate=1.2e9
    ),
    "l40s": GPU(
        memory_gib=44.4, operations=362e12, memory_rate=0.86e12, nvlink_rate=25e9, pcie_rate=25e9, network_rate=12e9
    ),
    "h100": GPU(
        memory_gib=79.2,
        operations=989e12,
        memory_rate=3.35e12,
        nvlink_rate=400e9,
        pcie_rate=50e9,
        network_rate=45e9,
        batched_tokens=16384,
        num_seqs=1024,
    ),
    "h200": GPU(
        memory_gib=139.8,
        operations=989e12,
        memory_rate=4.8e12,
        nvlink_rate=400e9,
        pcie_rate=50e9,
        network_rate=45e9,
        batched_tokens=16384,
        num_seqs=1024,
    ),
    "a100": GPU(
        memory_gib=79.2, operations=312e12, memory_rate=2.0e12, nvlink_rate=270e9, pcie_rate=25e9, network_rate=22e9
    ),
    "b200": GPU(
        memory_gib=178.0,
        operations=2250e12,
        memory_rate=8.0e12,
        nvlink_rate=800e9,
        pcie_rate=50e9,
        network_rate=45e9,
        batched_tokens=16384,
        num_seqs=1024,
    ),
}
"""By the names that `ownloop plan --gpu` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The share of each rate that is assumed to be reached, and what processors of hosts take, which no rate shortens.

    The latter are of GRPO of a model of 135M parameters on an H100 and 16 cores (benchmarks/RESULTS-gpu.md): small
    models spend most of their time there.
    """

    train: float = 0.40
    """Of the matrix rate, in forward and backward passes: the bar of `make gpu-check`."""
    prefill: float = 0.50
    decode: float = 0.60
    """The part of the memory's rate that is reached while tokens are sampled."""
    decode_overhead_s: float = 0.003
    """What a sampled token takes beside reading memory."""
    sum_overhead_s: float = 10e-6
    """What tensor-parallel ranks take to begin a sum over a fast link."""
    copies: float = 0.60
    """The part of a link's rate that weights on their way reach."""
    completion_overhead_s: float = 0.0011
    """What a replica's engine and the controller take for each completion, from the prompt to its record."""
    datum_overhead_s: float = 0.00025
    """What a data-parallel rank and the controller take for each datum to train on."""
    call_overhead_s: float = 0.03
    """What an optimizer step takes at least, and so do a push and a pull together."""
