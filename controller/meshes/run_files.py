"""Whether other hosts have the files of this one, as checkpoints and exported models need.

Every trainer rank writes its own shards into one folder, and the controller lists and deletes checkpoints there. On a
filesystem that is not shared the shards would lie on several hosts, which would only be noticed when they are loaded.
"""

import uuid
from pathlib import Path

from controller.meshes.place import Place, ThisHost


class SharedFolders:
    """The folders of this host that the hosts of one mesh have too. Each is looked at once."""

    def __init__(self, place: Place | None = None) -> None:
        """`place` is where the mesh runs; None stands for this host."""
        self._place = None if isinstance(place, ThisHost) else place
        self._shared: set[Path] = set()

    async def check(self, path: Path) -> None:
        """Raises ValueError, which names a host, unless all hosts of the mesh see what is written beside `path`."""
        folder = path.absolute().parent
        if self._place is None or folder in self._shared:
            return
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / f".{uuid.uuid4().hex}.token"
        token.touch()
        try:
            await self._place.check_there(check_sees, token)
        finally:
            token.unlink()
        self._shared.add(folder)


def check_sees(token: Path) -> None:
    """Raises ValueError unless this host has a file that the controller has just made."""
    if not token.exists():
        raise ValueError(
            f"{token.parent} is not the controller's folder of that name; checkpoints and models are written by "
            "several hosts, so put the run's folder (--runs) on a filesystem that all of them share, or run without "
            "checkpoints (checkpoint_every 0)"
        )
