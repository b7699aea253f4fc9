"""The launch pages of docs/clusters, run here with the cluster's part played by shell scripts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml

PAGES = Path(__file__).parents[1] / "docs" / "clusters"
RECIPE = f"{Path(__file__).parent / 'runs' / 'mortal_run.py'}:recipe"
SHORT = "save_every=0 evaluate_every=0 log_every=2"
TASKS = """
for i in 0 1; do
  SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$i SLURM_LOCALID=0 "$@" &
  tasks="$tasks $!"
done
worst=0
for task in $tasks; do wait $task || { code=$?; [ $code -gt $worst ] && worst=$code; }; done
exit $worst
"""


@pytest.fixture
def cluster(tmp_path):
    """Writes a command; gives the environment in which it and llama-jax are found."""
    words = np.random.default_rng(0).choice(["the", "llama", "ate", "grass", "and", "slept"], 900)
    (tmp_path / "text.txt").write_text(" ".join(words))
    commands = tmp_path / "bin"
    commands.mkdir()

    def write(name, script):
        (commands / name).write_text(f"#!/bin/bash\n{script}\n")
        (commands / name).chmod(0o755)

    write("llama-jax", f'exec {sys.executable} -m llama_jax "$@"')
    write("scontrol", f'echo "$@" >> {tmp_path}/scontrol.txt')
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(PAGES.parents[1]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "WORKDIR": str(tmp_path / "run"),
    }
    return write, environment, port


def submit(arguments, environment):
    command = ["bash", str(PAGES / "slurm.sbatch"), *arguments]
    return subprocess.run(command, env=environment | {"SLURM_JOB_ID": "4097"}, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.rotating
def test_the_slurm_script_trains(cluster, tmp_path):
    write, environment, port = cluster
    write("srun", f"shift\n{TASKS}")
    environment |= {"JAX_COORDINATOR_PORT": str(port)}
    done = submit([RECIPE, "--data", str(tmp_path / "text.txt"), "steps=4", *SHORT.split()], environment)
    assert done.returncode == 0, done.stderr
    assert "compiled in" in done.stdout
    assert "mesh data=4,fsdp=1,tensor=1" in done.stdout
    assert not (tmp_path / "scontrol.txt").exists()


@pytest.mark.parametrize(
    ("code", "last", "restarts", "queued"),
    [
        (0, '{"event": "end"}', 0, False),
        (0, '{"event": "stop"}', 0, True),
        (134, '{"event": "save"}', 4, True),
        (134, '{"event": "save"}', 5, False),
        (2, '{"event": "save"}', 0, False),
    ],
)
def test_the_slurm_script_queues_again_what_can_go_on(cluster, tmp_path, code, last, restarts, queued):
    write, environment, _ = cluster
    write("srun", f"exit {code}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(f"{last}\n")
    ended = submit(["tiny"], environment | {"SLURM_RESTART_COUNT": str(restarts)})
    assert ended.returncode == (0 if queued else code)
    assert (tmp_path / "scontrol.txt").exists() == queued
    if queued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 4097\n"


@pytest.fixture
def pods(cluster, tmp_path):
    """Starts the containers of the job, of `steps` steps, as a shell would."""
    _, environment, port = cluster
    service, job = yaml.safe_load_all((PAGES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(given["PROCESSES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert given["COORDINATOR"].split(":")[0] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (script,) = container["args"]
    recipe = "tinyllama --data /shared/text --tokenizer /shared/tokenizer.model"
    assert script.count(recipe) == 1
    running = []

    def start(steps):
        here = script.replace(recipe, f"{RECIPE} --data {tmp_path}/text.txt steps={steps} {SHORT}")
        values = {"COORDINATOR": f"127.0.0.1:{port}", "PROCESSES": given["PROCESSES"]}
        started = [
            subprocess.Popen(
                [*container["command"], here],
                env=environment | values | {"JOB_COMPLETION_INDEX": str(index)},
                start_new_session=True,
            )
            for index in range(int(given["PROCESSES"]))
        ]
        running.extend(started)
        return started

    yield start
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.rotating
def test_the_pods_train_and_are_started_again_when_stopped(pods, tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    started = pods(200)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in started)
        time.sleep(0.05)
    os.kill(started[1].pid, signal.SIGTERM)  # a pod is evicted
    assert [process.wait(120) for process in started] == [75, 75]
    assert '"stop"' in metrics.read_text().splitlines()[-1]
    assert [process.wait(240) for process in pods(200)] == [0, 0]
    assert '"end"' in metrics.read_text().splitlines()[-1]
