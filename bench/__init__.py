"""Every figure in the README comes from a command here; results are kept under `bench/results/`."""
