"""Whether a keeper still has a supervisor: decisions alone, no sockets and no clocks.

connected        it has
out of reach     for a while: a cable is cut, a machine is slow to start. Then it has none any more
refused          its machine is there, and nobody listens: the launcher is gone. It listened before it had
                 any keeper started, so that this holds for a keeper that has never reached it, too
"""

from collections.abc import Callable

FIRST_S = 60.0  # to find the supervisor
REFUSED_AFTER_S = 1.0  # is asked so long after a connection ended, and then as often


class Contact:
    """One keeper's connection to its supervisor. `patience_s`: how long it does without, once it had one."""

    def __init__(self, patience_s: float, now_s: float) -> None:
        self._patience_s = patience_s
        self._is_connected = False
        self._is_refused = False
        self._given_up_s = now_s + FIRST_S
        self._asked_s = now_s

    def begins(self) -> None:
        """Take in that there is a connection."""
        self._is_connected, self._is_refused = True, False

    def ends(self, now_s: float) -> None:
        """Take in that the connection has ended, or could not be made; of these the first counts."""
        if self._is_connected:
            self._is_connected = False
            self._given_up_s, self._asked_s = now_s + self._patience_s, now_s

    def is_lost(self, now_s: float, is_refused: Callable[[], bool]) -> bool:
        """Tell whether the supervisor is gone, or has been out of reach for too long.

        `is_refused`: whether its machine says that nobody listens; is asked now and then.
        """
        if self._is_connected:
            return False
        if self._is_refused or now_s > self._given_up_s:
            return True
        if now_s - self._asked_s < REFUSED_AFTER_S:
            return False
        self._asked_s = now_s
        self._is_refused = is_refused()
        return self._is_refused
