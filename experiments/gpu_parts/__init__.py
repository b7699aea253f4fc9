"""The sections of `gpu_report`, one per file, and their shared modules `plan`, `run` and `timing`."""
