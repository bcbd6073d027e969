"""How many graphs are compiled for rows of many lengths, on a pretended GPU whose kernels do nothing.

    python -m tests.gpu_pretended.compiled

It is run in the mode `kernels` (`pretended.py`): Dynamo, Inductor and Triton compile for a GPU that launches nothing. A
graph for each new length would stop a run for a minute each, so after the first rows none may be added, and Dynamo must
not break a graph. Without `compile=True`, attention over shared prefixes is compiled alone, by the first row. Prints
one JSON object with the graphs and breaks of each kind of row.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from rl.data.packing import pack_row
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import random_groups

PLAIN = [
    random_batch(lengths) for lengths in ((33, 96), (60, 90, 111), (20, 21, 100), (64, 120, 50, 30), (7,), (128,) * 6)
]
SHARED = [
    random_groups([(size, (30, 20, 40)), (23, (20,)), (30, (44, 31))], opening=opening)
    for size, opening in ((24, 0), (40, 0), (77, 0), (24, 9), (50, 20), (12, 0))
] + [random_groups([(20, (10, 12)), (9, (8, 6)), (5, (11,))])]
SETTLED = 3
"""Rows after which no graph of a whole layer may be added: the first has constant sizes, the second variable ones."""


def run(model: Path, rows: Sequence[list[Datum]], *, whole: bool = True) -> dict[str, int]:
    """Graphs after the first rows and after all, and breaks, of an engine of its own, compiled as a `whole` or not."""
    import trainer.engines.titan.model.attention as attention

    real = attention.create_varlen_metadata_for_document

    def computed(positions: torch.Tensor) -> object:
        """Its operators are no kernels that are compiled here, and their results are read on the host."""
        made = real(positions.cpu())
        return made._replace(cu_seq_q=made.cu_seq_q.cuda(), cu_seq_k=made.cu_seq_k.cuda())

    attention.create_varlen_metadata_for_document = computed  # pyright: ignore[reportAttributeAccessIssue]
    torch.compiler.reset()
    counters.clear()
    config = TrainerConfig(model=model, compute_dtype="bfloat16", max_tokens_per_microbatch=1024, compile=whole)
    engine: Any = load_engine(config)
    graphs: list[int] = []
    for row in rows:  # without a loss, which asks how many numbers a kernel has found
        packed = pack_row(row, share_prefixes=True, share_opening=True)  # also where an engine would not share
        scores, _ = engine._rows._score(packed, entropy=False)
        scores.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    attention.create_varlen_metadata_for_document = real
    return {
        "first": graphs[SETTLED - 1 if whole else 0],
        "all": graphs[-1],
        "breaks": sum(counters["graph_break"].values()),
    }


def main() -> int:
    """Compiles. Exits with 1 if a later row added a graph, or a graph was broken."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_qwen3(Path(folder) / "model", tied=False)
        found = {name: run(model, rows) for name, rows in (("plain", PLAIN), ("shared", SHARED))}
        found["attention_alone"] = run(model, SHARED, whole=False)
        found["narrow_heads"] = run(tiny_llama(Path(folder) / "narrow"), SHARED[:SETTLED])
    print(json.dumps(found))
    return int(any(each["all"] > each["first"] or each["breaks"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
