"""The engine: whatever else it serves, every request gets what `generate` gives it alone."""

import random
import threading
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import jit_logits, sharp

import llama_jax
from llama_jax import Sampling
from llama_jax.errors import GenerationError, MeshError
from llama_jax.model.cache import CacheOptions
from llama_jax.model.trees import quantize
from llama_jax.parallel.mesh import parse_mesh
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import BURST
from llama_jax.serving.requests import BusyError, ClosedError, GenerationRequest

SMALL = EngineOptions(rows=4, context=128, prefill_chunk=16)
FULL = replace(SMALL, cache_tokens=128)  # for one row of the whole context


@pytest.fixture(scope="module")
def model():
    """Random, with sharp logits so that rounding between batch sizes cannot turn an argmax over."""
    config = replace(llama_jax.preset("stories-260k"), n_layers=2)
    return config, sharp(config, jax.random.key(1))


@pytest.fixture(scope="module")
def warm_engine(model):
    """Whose programs are compiled; another with the same options shares them."""
    engine = Engine(*model, SMALL)
    engine.warm()
    yield engine
    engine.close()


class Client:
    """Submits a request and keeps its updates."""

    def __init__(self, engine, **fields):
        self.updates = []
        self.request = GenerationRequest(**fields)
        self.ticket = engine.submit(self.request, self.updates.append)

    @property
    def ids(self):
        return [token.id for update in self.updates for token in update.tokens]

    @property
    def logprobs(self):
        return [token.logprob for update in self.updates for token in update.tokens]

    @property
    def finish(self):
        return self.updates[-1].finish if self.updates else None


def exhaust(engine):
    while engine.step():
        pass


def run(engine, **fields):
    """A client whose request has ended, with all others."""
    client = Client(engine, **fields)
    exhaust(engine)
    return client


def growing(engine):
    """Clients whose prompts and answers are each longer than the last, and have ended."""
    clients = [Client(engine, prompt=[1, *range(5, 5 + 9 * i)], max_new_tokens=12 * i) for i in range(1, 4)]
    exhaust(engine)
    return clients


def alone(model, request, **options):
    return llama_jax.generate(
        *model,
        [request.prompt],
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop_tokens=request.stop_tokens,
        **options,
    )[0]


def as_alone(model, clients):
    for client in clients:
        assert client.ids == alone(model, client.request).tokens


@pytest.fixture
def bursts(monkeypatch):
    """Whether a row that is alone gets several tokens in a turn, independently of the clock."""

    def set_to(wanted):
        monkeypatch.setattr("llama_jax.serving.engine.BURST_SECONDS", 1e9 if wanted else 0.0)

    set_to(True)
    return set_to


def some_request(rng, vocab=512, context=128):
    prompt = [1, *(rng.randrange(3, vocab) for _ in range(rng.choice([0, 3, 15, 16, 17, 31, 40, 64, 90])))]
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        seed=rng.randrange(2**32),
    )
    most = min(rng.choice([1, 2, 7, 30, 60]), context - len(prompt))
    stop = tuple(rng.sample(range(3, vocab), rng.choice([0, 5])))
    return {"prompt": prompt, "max_new_tokens": most, "sampling": sampling, "stop_tokens": stop}


def come_and_go(engine, wanted, rng, expected):
    """Requests at random moments, of which some are cancelled; each must get what it gets alone, or the beginning of that.

    In the end nothing is left of them; once the engine is warm, nothing is compiled.

    Args:
      wanted: the fields of each.
      expected: what `generate` gives a request alone.
    """
    clients, cancelled = [], set()
    while wanted or engine.busy:
        for _ in range(rng.randrange(3)):
            if wanted:
                clients.append(Client(engine, **wanted.pop()))
        if rng.random() < 0.05 and clients:
            cancelled.add(gone := rng.randrange(len(clients)))
            clients[gone].ticket.cancel()
        engine.step()
    assert engine.stats().compilations_after_ready == 0
    for i, client in enumerate(clients):
        answer = expected(client.request)
        if i in cancelled:
            assert client.ids == answer.tokens[: len(client.ids)]
            assert client.finish is not None
        else:
            assert client.ids == answer.tokens
            assert client.finish == answer.finish_reason
            np.testing.assert_allclose(client.logprobs, answer.logprobs, atol=1e-4)
        for update in client.updates:
            assert all(len(token.alternatives) == client.request.alternatives for token in update.tokens)
    stats = engine.stats()
    assert stats.running == stats.reading == stats.waiting == stats.waiting_tokens == 0
    assert not engine.scheduler.rows
    assert engine.scheduler.pages.available == engine.scheduler.pages.count


