"""Gives back the pages of shared libraries that loading touched and running will not: with torch's CUDA build, 200 MB.

Only clean, file-backed, private mappings are advised; the kernel reads a page again from its cache when it is used.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

_MADV_DONTNEED = 4


def import_torch() -> None:
    """Import torch in two steps, as it does it itself, and give back after each what loading alone has touched.

    The libraries of its CUDA build come first; together with the rest they would take 500 MB for a moment.
    """
    found = importlib.util.find_spec("torch")
    if sys.platform == "linux" and found is not None and found.origin is not None and "torch" not in sys.modules:
        dependencies = Path(found.origin).parent / "lib" / "libtorch_global_deps.so"
        if dependencies.exists():
            ctypes.CDLL(str(dependencies), mode=ctypes.RTLD_GLOBAL)
            release_library_pages()
    importlib.import_module("torch")
    release_library_pages()


def release_library_pages() -> None:
    """Advise the kernel; where that is not possible nothing happens, for it saves memory and nothing else."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, size in _clean_mappings(Path("/proc/self/smaps").read_text()):
        madvise(start, size, _MADV_DONTNEED)


def _clean_mappings(smaps: str) -> list[tuple[int, int]]:
    """(address, bytes) of mapped library files with no page of their own: none was ever written in this process."""
    found: list[tuple[int, int]] = []
    candidate: tuple[int, int] | None = None
    for line in smaps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            low, high = (int(end, 16) for end in words[0].split("-"))
            library = len(words) > 5 and ".so" in words[5] and words[1].endswith("p") and "w" not in words[1]
            candidate = (low, high - low) if library else None
        elif words[0] == "Anonymous:" and candidate is not None and words[1] == "0":
            found.append(candidate)
    return found
