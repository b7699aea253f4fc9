"""One program on many devices: the mesh, and which device holds what."""