class TestEveryRequestGetsWhatItGetsAlone:
    @pytest.mark.parametrize(
        ("options", "in_bursts", "counts"),
        [
            pytest.param(SMALL, False, (24,), marks=(pytest.mark.slow, pytest.mark.rotating)),
            (SMALL, True, (5, 1, 2)),
            pytest.param(FULL, False, (16,), marks=(pytest.mark.slow, pytest.mark.rotating)),
        ],
        ids=["one token a turn", "bursts", "a full cache"],
    )
    @pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.nightly) for x in (1, 2))])
    def test_among_others_that_come_and_go(self, model, warm_engine, bursts, options, in_bursts, counts, seed):
        bursts(in_bursts)
        engine, rng = Engine(*model, options), random.Random(seed)
        more = {"max_new_tokens": 35, "stop_tokens": ()} if options is FULL else {}
        for count in counts:
            come_and_go(engine, [some_request(rng) | more for _ in range(count)], rng, partial(alone, model))
        assert (engine.stats().preempted > 0) == (options is FULL)

    @pytest.mark.slow
    def test_with_a_cache_of_int8_and_quantized_weights(self, model, bursts):
        config, params = model
        quantized, cache = (config, quantize(params, "int8")), CacheOptions(dtype="int8")
        for client in growing(Engine(*quantized, replace(SMALL, cache=cache))):
            assert client.ids == alone(quantized, client.request, cache=cache).tokens

    @pytest.mark.slow
    def test_on_a_mesh(self, model, tmp_path, bursts):
        llama_jax.save(tmp_path / "model", *model)
        engine = Engine(*llama_jax.load(tmp_path / "model", mesh=parse_mesh("tensor=2"))[:2], SMALL)
        as_alone(model, growing(engine))


def test_nothing_is_compiled_once_it_is_warm(model, warm_engine, bursts):
    rng, before = random.Random(7), warm_engine.stats().compilations_after_ready
    for _ in range(40):
        Client(warm_engine, **some_request(rng), alternatives=rng.choice([0, 3]), score_prompt=rng.random() < 0.2)
        warm_engine.step()
    exhaust(warm_engine)
    Client(warm_engine, prompt=[1, 5], max_new_tokens=120)  # alone, in rows of every size
    exhaust(warm_engine)
    stats = warm_engine.stats()
    assert stats.compilations_after_ready == before
    assert stats.running == stats.reading == stats.waiting == 0
    assert sum(stats.finished.values()) >= 40


