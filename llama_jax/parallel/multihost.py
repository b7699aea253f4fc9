"""Several processes as one job: they find each other, synchronize, and end together.

JAX connects processes itself (`jax.distributed`), but if one is missing, was started with different arguments or dies, the
others wait forever or end with a C++ stack trace. So the processes first connect to process 0 over plain TCP, on the
coordinator's port, before JAX's service takes over that port. The connections stay open: the system closes them when a
process ends for any reason, so the others know immediately which process died. A silent host is given up after 30 seconds,
and a process that exists but hangs in the system after 45, by JAX's heartbeat. Like JAX's service, this trusts the network.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import queue
import re
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax

from llama_jax.errors import MeshError, UserError
from llama_jax.parallel.rendezvous import Member, Packet, Rank, accept_members, join_members, keep_alive

OTHER_DIED = 75  # exit code of a process that ends because another died: EX_TEMPFAIL, a restart may help
START_TIMEOUT = 300.0  # seconds
STUCK = 45  # seconds until JAX gives up a hanging process
GIVEN = {"coordinator": "--coordinator", "processes": "--processes", "process_id": "--process-id"}
END = "end of the run"


class Processes:
    """The processes of a job, as seen by one of them. Without arguments: a job with one process."""

    def __init__(
        self,
        index: int = 0,
        members: tuple[Member, ...] = (),
        links: Mapping[int, socket.socket] = {},
        resumes: bool = True,
    ) -> None:
        """`links` are open connections: process 0 has one to each other process; the others have one to process 0."""
        self.index = index
        self._remedy = "start them again" + " with --resume to go on from the last checkpoint" * resumes
        self._members = members
        self._links = dict(links)
        self._lock = threading.Lock()
        self._sending = {index: threading.Lock() for index in links}
        self._told: queue.Queue[bytes] = queue.Queue()
        self._waiting: dict[str, dict[int, Mapping[str, Any]]] = {}
        self._answers: dict[str, queue.Queue[Packet]] = {}  # by name of the call, because several threads may wait at once
        self._ended = not links
        self._thread = threading.Thread(target=self._watch, name="processes", daemon=True)
        if links:
            self._thread.start()

    @property
    def count(self) -> int:
        """The number of processes in the job."""
        return max(len(self._members), 1)

    @property
    def host(self) -> int:
        """The index of the first process on this process's host."""
        return next((m.index for m in self._members if m.host == self._members[self.index].host), 0)

    @property
    def first_of_host(self) -> bool:
        """Whether this process has the lowest index on its host."""
        return self.host == self.index

    @property
    def on_one_host(self) -> bool:
        """Whether all processes run on the same host."""
        return len({m.host for m in self._members}) <= 1

    def barrier(self, what: str) -> None:
        """Wait until all processes have made the same call. It has no timeout, and does not use the devices.

        Several threads may wait at once, for calls with different names.

        Args:
          what: name of the call.
        """
        self.assert_equal(what, {})

    def assert_equal(self, what: str, values: Mapping[str, Any]) -> None:
        """Like `barrier`, and check that all processes have the same values, which must be JSON.

        Raises:
          MeshError: the values of a process differ from those of process 0.
        """
        answer = self._meet({"at": what, "values": values, "same": True})
        if answer["error"]:
            raise MeshError(answer["error"])

    def gather(self, what: str, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Like `barrier`; returns the values of all processes, which must be JSON, in process 0, elsewhere an empty list."""
        return self._meet({"at": what, "values": values, "same": False})["gathered"]

    def _meet(self, message: Packet) -> Packet:
        """Report that this process has reached a call, and return the answer once all have."""
        message = json.loads(json.dumps(message))  # so that types are the same as in other processes' values
        if self.count == 1:
            return {"error": None, "gathered": [message["values"]]}
        answer = self._answers.setdefault(message["at"], queue.Queue())
        if self.index == 0:
            self._arrived(0, message)
        else:
            self._send(0, message)
        reply = answer.get()
        del self._answers[message["at"]]
        return reply

    def tell(self, content: bytes) -> None:
        """In process 0: send bytes to all other processes, from any thread."""
        self._tell_all({"told": base64.b64encode(content).decode()})

    def hear(self) -> bytes:
        """In other processes: wait for and return the next message from process 0."""
        return self._told.get()

    def fail(self, reason: str, code: int) -> None:
        """Tell the other processes why this one ends; they also end, with the same exit code."""
        reason = f"process {self.index} of {self.count} failed: {' '.join(reason.split())[:2000]}; all processes end"
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._tell_all({"failed": reason, "code": code})

    def _tell_all(self, message: Packet) -> None:
        for index in self._links:
            self._send(index, message)

    def _send(self, index: int, message: Packet) -> None:
        line = json.dumps(message).encode() + b"\n"
        # The thread also notices a broken connection, and ends the process.
        with suppress(OSError), self._sending[index]:
            self._links[index].sendall(line)

    def _watch(self) -> None:
        """In a thread: receive messages, and detect processes that end."""
        unread = dict.fromkeys(self._links, b"")
        with selectors.DefaultSelector() as selector:
            for index, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    index = key.data
                    try:
                        read = self._links[index].recv(1 << 16)
                    except OSError:
                        read = b""
                    if not read:
                        selector.unregister(key.fileobj)
                        self._lost(index)
                    *lines, unread[index] = (unread[index] + read).split(b"\n")
                    for line in lines:
                        self._hear(index, json.loads(line))

    def _hear(self, index: int, message: Packet) -> None:
        if "failed" in message:
            self._end_with(message["failed"], message["code"])
        elif "at" in message:
            self._arrived(index, message)
        elif "told" in message:
            self._told.put(base64.b64decode(message["told"]))
        else:
            self._ended |= message["go"] == END
            self._answers[message["go"]].put(message)

    def _arrived(self, index: int, message: Packet) -> None:
        """In process 0: record that a process waits, and release all processes when the last one does."""
        what = message["at"]
        with self._lock:
            waiting = self._waiting.setdefault(what, {})
            waiting[index] = message["values"]
            if len(waiting) < self.count:
                return
            del self._waiting[what]
            self._ended |= what == END
        compared = range(1, self.count) if message["same"] else ()
        differences = (_difference(other, waiting[other], waiting[0]) for other in compared)
        answer = {"go": what, "error": next(filter(None, differences), None), "gathered": []}
        self._tell_all(answer)
        self._answers[what].put(answer | {"gathered": [waiting[index] for index in range(self.count)]})

    def _lost(self, index: int) -> None:
        self._end_with(
            f"{self._members[index]} of {self.count} is gone: it was killed, ran out of memory, or its host failed; all"
            f" processes end; {self._remedy}",
            OTHER_DIED,
        )

    def _end_with(self, reason: str, code: int) -> None:
        """Report a failure of another process, once, and exit: the main thread may be waiting for that process forever."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if self.index == 0:
            self._tell_all({"failed": reason, "code": code})
        os.write(2, f"\nllama-jax: error: {reason}\n".encode())
        os._exit(code)

    def close(self) -> None:
        """End together with all other processes, or with an error if another one has failed."""
        self.barrier(END)
        for link in self._links.values():
            with suppress(OSError):  # the other side may have closed first
                link.shutdown(socket.SHUT_RDWR)
        if self._links:
            self._thread.join()
        for link in self._links.values():
            link.close()


@contextmanager
def join_job(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    detect: bool = False,
    timeout: float = START_TIMEOUT,
    resumes: bool = True,
) -> Iterator[Processes]:
    """Join the job, before any other call of JAX, and leave it at the end of the block together with all other processes.

    An error inside the block is sent to the other processes, which also end with it. This process prints it and exits at
    once, with 2 for a `UserError` and 1 for other errors, since JAX's regular shutdown would wait for them. If a process
    dies silently, the others exit with 75. Without arguments, and for a job with one process, nothing is done.

    Args:
      coordinator: ``HOST:PORT`` of process 0, which listens on this port on all its addresses.
      processes: number of processes.
      process_id: index of this process, from 0.
      detect: take missing values from Slurm, Open MPI, Kubernetes or a TPU pod, as `jax.distributed.initialize` does.
      timeout: seconds within which all processes must connect.
      resumes: whether the error message for a process that died suggests resuming the job.

    Raises:
      MeshError: missing or invalid values, no detectable cluster, an address that cannot be bound or reached, or processes
        that have different arguments or did not connect; the message names them.
    """
    rank = _find_rank(coordinator, processes, process_id, detect, timeout)
    if rank is None or rank.processes == 1:
        yield Processes()
        return
    joined = _join(rank, time.monotonic() + timeout, resumes)
    try:
        yield joined
        joined.close()
    except BaseException as error:
        _leave(joined, error)
    jax.distributed.shutdown()


def _leave(joined: Processes, error: BaseException) -> None:
    """Exit with an error. First give the thread time to report a process that died, which may have caused the error."""
    known = isinstance(error, UserError | OSError)
    if not known:
        time.sleep(2)
    said = str(error) if known else "".join(traceback.format_exception_only(error))
    code = 2 if known else 1
    joined.fail(said, code)
    with suppress(OSError):
        sys.stdout.flush()
    if known:
        text = f"llama-jax: error: process {joined.index} of {joined.count}: {' '.join(said.split())}\n"
    else:
        text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(code)


def _find_rank(
    coordinator: str | None, processes: int | None, process_id: int | None, detect: bool, timeout: float
) -> Rank | None:
    if not 0 < timeout <= 1e7:
        raise MeshError(f"--start-timeout {timeout} must be above 0 and at most 1e7 seconds")
    local_devices = None
    if detect:
        coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        coordinator, processes, process_id, local_devices = _detect(coordinator, processes, process_id, timeout)
    values = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    missing = [GIVEN[name] for name, value in values.items() if value is None]
    if len(missing) == 3 and not detect:
        return None
    if missing and detect:
        raise MeshError(
            f"no Slurm, Open MPI, Kubernetes or TPU pod was found that sets {', '.join(missing)}; pass"
            " --coordinator HOST:PORT --processes N --process-id I"
        )
    if coordinator is None or processes is None or process_id is None:
        raise MeshError(f"{', '.join(missing)} is missing; pass all of --coordinator, --processes and --process-id, or none")
    address = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):(\d{1,5})", coordinator, re.ASCII)
    if not address or not 0 < int(address[2]) < 1 << 16:
        raise MeshError(f"--coordinator {coordinator!r} is not HOST:PORT; write it as node1:29500")
    if processes < 1:
        raise MeshError(f"--processes {processes} must be at least 1")
    if not 0 <= process_id < processes:
        raise MeshError(f"--process-id {process_id} must be at least 0 and below --processes {processes}")
    return Rank(address[1], int(address[2]), processes, process_id, local_devices)


