"""One program on many devices: the mesh, and the sharding of arrays over it."""
