"""One of several processes that load models over a mesh: `python reading_process.py COORDINATOR COUNT INDEX URL PATH`.

It says how many bytes its devices hold, after it has compared them with what a disk gives.
"""

import sys

import jax
import numpy as np


def main(coordinator, count, index, *pair):
    from llama_jax.parallel import multihost

    with multihost.join_job(coordinator, int(count), int(index)):
        import llama_jax

        mesh = llama_jax.MeshSizes(fsdp=4, tensor=2)
        stored, local = (jax.tree.leaves(llama_jax.load(place, mesh=mesh).params) for place in pair)
        held = 0
        for one, other in zip(stored, local, strict=True):
            assert one.sharding == other.sharding
            shards = zip(one.addressable_shards, other.addressable_shards, strict=True)
            assert all(np.array_equal(a.data, b.data) for a, b in shards)
            held += sum({str(shard.index): shard.data.nbytes for shard in one.addressable_shards}.values())
        print(f"held {held}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
