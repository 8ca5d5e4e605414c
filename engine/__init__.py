"""What every script needs and no paper is about: command line, processes, devices, a run's folder, other formats."""

import os
import sys

# Threads of OpenMP that wait for each other spin: the fastest way where the cores are theirs alone, and by far the
# slowest where other programs need them. For how long is read when torch is loaded: a script imports this first.
told = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # by the user
if not told and "torch" not in sys.modules:
    try:
        load, *_ = os.getloadavg()  # programs that wanted a core, in the last minute
    except (AttributeError, OSError):  # not every system tells
        load = 0.0
    os.environ["GOMP_SPINCOUNT"] = "1000" if load > (os.cpu_count() or 1) else "30000"
