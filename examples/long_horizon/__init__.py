"""Does a critic pay on long episodes? The study, as one command: `python -m examples.long_horizon`."""
