"""A process that does nothing. Its module imports neither torch nor ownloop, which would take two seconds of a core."""

import uuid

from monarch.actor import Actor, endpoint


class IdleRank(Actor):
    """Does nothing, at once."""

    def __init__(self) -> None:
        """Gets an id, so that its answers are its own."""
        self._id = uuid.uuid4().hex

    @endpoint
    async def answer(self) -> str:
        """The process id."""
        return self._id
