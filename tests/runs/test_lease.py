"""Who may write into a run's folder in a store."""

import json
import threading

import object_server
import pytest

from llama_jax.errors import TrainingError
from llama_jax.runs import locks
from llama_jax.runs.locks import Lease
from llama_jax.storage import locate
from llama_jax.storage.consistent_reader import TransientError

KEY = "run/lease.json"


@pytest.fixture
def store(monkeypatch):
    with object_server.emulated(monkeypatch) as server:
        yield server


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(locks, "POLL", 0.01)


def taken(scheme="s3", **told):
    found = Lease(locate(f"{scheme}://bucket/run"))
    found._content |= told
    said = []
    found.acquire(said.append)
    return found, said


def told(store):
    return json.loads(store.objects[KEY])


def age(store, seconds):
    store.written[KEY] -= seconds


def test_it_is_taken_and_given_back(store):
    one, said = taken(holder="1 on here")
    one.check()
    assert (told(store)["holder"], told(store)["ended"], said) == ("1 on here", False, [])
    one.release()
    assert told(store)["ended"]
    with pytest.raises(TrainingError, match="no longer written to"):
        one.check()
    two, said = taken(holder="2 on here")  # at once
    assert (told(store)["holder"], said) == ("2 on here", [])
    two.release()
    assert list(store.objects) == [KEY]


def test_another_is_told_who_has_it(store, quick):
    """As soon as it is renewed: until then its holder may be dead."""
    one, _ = taken(holder="1 on here", since="noon")
    say = lambda line: said.append(line) or one._renew()
    said = []
    with pytest.raises(TrainingError, match="s3://bucket/run is in use by another run, process 1 on here, since noon; wait"):
        Lease(locate("s3://bucket/run")).acquire(say)
    assert said[0].startswith("s3://bucket/run was in use by process 1 on here, since noon: waiting 6")
    one.check()
    one.release()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_what_has_run_out_is_taken_and_its_holder_writes_nothing_more(store, quick, scheme, tmp_path, monkeypatch):
    (tmp_path / "key.json").write_text(object_server.google_key(store))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    one, _ = taken(scheme, holder="1 on here")
    one._renewed -= 100
    one.check()
    age(store, 100)  # by the store's clock, of which ours is an hour behind
    two, said = taken(scheme, holder="2 on there", since="one")
    assert said == []
    one._renewed -= 100  # it was asleep
    with pytest.raises(TrainingError, match=r"run/lease.json was taken over by another run, process 2 on there"):
        one.check()
    with pytest.raises(TrainingError, match="taken over"):
        one.raise_if_lost()
    one.release()
    assert told(store)["holder"] == "2 on there"
    assert not told(store)["ended"]
    two.check()
    two.release()


def test_what_is_not_renewed_runs_out_while_it_is_waited_for(store, quick):
    one, _ = taken(holder="1 on here", seconds=0.2)
    one._stop.set()  # it was killed
    two, said = taken(holder="2 on there")
    assert said[0].endswith("waiting 0 s to see whether it still is")
    assert told(store)["holder"] == "2 on there"
    two.release()


def test_of_two_that_come_at_once_one_has_it(store, quick):
    leases, outcomes = [Lease(locate("s3://bucket/run")) for _ in range(6)], []

    def take(one):
        try:
            one.acquire(lambda line: None)
            outcomes.append(one)
        except TrainingError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=take, args=(one,)) for one in leases]
    for thread in threads:
        thread.start()
    while not any(isinstance(each, Lease) for each in outcomes):
        pass
    (holder,) = [each for each in outcomes if isinstance(each, Lease)]
    for thread in threads:
        while thread.is_alive():
            holder._renew()
            thread.join(0.01)
    assert sum(isinstance(each, Lease) for each in outcomes) == 1
    assert len(outcomes) == 6
    holder.release()


@pytest.mark.parametrize("fault", [500, "lost"])
def test_an_answer_that_goes_wrong_loses_nothing(store, fault, quick):
    one, _ = taken()
    faults = [fault]
    store.write_fault = lambda key, changes: faults.pop() if faults else None
    one._renewed -= 100
    with pytest.raises(TransientError):  # of whoever asks, and tries again
        one.check()
    one.check()
    assert told(store)["renewals"] == 2
    one.release()
    assert told(store)["ended"]


def test_one_that_was_removed_is_lost(store):
    one, _ = taken()
    del store.objects[KEY]
    one._renewed -= 100
    with pytest.raises(TrainingError, match="was removed"):
        one.check()
    one.release()
    assert not store.objects
