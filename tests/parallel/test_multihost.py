"""The rendezvous of several processes, and what they report about each other; nothing here starts JAX's own service."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import threading
import time
from contextlib import suppress

import pytest

from llama_jax.errors import MeshError
from llama_jax.parallel import multihost, rendezvous
from llama_jax.parallel.multihost import Processes, join_job
from llama_jax.parallel.rendezvous import Member


@pytest.fixture
def port():
    """One that is free; the system gives it to nobody else so soon."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def join(*arguments, **options):
    with join_job(*arguments, **options):
        raise AssertionError("joined")


def answer(port, index, count, timeout=5.0):
    rank = rendezvous.Rank("127.0.0.1", port, count, index, None)
    me = Member(index, platform.node(), os.getpid())
    return rendezvous.join_members(rank, me, time.monotonic() + timeout)


@pytest.fixture
def others():
    """Runs functions in threads; what they gave or raised, in their order."""
    threads, results = [], {}

    def run(function, *arguments):
        def keep(number):
            try:
                results[number] = function(*arguments)
            except MeshError as error:
                results[number] = error

        threads.append(threading.Thread(target=keep, args=(len(threads),)))
        threads[-1].start()

    def wait():
        for thread in threads:
            thread.join(20)
        return [results[number] for number in range(len(threads))]

    yield run, wait
    wait()


def test_one_process_needs_nobody(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **__: pytest.fail("initialized"))
    for arguments in ((), ("node1:29500", 1, 0)):
        with join_job(*arguments) as alone:
            assert (alone.index, alone.count, alone.first_of_host) == (0, 1, True)
            alone.barrier("anything")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("node1:1", None, None), {}, r"--processes, --process-id is missing; pass all of --coordinator"),
        ((None, 2, 0), {}, r"--coordinator is missing"),
        (("node1", 2, 0), {}, r"--coordinator 'node1' is not HOST:PORT; write it as node1:29500"),
        (("node1:99999", 2, 0), {}, r"--coordinator 'node1:99999' is not HOST:PORT"),
        (("node1:1", 0, 0), {}, r"--processes 0 must be at least 1"),
        (("node1:1", 2, 2), {}, r"--process-id 2 must be at least 0 and below --processes 2"),
        (("node1:1", 2, 0), {"timeout": 0.0}, r"--start-timeout 0\.0 must be above 0 and at most"),
        (("node1:1", 2, 0), {"timeout": math.inf}, r"--start-timeout inf must be above 0 and at most"),
        ((), {"detect": True}, r"no Slurm, Open MPI, Kubernetes or TPU pod was found that sets --coordinator, --processes"),
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
    rank = multihost._find_rank(None, None, None, True, 5.0)
    assert (rank.coordinator, rank.processes, rank.process_id) == ("node007:61441", 2, 1)
    assert rank.local_devices == [0]
    assert multihost._find_rank("node9:5", None, None, True, 5.0).coordinator == "node9:5", "what is given is not looked for"
    assert multihost._find_rank(None, None, None, False, 5.0) is None, "nothing is looked for unasked"


