"""Support code for every script: command line, processes, devices, run folders, and other weight formats."""

import os
import sys

if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
    sys.stdout.reconfigure(errors="replace")  # characters that its encoding lacks become "?"

# OpenMP threads spin while they wait for each other: fastest on idle cores, but by far the slowest when other programs
# need those cores. The spin count is read when torch is loaded, so a script imports this module first.
set_by_user = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
if not set_by_user and "torch" not in sys.modules:
    try:
        load, *_ = os.getloadavg()  # runnable processes, averaged over the last minute
    except (AttributeError, OSError):  # not available on this system
        load = 0.0
    os.environ["GOMP_SPINCOUNT"] = "1000" if load > (os.cpu_count() or 1) else "30000"


def one_line(error: Exception) -> str:
    """The message of an error; of a missing package, the command that installs it."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install -r requirements-dev.txt"
    return " ".join(str(error).split())