class TestBursts:
    def test_several_tokens_in_a_turn(self, model, warm_engine, bursts):
        def taken(wanted, **kwargs):
            bursts(wanted)
            engine = Engine(*model, SMALL)
            client = run(engine, prompt=[1, 5], max_new_tokens=42, **kwargs)
            return engine.stats().iterations, client

        (many, one_by_one), (few, in_bursts) = taken(False), taken(True)
        assert many == 43  # a token in each turn, and one turn to collect the last
        assert few == 4 + -(-39 // BURST)  # the third turn knows how long a token takes
        assert in_bursts.ids == one_by_one.ids == alone(model, in_bursts.request).tokens
        assert len(in_bursts.updates) == len(one_by_one.updates)
        np.testing.assert_allclose(in_bursts.logprobs, one_by_one.logprobs, atol=1e-5)
        bound = taken(True, constraint=EveryOther(512))  # what is allowed depends on the token before
        assert bound[0] >= many
        assert [token % 2 for token in bound[1].ids] == [0, 1] * 21

    def test_they_end_at_the_limit_or_a_stop_token(self, model, warm_engine, bursts):
        engine = Engine(*model, SMALL)
        tokens = alone(model, GenerationRequest(prompt=[1, 5], max_new_tokens=14)).tokens
        for n in range(1, 15):
            limited = run(engine, prompt=[1, 5], max_new_tokens=n)
            assert (limited.ids, limited.finish) == (tokens[:n], "length")
            stopped = run(engine, prompt=[1, 5], max_new_tokens=40, stop_tokens=[tokens[n - 1]])
            assert (stopped.ids, stopped.finish) == (tokens[: tokens.index(tokens[n - 1])], "stop")
        assert not engine.scheduler.rows

    def test_others_that_arrive_wait_for_one(self, model, warm_engine, bursts):
        engine = Engine(*model, SMALL)
        first = Client(engine, prompt=[1, 5], max_new_tokens=40)
        while len(first.ids) < 10:
            engine.step()
        second = Client(engine, prompt=[1, 6], max_new_tokens=20)
        before = len(first.ids)
        engine.step()
        assert len(first.ids) == before + BURST
        engine.step()
        assert (len(first.ids), len(second.ids)) == (before + BURST + 1, 1)
        exhaust(engine)
        as_alone(model, (first, second))


class TestPrefixCache:
    @pytest.fixture(autouse=True)
    def deterministic(self, bursts):
        """What is compared to the bit must not come from two programs."""

    def test_cold_warm_and_evicted_are_the_same_bits(self, model, warm_engine):
        prompt = [1, *range(20, 100)]
        kwargs = {"prompt": prompt, "max_new_tokens": 20, "alternatives": 5, "sampling": Sampling(temperature=0.8, seed=3)}
        engine = Engine(*model, SMALL)
        cold = run(engine, **kwargs)
        warm = run(engine, **kwargs)
        assert (cold.updates[0].cached, warm.updates[0].cached) == (0, 80)
        engine.scheduler.pages.most_bytes = engine.scheduler.pages.held_bytes // 2  # the next piece drives others out
        other = run(engine, prompt=[1, *range(200, 280)], max_new_tokens=5)
        assert engine.scheduler.pages.evicted > 0
        evicted = run(engine, **kwargs)
        assert evicted.updates[0].cached < 80
        assert other.updates[0].cached == 0
        tokens = [[token for update in client.updates for token in update.tokens] for client in (cold, warm, evicted)]
        assert tokens[0] == tokens[1] == tokens[2]  # logprobs and alternatives included, to the bit

    def test_what_a_longer_prompt_left_serves_a_shorter_one(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        run(engine, prompt=[1, *range(20, 110)], max_new_tokens=1)
        fresh = Engine(*model, replace(SMALL, prefix_bytes=0))
        for length in (16, 17, 33, 48, 49, 70):
            kwargs = {"prompt": [1, *range(20, 110)][:length], "max_new_tokens": 8, "alternatives": 3}
            warm, cold = Client(engine, **kwargs), Client(fresh, **kwargs)
            exhaust(engine)
            exhaust(fresh)
            assert warm.updates[0].cached == (length - 1) // 16 * 16
            assert cold.updates[0].cached == 0
            assert warm.updates == [replace(u, cached=warm.updates[i].cached) for i, u in enumerate(cold.updates)]

    def test_the_bytes_are_bounded_and_the_beginning_outlives_the_end(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        run(engine, prompt=[1, *range(20, 100)], max_new_tokens=1)
        piece = engine.scheduler.pages.held_bytes // len(engine.scheduler.pages)
        small = Engine(*model, replace(SMALL, prefix_bytes=3 * piece + 1))
        for start in (20, 150, 300, 20):
            client = run(small, prompt=[1, *range(start, start + 80)], max_new_tokens=1)
            assert small.scheduler.pages.held_bytes <= 3 * piece
            assert len(small.scheduler.pages) == 3
        assert client.updates[0].cached == 0
        again = run(small, prompt=[1, *range(20, 36)], max_new_tokens=1)
        assert again.updates[0].cached == 0  # its five pieces did not all fit, and the first three were driven out


class TestFullCache:
    """Rows take pages as they grow; where there are no more, the youngest read their tokens again later."""

    def test_the_youngest_give_way_and_no_token_changes(self, model, bursts):
        engine = Engine(*model, FULL)
        sampling = [Sampling(temperature=t, repetition_penalty=p, seed=9) for t, p in ((0, 1), (1, 1), (0.8, 1.4), (0, 1.2))]
        clients = [Client(engine, prompt=[1, 5 + i], max_new_tokens=110, sampling=x) for i, x in enumerate(sampling)]
        exhaust(engine)
        assert engine.stats().preempted > 2
        assert [client.finish for client in clients] == ["length"] * 4
        as_alone(model, clients)
        assert engine.scheduler.pages.available == engine.scheduler.pages.count

    def test_what_gave_way_leaves_only_prefixes_of_its_own_tokens(self, model):
        """A row that an older one takes the pages of while a step is made begins again, and not in the middle."""
        rng, engine = random.Random(4), Engine(*model, replace(FULL, prefill_chunk=64))  # a seed with which it did not
        draw = lambda least, most: [1, *rng.choices(range(5, 500), k=rng.randrange(least, most))]
        for _ in range(6):
            prompt = draw(60, 95)
            Client(engine, prompt=draw(2, 40), max_new_tokens=rng.randrange(20, 80))
            for _ in range(rng.randrange(30)):
                engine.step()
            run(engine, prompt=prompt, max_new_tokens=20)
            again = run(engine, prompt=[*prompt[:-3], 7], max_new_tokens=6)
            assert again.ids == alone(model, again.request).tokens
        assert engine.stats().preempted

    def test_a_request_waits_for_the_pages_of_its_prompt_and_none_passes_it(self, model):
        engine = Engine(*model, FULL)
        first = Client(engine, prompt=[1, *range(5, 100)], max_new_tokens=10)
        engine.step()
        long, short = (
            Client(engine, prompt=[1, *range(105, 200)], max_new_tokens=2),
            Client(engine, prompt=[1], max_new_tokens=2),
        )
        while first.finish is None:
            engine.step()
            assert engine.stats().waiting == 2 or first.finish
        exhaust(engine)
        assert engine.stats().preempted == 0
        as_alone(model, (first, long, short))

    def test_a_request_needs_no_pages_for_what_it_shares_with_running_ones(self, model):
        engine = Engine(*model, FULL)  # of eight pages
        begun = [1, *range(5, 68)]
        first = Client(engine, prompt=[*begun, 70], max_new_tokens=15)
        while not first.ids:
            engine.step()
        second = Client(engine, prompt=[*begun, *range(80, 100)], max_new_tokens=10)  # six pages, of which four are there
        while first.finish is None:
            engine.step()
        assert second.ids
        assert second.updates[0].cached == 64
        exhaust(engine)
        assert engine.stats().preempted == 0
        as_alone(model, (first, second))

    def test_a_scored_prompt_and_a_constraint_go_on_too(self, model):
        engine = Engine(*model, FULL)
        first = Client(engine, prompt=[1, 7], max_new_tokens=120)
        while len(first.ids) < 30:
            engine.step()
        bound = Client(engine, prompt=[1, 7], max_new_tokens=60, constraint=EveryOther(512))
        scored = run(engine, prompt=[1, *range(50, 70)], max_new_tokens=60, score_prompt=True)
        assert engine.stats().preempted
        assert [token % 2 for token in bound.ids] == [0, 1] * 30
        assert len(scored.updates[0].prompt) == 21
        as_alone(model, (first, scored))


class TestCancelling:
    def test_wherever_it_is_its_row_is_free_within_two_turns(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        running = [Client(engine, prompt=[1, 7 + i], max_new_tokens=60) for i in range(3)]
        while engine.stats().running < 3:
            engine.step()
        reading = Client(engine, prompt=[1, *range(5, 100)], max_new_tokens=20)
        while not engine.stats().reading:
            engine.step()
        waiting = Client(engine, prompt=[1, 9], max_new_tokens=60)
        for client in (waiting, reading, running[2]):
            client.ticket.cancel()
            client.ticket.cancel()
            engine.step()
            assert client.finish == "cancelled"
        assert engine.stats()[1:4] == (2, 0, 0)
        exhaust(engine)
        as_alone(model, running[:2])
        reading.ticket.cancel()  # one that has ended
        assert not engine.step()


class TestQueue:
    def test_what_has_no_room_is_refused_at_once(self, model, warm_engine):
        engine = Engine(*model, replace(SMALL, most_waiting=3, most_waiting_tokens=40))
        for _ in range(3):
            Client(engine, prompt=[1, 5], max_new_tokens=2)
        with pytest.raises(BusyError, match=r"3 requests with 6 tokens are waiting.*try again later") as refused:
            Client(engine, prompt=[1, 5], max_new_tokens=2)
        assert 1 <= refused.value.retry_after <= 60
        exhaust(engine)
        Client(engine, prompt=[1] * 30, max_new_tokens=2)
        with pytest.raises(BusyError):
            Client(engine, prompt=[1] * 30, max_new_tokens=2)
        assert engine.stats().refused == 2
        exhaust(engine)
        Client(engine, prompt=[1] * 60, max_new_tokens=2)  # alone, a long one may always wait

    def test_a_short_prompt_does_not_wait_for_long_ones_nor_they_for_ever(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        long = [Client(engine, prompt=[1, *range(5, 115 - i)], max_new_tokens=2) for i in range(2)]
        engine.step()
        turns = 0
        short = [Client(engine, prompt=[1, 7 + i], max_new_tokens=2) for i in range(8)]
        while not all(client.finish for client in long):
            engine.step()
            turns += 1
            if turns == 4:
                assert short[0].updates
        assert turns < 2 * 2 * 7 + 6  # at half the speed: the prompts are of seven pieces


class EveryOther:
    """A constraint: even ids after odd ones and odd ones after even."""

    def __init__(self, vocab):
        self.bits, self.odd = vocab, False

    def allowed(self):
        return np.full(-(-self.bits // 32), 0xAAAAAAAA if self.odd else 0x55555555, np.uint32)

    def accept(self, token):
        assert token % 2 == self.odd
        self.odd = not self.odd


class Halting(EveryOther):
    """The same, which takes each token in only when it is told to."""

    def __init__(self, vocab):
        super().__init__(vocab)
        self.asked, self.told = threading.Semaphore(0), threading.Semaphore(0)

    def accept(self, token):
        self.asked.release()
        assert self.told.acquire(timeout=20)
        super().accept(token)


class TestSlowConstraints:
    @pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}])
    def test_others_do_not_wait(self, model, warm_engine, options):
        """While a constraint takes a token in, its row rests and others go on; then it continues as if nothing had been."""
        sampling = Sampling(**options)
        fields = {"prompt": [1, 7], "max_new_tokens": 6, "sampling": sampling}
        engine, slow = Engine(*model, SMALL), Halting(512)
        bound = Client(engine, **fields, constraint=slow)
        for _ in range(2):
            assert engine.step()
        assert slow.asked.acquire(timeout=20)
        free = Client(engine, prompt=[1, 9], max_new_tokens=20, sampling=sampling)
        while free.finish is None:
            assert engine.step()
            assert len(bound.ids) == 1
        for _ in range(6):
            slow.told.release()
        exhaust(engine)
        again = run(engine, **fields, constraint=EveryOther(512))
        assert bound.ids == again.ids
        assert [token % 2 for token in bound.ids] == [0, 1] * 3
        assert free.ids == alone(model, free.request).tokens

    def test_a_row_that_rests_can_be_cancelled(self, model, warm_engine):
        engine, slow = Engine(*model, SMALL), Halting(512)
        bound = Client(engine, prompt=[1, 7], max_new_tokens=6, constraint=slow)
        for _ in range(2):
            assert engine.step()
        assert slow.asked.acquire(timeout=20)
        bound.ticket.cancel()
        exhaust(engine)
        assert bound.finish == "cancelled"
        slow.told.release()


class TestRowSettings:
    def test_no_stop_token_before_the_least(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        first = alone(model, GenerationRequest(prompt=[1, 7], max_new_tokens=3)).tokens
        kwargs = {"prompt": [1, 7], "max_new_tokens": 20, "stop_tokens": first}
        early, late = Client(engine, **kwargs), Client(engine, **kwargs, min_new_tokens=9)
        exhaust(engine)
        assert early.ids == []
        assert early.finish == "stop"
        assert len(late.ids) >= 9
        assert not set(late.ids[:9]) & set(first)

    @pytest.mark.parametrize("new", [0, 3])
    def test_a_scored_prompt(self, model, warm_engine, new):
        config, params = model
        prompt = [1, *range(50, 90)]
        engine = Engine(*model, SMALL)
        client = run(engine, prompt=prompt, max_new_tokens=new, score_prompt=True, alternatives=4)
        logprobs = np.asarray(jax.nn.log_softmax(jit_logits(config, params, np.array([prompt]))[0]))
        scores = client.updates[0].prompt
        assert [token.id for token in scores] == prompt
        assert scores[0].logprob is None
        np.testing.assert_allclose(
            [token.logprob for token in scores[1:]], logprobs[np.arange(40), prompt[1:]], atol=1e-5 * np.abs(logprobs).max()
        )
        for at, token in enumerate(scores[1:]):
            best = np.argsort(-logprobs[at], kind="stable")[:4]
            assert [id for id, _ in token.alternatives] == best.tolist()
        assert client.finish == "length"
        assert client.ids == (alone(model, client.request).tokens if new else [])


class TestRunning:
    def test_in_a_thread_and_drained(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        thread = threading.Thread(target=engine.run)
        thread.start()
        clients = [Client(engine, prompt=[1, 5 + i], max_new_tokens=20) for i in range(6)]
        engine.close(drain=True)
        with pytest.raises(ClosedError):
            Client(engine, prompt=[1], max_new_tokens=1)
        thread.join(60)
        assert not thread.is_alive()
        as_alone(model, clients)

    def test_an_exception_ends_all_requests_and_is_raised(self, model, warm_engine):
        engine = Engine(*model, SMALL)
        client = Client(engine, prompt=[1, 5], max_new_tokens=50)

        def broken(update):
            raise RuntimeError("the wire is cut")

        engine.submit(GenerationRequest(prompt=[1], max_new_tokens=3), broken)
        with pytest.raises(RuntimeError, match="the wire is cut"):
            engine.run()
        assert client.finish == "failed"
        assert client.updates[-1].error == engine.failure == "RuntimeError: the wire is cut"
        with pytest.raises(ClosedError, match="the wire is cut"):
            Client(engine, prompt=[1], max_new_tokens=1)

    def test_logits_that_are_nan_end_only_their_request(self, model, warm_engine):
        config, params = model
        embedding = params.embedding.at[99].set(np.nan)
        config = replace(config, tie_embeddings=False)
        engine = Engine(config, params.replace(embedding=embedding, lm_head=params.embedding), SMALL)
        broken = Client(engine, prompt=[1, 99], max_new_tokens=5)
        sound = run(engine, prompt=[1, 98], max_new_tokens=5)
        assert (broken.finish, sound.finish) == ("failed", "length")
        assert "NaN" in broken.updates[-1].error


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"prompt": []}, {}, "empty"),
        ({"prompt": "text"}, {}, "encode it"),
        ({"max_new_tokens": 0}, {}, "max_new_tokens=0 must be an integer from 1"),
        ({"max_new_tokens": 128}, {}, "exceed the context of 128.* at most 127"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, {}, "min_new_tokens=6 must be an integer from 0 to 5"),
        ({"alternatives": 21}, {}, "alternatives=21 must be an integer from 0 to 20"),
        ({"stop_tokens": range(17)}, {}, "17 stop tokens are too many"),
        ({"sampling": Sampling(top_p=-0.1)}, {}, "top_p"),
        ({}, {"rows": 0}, "rows=0 must be at least 1"),
        ({}, {"prefill_chunk": 24}, "prefill_chunk=24 must be a multiple of 16"),
        ({}, {"cache_tokens": 0}, "cache_tokens=0"),
        ({}, {"context": 1}, "context=1"),
        ({}, {"cache": CacheOptions(window=8)}, "window=8 is not supported by an engine"),
        ({}, {"context": 4096}, "context=4096 must be at most the model's context of 512"),
        ({}, {"context": 128, "cache_tokens": 100}, "cache_tokens=100 must be at least the context of 128"),
    ],
)
def test_what_is_refused(model, fields, options, said):
    with pytest.raises(GenerationError, match=said):
        Client(Engine(*model, replace(SMALL, **options)), **{"prompt": [1], "max_new_tokens": 1} | fields)


def test_a_mesh_that_divides_rows(model, tmp_path):
    llama_jax.save(tmp_path / "model", *model)
    laid_out = llama_jax.load(tmp_path / "model", mesh=parse_mesh("data=2"))[:2]
    with pytest.raises(MeshError, match="tensor parallelism only"):
        Engine(*laid_out, SMALL)
