"""A disk that becomes full within a checkpoint or an export: the error names it, and nothing is left."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl.tiny_models import tiny_llama
from tests.rl.recordings import disk_of
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig
from trainer.engines import load_engine


@pytest.mark.parametrize("verb", ["save_checkpoint", "export_hf"])
def test_a_full_disk_is_named_and_nothing_is_left(verb: str, tmp_path: Path) -> None:
    engine = load_engine(TrainerConfig(model=tiny_llama(tmp_path / "model")))

    def write(path: Path) -> None:
        engine.export_hf(path, torch.float32) if verb == "export_hf" else engine.save_checkpoint(path)

    write(tmp_path / "whole")
    sizes = sorted(file.stat().st_size for file in (tmp_path / "whole").iterdir())
    for size in sizes:  # each of the files is the first that does not fit
        message = rf"^{tmp_path}/other could not be written: rank 0 raised .*File too large.*; \d+\.\d\d GB are free"
        with disk_of(size - 1), pytest.raises(OSError, match=message):
            write(tmp_path / "other")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]
    write(tmp_path / "other")
    assert sorted(file.stat().st_size for file in (tmp_path / "other").iterdir()) == sizes


SMALL_DISK = """
import shutil, sys
from pathlib import Path
import torch
from rl.tiny_models import tiny_llama
from trainer.engines.pytorch.checkpoint import CheckpointInfo, CheckpointSaver, read_info, with_directory
from trainer.engines.pytorch.hf_directory import write_hf_directory
disk, model = Path(sys.argv[1]), tiny_llama(Path(sys.argv[2]))
tensors = {"weight": torch.zeros(3000), "bias": torch.zeros(10)}
def info(kind):
    return CheckpointInfo(kind=kind, policy_version=0, model={}, num_ranks=1)
def save(path):
    CheckpointSaver().save(path, tensors, info("checkpoint"), size_bytes=0)
def fill(partial):
    write_hf_directory(partial, model, tensors.items(), torch.float32, "lm")
def export(path):
    with_directory(path, info("export"), 0, fill)
for kind, write in (("checkpoint", save), ("export", export)):
    whole, free = 0, 0
    while not whole:
        free += 1
        with (disk / "filler").open("wb") as filler:
            filler.write(bytes(shutil.disk_usage(disk).free - 4096 * free))
        try:
            write(disk / "new")
        except (OSError, ValueError) as error:
            assert str(error).startswith(f"{disk}/new ") and "No space left on device" in str(error), error
            assert [path.name for path in disk.iterdir()] == ["filler"], [*disk.iterdir()]
        else:
            read_info(disk / "new", kind=kind)
            whole = len([*(disk / "new").iterdir()])
            shutil.rmtree(disk / "new")
        (disk / "filler").unlink()
    print(kind, whole, free)
"""


def test_a_disk_that_becomes_full_at_any_byte(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$3" -c "$4" "$1" "$2"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    (tmp_path / "disk").mkdir()
    words = [*command, str(tmp_path / "disk"), str(tmp_path / "model"), sys.executable, SMALL_DISK]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"this machine has no user namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    saved, exported = (line.split() for line in done.stdout.splitlines())
    assert saved[:2] == ["checkpoint", "3"]
    assert int(saved[2]) > 4  # it did not fit at first
    assert int(exported[2]) > int(exported[1]) > 4
