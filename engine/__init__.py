"""What every script needs and no paper is about: command line, processes, devices, a run's folder, other formats."""

import os
import sys

# Threads of OpenMP that wait for each other spin, and where other programs need the cores they wait for long. So they
# soon sleep. The library reads this when torch loads it: a script imports this package first.
told = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # by the user
if not told and "torch" not in sys.modules:
    os.environ["GOMP_SPINCOUNT"] = "1000"
