"""What ranks on the controller's own host write is where it should be at once."""

from pathlib import Path

from controller.processes.place import Place


async def test_every_path_is_itself(tmp_path: Path) -> None:
    path, files = tmp_path / "runs" / "step-1", Place().files(2)

    assert await files.to_write(path) == path
    await files.collect(path)
    async with files.to_read(path) as paths:
        assert list(paths) == [path, path]
    assert list(tmp_path.iterdir()) == []
