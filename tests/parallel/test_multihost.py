"""Processes that find each other, and what they report about each other."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from llama_jax.errors import MeshError
from llama_jax.parallel import multihost
from llama_jax.parallel.multihost import Processes, join_job


@pytest.fixture
def port():
    """One that is free; the system gives it to nobody else so soon."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def join(*arguments, **options):
    with join_job(*arguments, **options):
        raise AssertionError("joined")


def introduce(port, index, count, timeout=5.0):
    return multihost._introduce(multihost._Job(f"127.0.0.1:{port}", count, index), time.monotonic() + timeout)


def accept_all(port, count, timeout=5.0):
    return multihost._accept_all(multihost._Job(f"127.0.0.1:{port}", count, 0), time.monotonic() + timeout)


def test_one_process_needs_nobody(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **__: pytest.fail("initialized"))
    for arguments in ((), ("node1:29500", 1, 0)):
        with join_job(*arguments) as alone:
            assert (alone.index, alone.count, alone.first_of_host, alone.on_one_host) == (0, 1, True, True)
            alone.barrier("anything")
            alone.broadcast(b"nobody is there")
            assert alone.gather("files", {"of": (0,)}) == [{"of": [0]}]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("node1:1", None, None), {}, r"^pass all of --coordinator HOST:PORT --processes N --process-id I"),
        (("node1", 2, 0), {}, r"--coordinator 'node1' is not HOST:PORT; write it as node1:29500"),
        (("node1:1", 2, 2), {}, r"--process-id=2 must be at least 0 and at most 1"),
        (("node1:1", 2, 0), {"timeout": 0.0}, r"--start-timeout=0\.0 must be at least 0\.001"),
        ((), {"detect": True}, r"no Slurm, Open MPI, Kubernetes or TPU pod was found; pass all of --coordinator"),
    ],
)
def test_values_that_cannot_be(arguments, options, message):
    with pytest.raises(MeshError, match=message):
        join(*arguments, **options)


def slurm(monkeypatch, index, count, nodes="node[007-008]"):
    values = {
        "JOB_ID": 4097,
        "STEP_NODELIST": nodes,
        "NTASKS": count,
        "PROCID": index,
        "LOCALID": 0,
        "STEP_NUM_NODES": count,
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_slurm_says_it_all(monkeypatch):
    slurm(monkeypatch, 1, 2)
    job = multihost._find_job(None, None, None, True, 5.0)
    assert job[:3] == ("node007:61441", 2, 1)
    assert list(job.local_devices) == [0]
    assert multihost._find_job("node9:5", None, None, True, 5.0).coordinator == "node9:5", "what is given is not looked for"
    assert multihost._find_job(None, None, None, False, 5.0) is None, "nothing is looked for unasked"


def test_open_mpi_says_it_all(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    for name, value in {"SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    job = multihost._find_job(None, None, None, True, 5.0)
    assert (job.coordinator.split(":")[0], *job[1:]) == ("10.96.0.1", 4, 3, [1])


def test_the_missing_are_named_by_all_who_came(port):
    message = rf"2 of 4 processes did not connect to 127\.0\.0\.1:{port} in time: 1, 3; start them"
    with ThreadPoolExecutor() as pool:
        other = pool.submit(introduce, port, 2, 4)
        with pytest.raises(MeshError, match=message) as raised:
            join(f"127.0.0.1:{port}", 4, 0, timeout=1.0)
        assert other.result(20)["error"] == str(raised.value)


def test_a_coordinator_that_is_not_there(port):
    with pytest.raises(MeshError, match=r"process 1 of 2 cannot reach process 0 at 127\.0\.0\.1:\d+ \(Connection refused\)"):
        join(f"127.0.0.1:{port}", 2, 1, timeout=0.3)


def test_strangers_at_the_port_are_sent_away(port):
    def knock():
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5) as link:
                link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionResetError):
                    link.recv(1)
                return introduce(port, 1, 2)
        raise AssertionError("nobody listened")

    with ThreadPoolExecutor() as pool:
        other = pool.submit(knock)
        answer = accept_all(port, 2)
        assert answer == {"error": "", "hosts": [platform.node()] * 2}
        assert other.result(20) == answer


def test_the_first_process_of_a_host():
    three = [Processes(index, ("host0", "host0", "host1")) for index in range(3)]
    assert [process.first_of_host for process in three] == [True, False, True]
    assert [process.host for process in three] == [0, 0, 2]
    assert not three[0].on_one_host


ERRORS = {
    "": (0, ""),
    "a value differs": (2, "recipe steps: process 2 has 6, but process 0 has 5; use the same command"),
    "a process fails": (2, "process 1 of 3 failed: disk full; all processes end"),
    "process 0 has a bug": (1, "process 0 of 3 failed: KeyError: 'loss'; all processes end"),
}


@pytest.mark.parametrize("end", [end if end == "" else pytest.param(end, marks=pytest.mark.slow) for end in ERRORS])
def test_three_processes(port, end):
    """They exchange values, and end together: well, or with the error of one."""
    program = Path(__file__).with_name("joined_process.py")
    running = [
        subprocess.Popen(
            [sys.executable, program, f"127.0.0.1:{port}", "3", str(index), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    code, error = ERRORS[end]
    assert [process.returncode for process in running] == [code] * 3, outputs
    values = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert values[0]["gathered"] == [[{"of": [index, number]} for index in range(3)] for number in range(2)]
    assert values[1]["gathered"] == [[], []]
    assert all((value["host"], value["on_one_host"]) == (0, True) for value in values)
    failing = {"a value differs": 0, "a process fails": 1, "process 0 has a bug": 0}.get(end)
    for index, (_, said) in enumerate(outputs):
        assert error in said or index == failing
        assert ("Traceback" in said) == (end == "process 0 has a bug" and index == failing)
