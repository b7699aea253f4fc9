"""The sections of `gpu_report`, one a file, and what they share: `plan`, `run` and `timing`."""
