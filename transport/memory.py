"""How the C allocator treats the memory of pieces and tensors: kept for reuse, in one arena for all threads.

Left to itself, glibc maps and unmaps every piece of 1 MiB and every larger tensor until it has learnt their size, and
each fresh page costs more than the copy into it.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Set what glibc would arrive at by itself after a while. Elsewhere nothing happens: it only saves time."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)
        libc.mallopt(_M_ARENA_MAX, 1)