def _detect(
    coordinator: str | None, processes: int | None, process_id: int | None, timeout: float
) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """The values that JAX would detect; JAX has no public function for that."""
    try:
        from jax._src.clusters import ClusterEnv

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        raise MeshError(
            f"no cluster can be detected with jax {jax.__version__}; pass --coordinator, --processes and --process-id"
        ) from None
    try:
        detected = detect(coordinator, processes, process_id, None, None, int(timeout))
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())[:500]
        raise MeshError(
            f"the cluster does not provide this process's id ({reason}); pass --coordinator, --processes, --process-id"
        ) from None
    return detected[0], detected[1], detected[2], None if detected[3] is None else list(detected[3])


def _join(rank: Rank, deadline: float, resumes: bool) -> Processes:
    """Connect to process 0, then start JAX's service and connections, whose messages do not name processes."""
    me = Member(rank.process_id, platform.node(), os.getpid())
    members, links = accept_members(rank, me, deadline) if rank.process_id == 0 else join_members(rank, me, deadline)
    for link in links.values():
        keep_alive(link)
    joined = Processes(rank.process_id, members, links, resumes)
    # JAX would handle SIGTERM itself; `StopVote` agrees on a step, also for Ctrl-C.
    with suppress(AttributeError):  # a later JAX may lack it
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            rank.coordinator,
            rank.processes,
            rank.process_id,
            rank.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            heartbeat_timeout_seconds=STUCK,
        )
    except (RuntimeError, ValueError) as error:
        _leave(joined, MeshError(f"JAX cannot connect the processes ({str(error).splitlines()[0][:300]})"))
    return joined


def _difference(index: int, values: Mapping[str, Any], first: Mapping[str, Any]) -> str | None:
    for name in sorted(values.keys() | first.keys()):
        theirs, ours = values.get(name), first.get(name)
        if theirs != ours:
            return (
                f"{name}: process {index} has {theirs!r}, but process 0 has {ours!r}; use the same command, data and"
                " shared --workdir for all"
            )
    return None
