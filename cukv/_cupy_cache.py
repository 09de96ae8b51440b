"""A folder for CuPy's own kernels, settled before CuPy is imported: whoever imports this is first.

CuPy makes ``~/.cupy/kernel_cache`` as it is imported, and cannot be imported where it cannot make
it; where the folder is there but cannot be written, each kernel of its own raises.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path


def settle() -> None:
    """Name a temporary folder if CuPy is still to choose one and the user's cannot be written."""
    if "cupy" in sys.modules or "CUPY_CACHE_DIR" in os.environ:
        return
    try:
        folder = Path("~/.cupy/kernel_cache").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        temporary = tempfile.mkdtemp(prefix="cukv-cupy-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = temporary
        log = logging.getLogger("cukv")
        log.warning("CuPy cannot write its kernels (%s): they go to %s", error, temporary)


settle()
