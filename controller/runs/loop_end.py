"""What is to be done when a loop has ended, for whatever reason, while the processes that it started still live."""

from collections.abc import Callable
from weakref import WeakMethod


class LoopEnd:
    """Methods to call then. They are kept weakly: what is gone by then was closed by its owner.

    A folder that held them would keep whoever holds the folder, and with it the folder's lock.
    """

    def __init__(self) -> None:
        """Nothing is to be done yet."""
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    def call(self, method: Callable[[], None]) -> None:
        """Has a bound method called, once."""
        self._methods.append(WeakMethod(method))

    def has_come(self) -> None:
        """Calls the methods, in order."""
        methods, self._methods = self._methods, []
        for weak in methods:
            if (method := weak()) is not None:
                method()
