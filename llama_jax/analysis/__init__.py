"""The costs of a program before it runs: memory, communication and least time, by the compiler of its hardware."""
