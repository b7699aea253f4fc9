"""The rendezvous of a job: its processes connect over plain TCP, and all learn which are present or what is wrong."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llama_jax.errors import MeshError

SILENCE = 30  # seconds without an answer until a host is given up
Packet = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A process of the job, as it introduces itself."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Rank:
    """The position of a process in its job."""

    host: str
    port: int
    processes: int
    process_id: int
    local_devices: list[int] | None

    @property
    def coordinator(self) -> str:
        return f"{self.host}:{self.port}"


def accept_members(rank: Rank, me: Member, deadline: float) -> tuple[tuple[Member, ...], dict[int, socket.socket]]:
    """In process 0: wait for the other processes, and tell all of them which are present, or what is wrong."""
    present: dict[int, tuple[Member, socket.socket]] = {}
    strangers: list[socket.socket] = []

    def refuse(reason: str) -> MeshError:
        for link in [*(link for _, link in present.values()), *strangers]:
            with suppress(OSError), link:
                link.sendall(json.dumps({"refused": reason}).encode() + b"\n")
        return MeshError(reason)

    with _listen(rank) as listener:
        while len(present) < rank.processes - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                absent = [index for index in range(1, rank.processes) if index not in present]
                raise refuse(
                    f"{len(absent)} of {rank.processes} processes did not connect to {rank.coordinator} in time:"
                    f" {_in_words(absent)}; start them, check their output, or set a longer --start-timeout"
                ) from None
            link.settimeout(5)
            hello = _receive(link)
            if hello is None or hello.get("job") != "llama_jax":  # a port scanner
                link.close()
                continue
            other = Member(hello["index"], hello["host"], hello["pid"])
            if hello["count"] != rank.processes:
                strangers.append(link)
                raise refuse(
                    f"{other} was started for {hello['count']} processes, but process 0 for {rank.processes};"
                    " pass the same --processes to all"
                )
            if other.index in present and _has_ended(present[other.index][1]):
                present.pop(other.index)[1].close()  # it was restarted
            if other.index == 0 or other.index in present:
                strangers.append(link)
                twin = me if other.index == 0 else present[other.index][0]
                raise refuse(f"{twin} and {other} have the same id; pass a different --process-id to each")
            present[other.index] = other, link
    members = (me, *(present[index][0] for index in range(1, rank.processes)))
    links = {index: link for index, (_, link) in present.items()}
    welcome = json.dumps({"members": [[m.index, m.host, m.pid] for m in members]}).encode() + b"\n"
    for link in links.values():
        with suppress(OSError):  # a process that has died is detected later
            link.sendall(welcome)
    return members, links


def _has_ended(link: socket.socket) -> bool:
    """Whether the process at the other end has closed the connection; a waiting process sends nothing."""
    link.setblocking(False)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        link.settimeout(5)


def join_members(rank: Rank, me: Member, deadline: float) -> tuple[tuple[Member, ...], dict[int, socket.socket]]:
    """In every other process: introduce this process to process 0, and receive the members."""
    hello = {"job": "llama_jax", "index": me.index, "count": rank.processes, "host": me.host, "pid": me.pid}
    pause = 0.05
    while True:
        left = max(deadline - time.monotonic(), 0)
        try:
            link = socket.create_connection((rank.host.strip("[]"), rank.port), max(left, 0.1))
            link.settimeout(left + 10)  # process 0, which may have started later, knows which are missing
            answer = _exchange(link, hello)
            if answer is not None:
                break
            link.close()  # process 0 is restarting, or another program has the port
            reason = "it did not answer"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + pause > deadline:
            raise MeshError(
                f"process {me.index} of {rank.processes} cannot reach process 0 at {rank.coordinator} ({reason}); is it"
                " running, and is this its host's address? If it starts later, set a longer --start-timeout"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    if "refused" in answer:
        link.close()
        raise MeshError(answer["refused"])
    return tuple(Member(*fields) for fields in answer["members"]), {0: link}


def _exchange(link: socket.socket, message: Packet) -> Packet | None:
    """Send a message and return the answer, or None if there is none."""
    try:
        link.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return None
    return _receive(link)


def _listen(rank: Rank) -> socket.socket:
    """Listen on all addresses, as JAX's service will later."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", rank.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=rank.processes)
        return socket.create_server(("", rank.port), backlog=rank.processes)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise MeshError(
            f"port {rank.port} of --coordinator {rank.coordinator} cannot be used ({reason}); use another port for all"
            " processes"
        ) from None


def _receive(link: socket.socket) -> Packet | None:
    """Receive one message, or None if there is none, without reading beyond it."""
    read = b""
    try:
        while not read.endswith(b"\n"):
            byte = link.recv(1)
            if not byte or len(read) > 1 << 20:
                return None
            read += byte
        message = json.loads(read)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def keep_alive(link: socket.socket) -> None:
    """Have the system probe whether a silent host is alive."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not all systems have all of these options.
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE // 3),
        ("TCP_KEEPINTVL", SILENCE // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", SILENCE * 1000),
    ):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _in_words(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:20]))
    return f"process{'es' if len(indices) > 1 else ''} {shown}{' and more' if len(indices) > 20 else ''}"
