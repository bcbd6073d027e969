"""Small data sets in the folders in which `datasets` looks before it asks a hub, so that recipes run unchanged.

They have the columns of the ones that the recipes name, and content that a model of 135 million parameters can learn.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HUB_MODEL = "Qwen/Qwen3-8B-Base"
"""A model that the cookbook knows a chat format for. In a recipe's folder, this name is a link to the served model."""


def write_conversations(folder: Path) -> None:
    """`HuggingFaceH4/no_robots`: the cookbook's own conversations are not large enough for its split."""
    facts = ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"), ("Egypt", "Cairo")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is the capital of {country}?"},
                {"role": "assistant", "content": f"The capital of {country} is {city}, as every atlas says."},
            ]
        }
        for country, city in facts * 12
    ]
    for split in ("train", "test"):
        _write(folder / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", rows)


def write_preferences(folder: Path) -> None:
    """`Anthropic/hh-rlhf`: polite answers are chosen, rude ones rejected.

    The recipe takes 1,024 pairs of the test split and scores them twice. It leaves out pairs that do not differ, which
    most of these are.
    """
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for number in range(1100):
        question = f"\n\nHuman: How do I count to {number}?\n\nAssistant:"
        polite = f"{question} I would be glad to help you. Start at 1 and add 1 until you reach {number}."
        rows["train"].append({"chosen": polite, "rejected": f"{question} Go away and stop wasting my time."})
        rows["test"].append(rows["train"][-1] if number % 64 == 0 else {"chosen": polite, "rejected": polite})
    for split, of_split in rows.items():
        _write(folder / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", of_split)


def link_model(folder: Path, model: Path) -> None:
    """Has `HUB_MODEL` mean a directory."""
    link = folder / HUB_MODEL
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(model)


def _write(file: Path, rows: Iterable[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
