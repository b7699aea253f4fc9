"""One program on many devices: the mesh, which device holds what, and how much memory that takes."""
