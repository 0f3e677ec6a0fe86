"""Files that one process at a time may write."""

from __future__ import annotations

import errno
from typing import BinaryIO

__all__ = ["hold"]


def hold(file: BinaryIO, taken: str) -> None:
    """Take a file for this process; the system lets go of it however the process ends.

    Args:
        file: the open file.
        taken: what to say if another process has it.

    Raises:
        ValueError: another process has it.
        OSError: the file cannot be locked.
    """
    try:
        import fcntl
    except ImportError:  # Windows: nothing to hold it by
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise ValueError(taken) from None
