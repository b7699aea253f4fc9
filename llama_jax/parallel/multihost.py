"""Several processes as one job: they find each other, synchronize, and end together.

`jax.distributed` connects the processes. Its service, in process 0, provides barriers and a store for small values, by which
the others also learn why one of them fails. When a process is killed, the service misses its heartbeats, and JAX ends the
others. When one is not started, JAX would end the others without naming it; so they first introduce themselves to process 0,
on the port of the service before that starts. Like the service, this trusts the network.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import jax
from jax._src.clusters import ClusterEnv  # JAX has no public function that only detects a cluster
from jax._src.distributed import global_state  # nor a public name for the client of its service

from llama_jax.errors import MeshError, UserError
from llama_jax.settings import Bounds

START_TIMEOUT = 300.0  # seconds
CONNECT_SECONDS = 60  # for JAX's own connections, after all processes have introduced themselves
HEARTBEAT_TIMEOUT = 20  # seconds without a heartbeat until JAX ends the job
NO_TIMEOUT_MS = 10**12  # 31 years
NOTICE_SECONDS = 2  # for the other processes to read why this one ends, before JAX's service ends with it
MESSAGES_STORED = 256  # broadcast messages, until those that all processes have received are deleted
FAILURE = "llama_jax/failure"  # key of the reason why the job ends; null after an orderly end


class Processes:
    """The processes of a job, as seen by one of them. Without arguments: a job with one process."""

    def __init__(self, index: int = 0, hosts: Sequence[str] = ("",), client: Any = None) -> None:
        """`hosts` are the names of the hosts of all processes, by index, and `client` is that of JAX's service."""
        self.index = index
        self.count = len(hosts)
        self.host = hosts.index(hosts[index])  # the first process on this process's host
        self.first_of_host = self.host == index
        self.on_one_host = len(set(hosts)) == 1
        self._client = client
        self._calls: dict[str, int] = {}  # number of barriers, by name
        self._message_numbers = itertools.count(1)
        self._has_failed = False
        self._watcher = threading.Thread(target=self._watch_failures, name="failures", daemon=True)
        if client is not None:
            self._watcher.start()

    def barrier(self, what: str) -> None:
        """Wait until all processes have made the same call. It has no timeout, and does not use the devices.

        Several threads may wait at once, for calls with different names.

        Args:
          what: name of the call.
        """
        if self.count > 1:
            number = self._calls[what] = self._calls.get(what, 0) + 1
            self._client.wait_at_barrier(f"{what} {number}", NO_TIMEOUT_MS)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Like `barrier`; returns the values of all processes, which must be JSON, in process 0, elsewhere an empty list."""
        content = json.dumps(value)
        if self.count == 1:
            return [json.loads(content)]
        folder = f"{what} {self._calls.get(what, 0)}/"
        self._client.key_value_set(f"{folder}{self.index}", content)
        self.barrier(what)
        if self.index:
            return []
        contents = dict(self._client.key_value_dir_get(folder))
        self._client.key_value_delete(folder)
        return [json.loads(contents[f"{folder}{index}"]) for index in range(self.count)]

    def assert_equal(self, what: str, values: Mapping[str, Any]) -> None:
        """Like `barrier`, and check that all processes have the same values, which must be JSON.

        Raises:
          MeshError: the values of a process differ from those of process 0, in which it is raised.
        """
        gathered = self.gather(what, values)
        for index, others in enumerate(gathered):
            for name in sorted(others.keys() | gathered[0].keys()):
                value, first = others.get(name), gathered[0].get(name)
                if value != first:
                    raise MeshError(
                        f"{name}: process {index} has {value!r}, but process 0 has {first!r}; use the same command, data and"
                        " shared --workdir for all"
                    )
        self.barrier(what)

    def broadcast(self, content: bytes) -> None:
        """In process 0: send bytes to all other processes, which `receive` them; from one thread at a time."""
        if self.count > 1:
            number = next(self._message_numbers)
            self._client.key_value_set_bytes(f"messages/{number}", content)
            self._delete_received(number)

    def receive(self) -> bytes:
        """In other processes: wait for and return the next message from process 0."""
        number = next(self._message_numbers)
        content: bytes = self._client.blocking_key_value_get_bytes(f"messages/{number}", NO_TIMEOUT_MS)
        self._delete_received(number)
        return content

    def _delete_received(self, number: int) -> None:
        if number % MESSAGES_STORED == 0:
            self.barrier("messages received")
            if self.index == 0:
                self._client.key_value_delete("messages/")

    def fail(self, reason: str, code: int) -> None:
        """Tell the other processes why this one ends; they also end, with the same exit code."""
        if self.count == 1:
            return
        self._has_failed = True
        reason = f"process {self.index} of {self.count} failed: {' '.join(reason.split())[:2000]}; all processes end"
        with suppress(jax.errors.JaxRuntimeError):  # another process has failed before
            self._client.key_value_set(FAILURE, json.dumps([reason, code]))
        if self.index == 0:
            time.sleep(NOTICE_SECONDS)

    def _watch_failures(self) -> None:
        """In a thread: end this process when another one fails."""
        try:
            failure = json.loads(self._client.blocking_key_value_get(FAILURE, NO_TIMEOUT_MS))
        except jax.errors.JaxRuntimeError:  # process 0 has died, and JAX ends this process
            return
        if failure is None or self._has_failed:
            return
        reason, code = failure
        os.write(2, f"\nllama-jax: error: {reason}\n".encode())
        if self.index == 0:
            time.sleep(NOTICE_SECONDS)
        os._exit(code)

    def close(self) -> None:
        """End together with all other processes."""
        if self.count > 1:
            self.barrier("end of the job")
            if self.index == 0:
                self._client.key_value_set(FAILURE, "null")
            self._watcher.join()
            jax.distributed.shutdown()


class _Job(NamedTuple):
    """The first arguments of `jax.distributed.initialize`."""

    coordinator: str
    processes: int
    process_id: int
    local_devices: Sequence[int] | None = None


@contextmanager
def join_job(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    detect: bool = False,
    timeout: float = START_TIMEOUT,
) -> Iterator[Processes]:
    """Join the job, before any other call of JAX, and leave it at the end of the block together with all other processes.

    An error inside the block is sent to the other processes, which also end with it. This process prints it and exits at
    once, with 2 for a `UserError` and 1 for other errors, since JAX's regular shutdown would wait for them. If a process
    is killed, JAX aborts the others, within 20 seconds. Without arguments, and for a job with one process, nothing is done.

    Args:
      coordinator: ``HOST:PORT`` of process 0, which listens on this port on all its addresses.
      processes: number of processes.
      process_id: index of this process, from 0.
      detect: take missing values from Slurm, Open MPI, Kubernetes or a TPU pod, as `jax.distributed.initialize` does.
      timeout: seconds within which all processes must connect.

    Raises:
      MeshError: missing or invalid values, no detectable cluster, an address that cannot be bound or reached, or processes
        that have different arguments or did not connect; the message names them.
    """
    job = _find_job(coordinator, processes, process_id, detect, timeout)
    if job is None or job.processes == 1:
        yield Processes()
        return
    answer = (_introduce if job.process_id else _accept_all)(job, time.monotonic() + timeout)
    if answer["error"]:
        raise MeshError(answer["error"])
    # JAX would handle SIGTERM itself; `StopVote` agrees on a step, also for Ctrl-C.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        *job,
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
    )
    joined = Processes(job.process_id, answer["hosts"], global_state.client)
    try:
        yield joined
        joined.close()
    except BaseException as error:
        _leave(joined, error)


def _leave(joined: Processes, error: BaseException) -> NoReturn:
    """Exit with an error, and end all other processes with it."""
    if isinstance(error, UserError | OSError):
        reason, code = str(error), 2
        text = f"llama-jax: error: process {joined.index} of {joined.count}: {' '.join(reason.split())}\n"
    else:
        reason, code = "".join(traceback.format_exception_only(error)), 1
        text = "".join(traceback.format_exception(error))
    # A collective fails, with either of these errors, where another process has failed, which then ends this one, or was
    # killed, which JAX then names.
    other_may_have_failed = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    if other_may_have_failed:
        time.sleep(2 * NOTICE_SECONDS)
    with suppress(OSError):
        sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    if other_may_have_failed:
        time.sleep(HEARTBEAT_TIMEOUT)
    joined.fail(reason, code)
    os._exit(code)


def _find_job(
    coordinator: str | None, processes: int | None, process_id: int | None, detect: bool, timeout: float
) -> _Job | None:
    Bounds(1e-3, 1e7).check("--start-timeout", timeout, MeshError)
    local_devices = None
    if detect:
        coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        try:
            coordinator, processes, process_id, local_devices = ClusterEnv.auto_detect_unset_distributed_params(
                coordinator, processes, process_id, None, None, int(timeout)
            )
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())[:500]
            raise MeshError(
                f"the cluster does not provide this process's id ({reason}); pass --coordinator, --processes, --process-id"
            ) from None
    elif coordinator is processes is process_id is None:
        return None
    if coordinator is None or processes is None or process_id is None:
        reason = "no Slurm, Open MPI, Kubernetes or TPU pod was found; " if detect else ""
        raise MeshError(f"{reason}pass all of --coordinator HOST:PORT --processes N --process-id I")
    if not re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}", coordinator, re.ASCII):
        raise MeshError(f"--coordinator {coordinator!r} is not HOST:PORT; write it as node1:29500")
    Bounds(0, processes - 1).check("--process-id", process_id, MeshError)
    return _Job(coordinator, processes, process_id, local_devices)


def _accept_all(job: _Job, deadline: float) -> dict[str, Any]:
    """In process 0: wait until all others have introduced themselves, and answer them.

    Returns:
      The answer: "hosts", the names of the hosts of all processes, and "error", what is wrong, or "".
    """
    hosts, links, error = {0: platform.node()}, dict[int, socket.socket](), ""
    dual = socket.has_dualstack_ipv6()  # all addresses, as JAX's service will listen on
    family = socket.AF_INET6 if dual else socket.AF_INET
    port = int(job.coordinator.rpartition(":")[2])
    with socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=job.processes) as listener:
        while not error and (absent := sorted(set(range(job.processes)) - hosts.keys())):
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                error = (
                    f"{len(absent)} of {job.processes} processes did not connect to {job.coordinator} in time:"
                    f" {', '.join(map(str, absent))}; start them, check their output, or set a longer --start-timeout"
                )
                break
            link.settimeout(5)
            hello = _receive_line(link)
            if not isinstance(hello, dict) or hello.keys() != {"process_id", "processes", "host"}:  # a port scanner
                link.close()
                continue
            index, host = hello["process_id"], hello["host"]
            if index in links:
                reason = f"process {index} was started on {hosts[index]} and again on {host}; pass different --process-id"
                _send_line(links[index], {"error": reason})  # if it was not restarted
                links[index].close()
            hosts[index], links[index] = host, link
            if hello["processes"] != job.processes:
                error = (
                    f"process {index} on {host} was started for {hello['processes']} processes, but process 0 for"
                    f" {job.processes}; pass the same --processes to all"
                )
    answer = {"error": error, "hosts": list(map(hosts.get, range(job.processes)))}
    for link in links.values():
        _send_line(link, answer)
        link.close()
    return answer


def _introduce(job: _Job, deadline: float) -> dict[str, Any]:
    """In every other process: introduce this process to process 0, and wait for the answer."""
    host, _, port = job.coordinator.rpartition(":")
    while True:
        seconds_left = max(deadline - time.monotonic(), 0.1)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), seconds_left) as link:
                link.settimeout(seconds_left + 10)  # process 0, which may have started later, knows which are missing
                _send_line(link, {"process_id": job.process_id, "processes": job.processes, "host": platform.node()})
                if answer := _receive_line(link):
                    return answer
            reason = "it did not answer"  # it is restarting, or another program has the port
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise MeshError(
                f"process {job.process_id} of {job.processes} cannot reach process 0 at {job.coordinator} ({reason}); is it"
                " running, and is this its host's address? If it starts later, set a longer --start-timeout"
            )
        time.sleep(0.2)


def _send_line(link: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the other side has ended
        link.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(link: socket.socket) -> Any:
    """The next message, or None if there is none."""
    try:
        with link.makefile() as lines:
            return json.loads(lines.readline(1 << 20))
    except (OSError, ValueError):
        return None
