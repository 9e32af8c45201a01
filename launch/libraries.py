"""Gives back the pages of shared libraries that loading touched and running will not: with torch's CUDA build, 200 MB.

Only clean, file-backed, private mappings are advised; the kernel reads a page again from its cache when it is used.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

_MADV_DONTNEED = 4


def import_torch() -> None:
    """Import torch in steps, in the order of its own loading, and give back after each what loading alone has touched.

    At once, its CUDA build would take 500 MB for a moment, most of it for libraries that a CPU never calls.
    """
    found = importlib.util.find_spec("torch")
    if sys.platform == "linux" and found is not None and found.origin is not None and "torch" not in sys.modules:
        for name in ("libtorch_global_deps.so", "libtorch.so"):
            library = Path(found.origin).parent / "lib" / name
            if library.exists():
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
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
    """(address, bytes) of mapped library files with no page of their own: none was ever written in this process.

    A page that was written is the process's own, in memory ("Anonymous") or swapped out. Of the writable mappings only
    torch's count: no code of torch runs between this reading and the advice, so nothing is written there meanwhile.
    """
    found: list[tuple[int, int]] = []
    candidate: tuple[int, int] | None = None
    own = 0
    for line in smaps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            low, high = (int(end, 16) for end in words[0].split("-"))
            library = len(words) > 5 and ".so" in words[5] and words[1].endswith("p")
            library = library and ("w" not in words[1] or "/torch/lib/" in words[5])
            candidate, own = (low, high - low) if library else None, 0
        elif words[0] == "Anonymous:":
            own = int(words[1])
        elif words[0] == "Swap:" and candidate is not None and own + int(words[1]) == 0:
            found.append(candidate)
    return found
