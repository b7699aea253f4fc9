"""Eight processes, each a host of its own with one device, read a model: each fetches what its device holds."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import object_server
import pytest
from conftest import write_hf_folder

from llama_jax import LlamaConfig

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


@pytest.mark.slow
def test_each_host_fetches_its_share(tmp_path):
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    with object_server.serving() as store:
        places = [store.upload(folder, "model"), folder]
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
        shares = [int(out.split("held ")[1].split()[0]) for out, _ in said]
        fetched = [sum(answer.sent for answer in store.answers if answer.client == f"host{i}") for i in range(HOSTS)]
        assert sum(shares) < 1.1 * (folder / "model.safetensors").stat().st_size
        assert all(sent <= 1.05 * share for sent, share in zip(fetched, shares, strict=True)), (fetched, shares)
