"""Batches in the formats that verl and prime-rl write are read exactly, and their losses are those of plain loops."""

import math
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from ownloop_instruments.bisect_command import Bisect
from ownloop_instruments.dumps import read_dump
from rl.tiny_models import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9]]
SAID = [[11, 12, 2], [13, 14]]
OLD = [[-1.0, -2.0, -0.5], [-1.5, -0.25]]
ADVANTAGES = [0.5, -1.0]


class DataProto:
    """verl's, as far as it is pickled."""

    def __init__(self, tensors: dict[str, Tensor], meta_info: dict[str, Any]) -> None:
        self.tensors, self.meta_info = tensors, meta_info

    def __getstate__(self) -> tuple[Any, ...]:
        """With VERL_DATAPROTO_SERIALIZATION_METHOD=numpy: (batch size, device, name -> (dtype, shape, bytes))."""
        encoded = {
            name: (str(t.dtype).removeprefix("torch."), t.shape, t.flatten().contiguous().view(torch.uint8).numpy())
            for name, t in self.tensors.items()
        }
        return ((2,), None, encoded), {"uid": np.array(["a", Path("b")], object)}, self.meta_info


def _verl_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts are padded on the left, responses on the right."""
    module: Any = ModuleType("verl.protocol")
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    monkeypatch.setattr(DataProto, "__module__", "verl.protocol")
    module.DataProto = DataProto
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    responses, prompts = torch.tensor([[11, 12, 2], [13, 14, 0]]), torch.tensor([[5, 6, 7], [0, 8, 9]])
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat([torch.tensor([[1, 1, 1], [0, 1, 1]]), mask], 1),
        "response_mask": mask,
        "old_log_probs": torch.tensor([OLD[0], [*OLD[1], 0.0]], dtype=torch.bfloat16),
        "advantages": torch.tensor(ADVANTAGES)[:, None] * mask,
    }
    with file.open("wb") as stream:
        pickle.dump(DataProto(tensors, {"metrics": {"actor/pg_loss": [0.25, 0.75]}, "config": Path("x")}), stream)
    return file


class TrainingSample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """prime-rl's, with prompt and completion apart."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    completion_temperatures: list[float]
    env_name: str
    teacher_logprobs: list[float] | None = None
    advantage: float | None = None
    reward: float | None = None


class TrainingAdvantage(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """prime-rl's, of one loss."""

    loss: str
    values: list[float]
    mask: list[bool]


class FlatSample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """prime-rl's newer one, whose tokens are those of all turns."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[TrainingAdvantage]
    reward: float | None = None


def _prime_rl_file(file: Path, *, flat: bool) -> Path:
    rows = zip(PROMPTS, SAID, OLD, ADVANTAGES, strict=True)
    examples: list[Any] = []
    for prompt, said, old, advantage in rows:
        before, after = [False] * len(prompt), [True] * len(said)
        if flat:
            mask, number = before + after, len(prompt) + len(said)
            values = [TrainingAdvantage("rl", [advantage] * number, mask)]
            logprobs = [0.0] * len(prompt) + old
            examples.append(
                FlatSample(prompt + said, mask, logprobs, [0.0] * len(prompt) + [0.7] * len(said), "x", values)
            )
        else:
            examples.append(
                TrainingSample(prompt, before, said, after, old, [0.7] * len(said), "x", None, advantage, 3.0)
            )
    file.write_bytes(msgspec.msgpack.encode([examples, 7]))
    return file


@pytest.mark.parametrize("kind", ["verl", "prime-rl", "prime-rl flat"])
def test_the_data_are_those_that_were_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "verl":
        dump = read_dump(_verl_file(tmp_path / "batch.pkl", monkeypatch))
        assert dump.numbers == {"loss": 0.5}
    else:
        dump = read_dump(_prime_rl_file(tmp_path / "rollouts.bin", flat=kind.endswith("flat")))
    for datum, prompt, said, old, advantage in zip(dump.data, PROMPTS, SAID, OLD, ADVANTAGES, strict=True):
        assert [*datum.tokens, datum.loss_inputs["target_tokens"][-1]] == prompt + said
        scored = datum.weights != 0
        assert scored.tolist() == [False] * (len(prompt) - 1) + [True] * len(said)
        assert datum.loss_inputs["logprobs"][scored].tolist() == old
        assert datum.loss_inputs["advantages"][scored].tolist() == [advantage] * len(said)
        assert datum.temperature == (1.0 if kind == "verl" else 0.7)


@pytest.mark.parametrize("shift", [0.05, 0.9, -2.0])
def test_their_losses_are_those_of_a_loop_over_tokens(
    shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verl = read_dump(_verl_file(tmp_path / "batch.pkl", monkeypatch))
    prime = read_dump(_prime_rl_file(tmp_path / "rollouts.bin", flat=False))
    old, advantages = [q for row in OLD for q in row], [a for row, a in zip(OLD, ADVANTAGES, strict=True) for _ in row]
    by_verl, by_prime = 0.0, 0.0
    for q, a in zip(old, advantages, strict=True):
        p = min(q + shift, -0.01)
        ratio = math.exp(p - q)
        larger = max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
        by_verl += min(larger, -a * 3.0) if a < 0 else larger
        moved = math.exp(p) - math.exp(q)
        is_out = moved > 0.2 if a > 0 else moved < -0.2
        by_prime += (0.0 if is_out else -a * ratio) + 1e-3 * (p - q) ** 2
    p, q, a = (
        torch.tensor(each, dtype=torch.float64) for each in ([min(x + shift, -0.01) for x in old], old, advantages)
    )
    assert float(verl.their_loss(p, q, a, 5)) == pytest.approx(by_verl / 5)
    assert float(prime.their_loss(p, q, a, 5)) == pytest.approx(by_prime / 5)


def test_their_loss_stands_beside_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, model = _prime_rl_file(tmp_path / "rollouts.bin", flat=False), tiny_llama(tmp_path / "model")
    assert Bisect(a="ours", b=str(file), model=model).run() == 1
    told = capfd.readouterr().out.splitlines()
    assert " by prime-rl's default formula" in told[0]
    assert told[1].startswith("forward_backward: loss ")


def test_what_is_no_batch_is_refused(tmp_path: Path) -> None:
    for name, content in (("a.bin", b"\x81"), ("a.pkl", pickle.dumps({"batch": 1})), ("a.pt", b"no zip")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"a{Path(name).suffix} "):
            read_dump(tmp_path / name)
    with pytest.raises(ValueError, match="--model is missing"):
        Bisect(a="ours", b=str(tmp_path / "a.pt")).run()
    with pytest.raises(ValueError, match=r"there is no recorded batch .*b\.pt"):
        Bisect(a="ours", b=str(tmp_path / "b.pt")).run()


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="evil"):
        read_dump(tmp_path / "evil.pkl")
    assert not (tmp_path / "touched").exists()
