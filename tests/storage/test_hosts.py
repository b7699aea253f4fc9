"""Eight processes, each a host of its own with one device, read models: each fetches what its device holds."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import object_server
import optax
import pytest
from conftest import write_hf_folder
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax import LlamaConfig
from llama_jax.model.trees import init
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.training.step import init_state

HOSTS = 8
CONFIG = LlamaConfig(
    vocab_size=1000,
    dim=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    hidden_dim=512,
    max_seq_len=64,
    norm_eps=1e-5,
    rope_theta=1e4,
    tie_embeddings=False,
)


def write_run(folder):
    """A step of a run over four devices, whose shards are cut otherwise than those of the readers."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    random = np.random.default_rng(0)

    def make(leaf):
        cut = [None] * (len(leaf.shape) - 2) + ["tensor", "fsdp"] if len(leaf.shape) > 1 else []
        array = random.normal(size=leaf.shape).astype(leaf.dtype)
        return jax.device_put(array, NamedSharding(mesh, P(*cut)))

    shapes = jax.eval_shape(lambda key: init_state(optax.sgd(0.1), init(CONFIG, key)), jax.random.key(0))
    with CheckpointManager(folder / "checkpoints") as kept:
        kept.save(4, jax.tree.map(make, shapes).replace(step=jnp.int32(4)), {}, CONFIG, None)
    return folder


@pytest.mark.slow
def test_each_host_fetches_its_share(tmp_path):
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    run = write_run(tmp_path / "run")
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    with object_server.serving() as store:
        places = [store.upload(folder, "model"), folder, store.upload(run, "run"), run]
        started = []
        try:
            for index in range(HOSTS):
                environment = os.environ | object_server.environment(store, f"host{index}")
                environment |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
                command = [Path(__file__).with_name("reading_process.py"), coordinator, HOSTS, index, *places]
                started.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        env=environment,
                    )
                )
            said = [process.communicate(timeout=240) for process in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        assert [process.returncode for process in started] == [0] * HOSTS, said
        for number, key in enumerate(("model/", "run/")):
            shares = [int(out.split("held ")[number + 1].split()[0]) for out, _ in said]
            fetched = [
                sum(answer.sent for answer in store.answers if (answer.client, answer.key[: len(key)]) == (f"host{i}", key))
                for i in range(HOSTS)
            ]
            assert sum(shares) < 1.1 * (folder / "model.safetensors").stat().st_size
            pairs = list(zip(fetched, shares, strict=True))
            assert all(got <= 1.05 * share for got, share in pairs), (key, pairs)
            print(key, pairs)
