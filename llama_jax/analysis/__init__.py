"""What a program takes before it runs: memory, exchanges and least time, by the compiler of the hardware it is meant for."""
