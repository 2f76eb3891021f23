"""Services that find each other through Redis, which may be slow, away or empty: rounds never wait for it."""

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from services.embedded import Engine
from services.runtime.redis_client import connect_redis
from services.runtime.redis_registry import RedisRegistry
from tests.e2e.test_services import LONG, PROMPT, drafters, stream, until, wait_for_drafters
from tests.processes import Services
from tests.proxy import Proxy
from tests.redis_server import own_redis


@pytest.fixture(scope="module")
def plain(tiny: str) -> Iterator[tuple[int, ...]]:
    with Engine.load(tiny, "off") as engine:
        yield engine.generate(PROMPT, max_tokens=LONG, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def redis():
    with own_redis() as server:
        yield server


class SlowRedis:
    """A proxy before Redis in a thread of its own; ``delay`` is the round trip in seconds."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxy = Proxy(address)
        self._run(self._proxy.__aenter__())
        self.url = f"redis://127.0.0.1:{self._proxy.port}"

    def delay(self, seconds: float) -> None:
        self._loop.call_soon_threadsafe(setattr, self._proxy, "delay", seconds)

    def close(self) -> None:
        self._run(self._proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self, coroutine) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)


@pytest.fixture(scope="module")
def slow(redis) -> Iterator[SlowRedis]:
    proxy = SlowRedis(redis.address)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def services(tiny: str, drafter: str, slow: SlowRedis) -> Iterator[Services]:
    """Everyone is told of Redis alone."""
    with Services(tiny, drafter) as made:
        url = ("--redis", slow.url)
        started = [
            made.verifier(*url),
            made.drafter(*url, name="d0", verifier=""),
            made.orchestrator(*url, verifier="", drafters=()),
        ]
        for service in started:
            service.wait_ready()
        wait_for_drafters(made.socket("o"), 1)
        yield made


def registered(url: str) -> set[tuple[str, str]]:
    async def ask():
        client = connect_redis(url)
        try:
            return {(entry.kind, entry.address) for entry in await RedisRegistry(client).list()}
        finally:
            await client.aclose()

    return asyncio.run(ask())


def test_services_find_each_other(services, redis, plain):
    found = {("verifier", "v"), ("drafter", "d0"), ("orchestrator", "o")}
    assert registered(redis.url) == {(kind, services.socket(name)) for kind, name in found}
    tokens, done = stream(services.socket("o"), 120)
    assert tokens == plain[:120]
    assert done.drafter_lost is None


def test_all_in_one_process_lists_its_services(tiny, drafter, redis):
    with Services(tiny, drafter) as made:
        everything = made.start("all", "all", "--target", tiny, "--drafter", drafter, "--redis", redis.url).wait_ready()
        mine = {(kind, everything.address) for kind in ("verifier", "drafter", "orchestrator")}
        until(lambda: mine <= registered(redis.url))
        assert len(stream(everything.address, 20)[0]) == 20
        assert everything.end() == 0
        assert not mine & registered(redis.url)


def test_a_killed_drafter_is_gone_after_three_beats_and_one_that_ends_leaves_at_once(services, redis):
    killed, ended = (
        services.drafter("--redis", redis.url, name=name, verifier="").wait_ready() for name in ("d1", "d2")
    )
    wait_for_drafters(services.socket("o"), 3)
    assert ended.end() == 0
    assert ("drafter", ended.address) not in registered(redis.url)
    killed.close()
    start = time.monotonic()
    until(lambda: ("drafter", killed.address) not in registered(redis.url), 6)
    assert time.monotonic() - start < 5
    wait_for_drafters(services.socket("o"), 1)


def test_a_slow_redis_slows_nothing(services, slow):
    """500 ms an answer, which is many rounds: the paces of both settings, in turn, are the same but for noise."""
    paces: dict[float, list[float]] = {0.0: [], 0.5: []}
    stream(services.socket("o"), 100)
    for _ in range(3):
        for delay, seen in paces.items():
            slow.delay(delay)
            _, done = stream(services.socket("o"), 100)
            seen.append(done.stats["tokens_per_second"])
            assert done.drafter_lost is None
    slow.delay(0.0)
    # One answer of Redis in a round's path would cost a round 500 ms, where it takes some 5: a hundredth of the pace.
    assert statistics.median(paces[0.5]) > 0.6 * statistics.median(paces[0.0]), paces


def test_redis_that_goes_and_comes_back_empty_costs_no_token(services, redis, plain):
    def keys(*command: str) -> object:
        async def ask():
            client = connect_redis(redis.url)
            try:
                return await client.execute_command(*command)
            finally:
                await client.aclose()

        return asyncio.run(ask())

    def restart() -> None:
        keys("SET", "before", "1")
        redis.restart()
        assert keys("GET", "before") is None

    tokens, done = stream(services.socket("o"), at=100, act=restart)
    assert tokens == plain
    assert done.drafter_lost is None
    until(lambda: len(registered(redis.url)) == 3, 5)
    assert [line.status is not None for line in drafters(services.socket("o"))] == [True]
    assert stream(services.socket("o"), 60)[0] == plain[:60]
    for service in services.started:
        lines = [line for line in service.log.read_text().splitlines() if "WARN" in line or "ERROR" in line]
        assert len(lines) < 10, lines


def test_sessions_begin_while_redis_is_away(services, redis, plain):
    redis.stop()
    try:
        tokens, done = stream(services.socket("o"), 120)
        assert tokens == plain[:120]
        assert done.drafter_lost is None
        assert done.stats["rounds"] > done.stats["fallback_rounds"]
    finally:
        redis.start()
    until(lambda: len(registered(redis.url)) == 3, 10)
