"""KV leases under a byte budget."""

from collections.abc import Callable

from services.speculation.errors import AerieError, Reason


class KVBudget:
    """Counts the bytes that open sessions may come to use.

    Args:
        limit: Bytes in all; None is unlimited.
        bytes_per_row: Keys and values of one position over all layers.
        capacity: Rows needed -> rows that a cache allocates.
    """

    def __init__(self, limit: int | None, bytes_per_row: int, capacity: Callable[[int], int]) -> None:
        self.limit = limit
        self.bytes_per_row = bytes_per_row
        self._capacity = capacity
        self.leased = 0

    def lease(self, rows: int) -> int:
        """Reserve room for ``rows`` positions; returns the bytes to ``release`` later.

        Raises:
            AerieError: RESOURCE_EXHAUSTED when the budget does not allow it.
        """
        size = self._capacity(rows) * self.bytes_per_row
        if self.limit is not None and self.leased + size > self.limit:
            raise AerieError(
                Reason.RESOURCE_EXHAUSTED,
                f"the session needs {size} bytes of KV cache; {self.limit - self.leased} of {self.limit} are free",
            )
        self.leased += size
        return size

    def release(self, size: int) -> None:
        self.leased -= size
