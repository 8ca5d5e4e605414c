"""What every script needs and no paper is about: command line, processes, devices, a run's folder, other formats."""
