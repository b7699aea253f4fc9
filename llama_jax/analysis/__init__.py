"""The costs of a program before it runs: memory, communication and a lower bound on time, from the hardware's compiler."""