def test_open_mpi_says_it_all(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    for name, value in {"SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    rank = multihost._find_rank(None, None, None, True, 5.0)
    assert (rank.host, rank.processes, rank.process_id, rank.local_devices) == ("10.96.0.1", 4, 3, [1])


def test_the_missing_are_named_by_all_who_came(port, others):
    run, wait = others
    run(answer, port, 2, 4)
    with pytest.raises(
        MeshError, match=r"2 of 4 processes did not connect to 127\.0\.0\.1:\d+ in time: processes 1, 3; start"
    ):
        join(f"127.0.0.1:{port}", 4, 0, timeout=1.0)
    (refused,) = wait()
    assert "processes 1, 3" in str(refused)


def test_a_coordinator_that_is_not_there(port):
    with pytest.raises(MeshError, match=r"process 1 of 2 cannot reach process 0 at 127\.0\.0\.1:\d+ \(Connection refused\)"):
        join(f"127.0.0.1:{port}", 2, 1, timeout=0.3)


def test_another_program_at_the_coordinators_port(port):
    with socket.create_server(("", port)) as server:

        def hang_up():
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(MeshError, match=r"cannot reach process 0 at .* \(it did not answer\); is it running"):
            join(f"127.0.0.1:{port}", 2, 1, timeout=0.3)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_port_that_is_taken(port):
    with (
        socket.create_server(("", port), reuse_port=False),
        pytest.raises(MeshError, match=r"port \d+ of --coordinator localhost:\d+ cannot be used \(Address already in use\)"),
    ):
        join(f"localhost:{port}", 2, 0, timeout=5.0)


def test_other_counts(port, others):
    run, wait = others
    run(answer, port, 1, 3)
    with pytest.raises(
        MeshError, match=r"process 1 \(pid \d+ on .*\) was started for 3 processes, but process 0 for 2; pass the"
    ):
        join(f"127.0.0.1:{port}", 2, 0, timeout=5.0)
    assert "was started for 3 processes" in str(wait()[0])


def test_the_same_number_twice(port, others):
    run, wait = others
    for _ in range(2):
        run(answer, port, 1, 3)
    with pytest.raises(
        MeshError, match=r"process 1 .* and process 1 .* have the same id; pass a different --process-id to each"
    ):
        join(f"127.0.0.1:{port}", 3, 0, timeout=5.0)
    assert all("have the same id" in str(refused) for refused in wait())


def test_one_that_dies_and_is_started_again_may_come_again(port, others):
    run, wait = others

    def come(index, pid):
        deadline = time.monotonic() + 5
        while True:
            try:
                link = socket.create_connection(("127.0.0.1", port), 5)
                break
            except OSError:
                assert time.monotonic() < deadline
        hello = {"job": "llama_jax", "index": index, "count": 3, "host": "here", "pid": pid}
        link.sendall(json.dumps(hello).encode() + b"\n")
        return link

    def dead_and_alive():
        come(1, 100).close()
        links = [come(1, 101), come(2, 102)]  # the port takes them in this order
        answers = [rendezvous._receive(link) for link in links]
        for link in links:
            link.close()
        return answers

    run(dead_and_alive)
    rank = rendezvous.Rank("127.0.0.1", port, 3, 0, None)
    members, links = rendezvous.accept_members(rank, Member(0, "here", 1), time.monotonic() + 10)
    for link in links.values():
        link.close()
    assert [member.pid for member in members] == [1, 101, 102]
    assert [len(answer["members"]) for answer in wait()[0]] == [3, 3]


def test_strangers_at_the_port_are_sent_away(port, others):
    run, wait = others

    def knock():
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as link:
                    link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    link.recv(1)
                    break
            except ConnectionResetError:
                break
            except OSError:
                continue
        return answer(port, 1, 2)

    run(knock)
    rank = rendezvous.Rank("127.0.0.1", port, 2, 0, None)
    members, links = rendezvous.accept_members(rank, Member(0, "here", 1), time.monotonic() + 10)
    ((answered, link),) = wait()
    assert [member.index for member in members] == [0, 1]
    assert answered == members
    for open_link in (*links.values(), *link.values()):
        open_link.close()


@pytest.fixture
def three(monkeypatch):
    """Three `Processes` joined in this one, and what would have ended it: (code, text)."""
    ends, texts = [], []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(multihost.os, "write", lambda _, text: texts.append(text.decode()))
    members = tuple(Member(index, f"host{index // 2}", 100 + index) for index in range(3))
    pairs = {index: socket.socketpair() for index in (1, 2)}
    joined = [Processes(0, members, {index: ours for index, (ours, _) in pairs.items()})]
    joined += [Processes(index, members, {0: theirs}) for index, (_, theirs) in pairs.items()]
    yield joined, pairs, ends, texts
    for process in joined:
        process._ended = True
    links = [link for pair in pairs.values() for link in pair]
    for link in links:
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
    for process in joined:
        process._thread.join(10)
    for link in links:
        link.close()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waiting_for_all(three, others):
    joined, _, ends, _ = three
    run, wait = others
    arrived = []

    def come(process):
        process.barrier("x")
        arrived.append(process.index)
        process.assert_equal("y", {"mesh": "data=2", "steps": (1, 2)})
        process.close()

    run(come, joined[1])
    run(come, joined[0])
    assert arrived == []
    run(come, joined[2])
    assert wait() == [None] * 3
    assert not ends, "an orderly end is no failure"


def test_what_the_first_tells_the_others_hear_in_its_order(three, others):
    joined, *_ = three
    run, wait = others
    told = [b"", bytes(range(256)) * 2000, b"and so on"]

    def hear(process):
        heard = [process.hear() for _ in told]
        process.barrier("the end")
        return heard

    for process in joined[1:]:
        run(hear, process)
    for content in told:
        joined[0].tell(content)
    joined[0].barrier("the end")
    assert wait() == [told, told]
    Processes().tell(b"nobody is there")


def test_values_that_differ_are_told_to_all(three, others):
    joined, *_ = three
    run, wait = others
    for process in joined:
        run(process.assert_equal, "what is trained", {"recipe steps": 5 + (process.index == 2)})
    for error in wait():
        assert "recipe steps: process 2 has 6, but process 0 has 5; use the same command" in str(error)


def test_the_first_gathers_while_other_threads_wait(three, others):
    joined, *_ = three
    run, wait = others
    for process in joined:
        run(process.barrier, "samples")
    for process in reversed(joined):
        run(process.gather, "files", {"of": (process.index,)})
    assert wait() == [None] * 3 + [[], [], [{"of": [0]}, {"of": [1]}, {"of": [2]}]]
    assert Processes().gather("files", {"of": (0,)}) == [{"of": [0]}]


def test_a_process_that_is_gone_ends_all(three):
    _, pairs, ends, texts = three
    pairs[1][1].shutdown(socket.SHUT_RDWR)  # what the system does when it dies
    until(lambda: len(ends) == 3)  # that one, which is not dead here, misses process 0
    assert sum("process 1 (pid 101 on host0) of 3 is gone" in text for text in texts) == 2
    assert set(ends) == {multihost.OTHER_DIED}
    assert all("start them again with --resume" in text for text in texts)


def test_a_failure_is_told_to_all(three):
    joined, _, ends, texts = three
    joined[2].fail("disk\nfull", 2)
    until(lambda: len(ends) == 2)
    assert ends == [2, 2]
    assert texts == ["\nllama-jax: error: process 2 of 3 failed: disk full; all processes end\n"] * 2


def test_the_first_process_of_a_host(three):
    assert [process.first_of_host for process in three[0]] == [True, False, True]
    assert [process.host for process in three[0]] == [0, 0, 2]
    assert (Processes().on_one_host, three[0][0].on_one_host) == (True, False)


def test_members_survive_the_wire():
    member = Member(3, "node7", 42)
    assert Member(*json.loads(json.dumps([member.index, member.host, member.pid]))) == member
    assert str(member) == "process 3 (pid 42 on node7)"
