"""How much of a shared room one owner may use."""

FREE_SHARE = 9
"""An owner may use nine times as much as is free. So an owner that is alone may use nine tenths of the room. If there are more
owners, each may use less, and some room stays free for a new owner. This is the dynamic threshold of Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches" (1998)."""


def share_used(own: int, free: int) -> bool:
    """Return True if an owner that uses `own` of a room has used its share, while `free` of the room is free."""
    return own >= FREE_SHARE * free
