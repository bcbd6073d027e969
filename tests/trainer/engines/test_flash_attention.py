"""Which FlashAttention a GPU gets, by its compute capability and by what is installed."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from trainer.engines.pytorch import document_attention as flash_attention
from trainer.engines.pytorch.document_attention import choose_flash_attention, installed_flash_attention

FA3, FA4 = "flash_attn_interface", "flash_attn.cute.interface"


@pytest.mark.parametrize(
    ("capability", "installed", "chosen", "missing"),
    [
        ((8, 0), {FA3, FA4}, None, None),
        ((9, 0), set(), None, FA3),
        ((9, 0), {FA3}, "FA3", None),
        ((9, 0), {FA4}, None, FA3),
        ((10, 0), set(), None, FA4),
        ((10, 0), {FA3}, "FA3", FA4),
        ((10, 3), {FA3, FA4}, "FA4", None),
    ],
)
def test_the_fastest_that_is_installed_is_chosen(
    capability: tuple[int, int], installed: set[str], chosen: str | None, missing: str | None
) -> None:
    name, advice = choose_flash_attention(capability, installed.__contains__)
    assert name == chosen
    assert (missing in advice) if missing and advice else advice is None


def test_torchtitan_asks_for_what_is_installed_on_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the patch torchtitan would import `flash_attn_interface` on every Hopper GPU."""
    importlib.import_module("trainer.engines.titan.model")  # applies the patches
    from torchtitan.models.common.attention import VarlenAttention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    installed_flash_attention.cache_clear()
    try:
        VarlenAttention(VarlenAttention.Config())  # raised ModuleNotFoundError
        assert "attention: FA2, of torch (FA3 would be faster" in capsys.readouterr().out
        (tmp_path / f"{FA3}.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        installed_flash_attention.cache_clear()
        with pytest.raises(RuntimeError, match="does not expose FA3"):  # torch has imported the module
            VarlenAttention(VarlenAttention.Config())
    finally:
        installed_flash_attention.cache_clear()
        sys.modules.pop(FA3, None)


def test_a_module_below_a_missing_package_is_missing() -> None:
    assert not flash_attention._has_module("no_such_package.cute.interface")  # pyright: ignore[reportPrivateUsage]
    assert flash_attention._has_module("torch.nn.attention")  # pyright: ignore[reportPrivateUsage]
