"""The end of an engine: callers are told, models are freed where they live, nothing waits for ever."""

import os
import signal
import threading
import time
import weakref

import pytest

from services.embedded import AerieError, Reason
from services.embedded import engine as engine_module
from services.runtime.device import device_thread
from tests.embedded.test_faults import PROMPT, Faulty, both_sides, plain_tokens, wait_until

LONG = {"max_tokens": 1000, "ignore_eos": True}


@pytest.mark.parametrize("call", [lambda e: e.generate(PROMPT, **LONG), lambda e: list(e.stream(PROMPT, **LONG))])
def test_closing_tells_whoever_waits(load_tiny, call):
    engine, errors = load_tiny(), []

    def work():
        try:
            call(engine)
        except AerieError as error:
            errors.append(error.reason)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine.verifier.sessions) == 4)
    engine.close()
    for thread in threads:
        thread.join(10)
    assert errors == [Reason.ENGINE_CLOSED] * 4


def test_a_closed_engine_says_so(load_tiny):
    engine = load_tiny()
    request = engine.request(PROMPT)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.info,
        lambda: engine.chat_tokens("hello"),
        lambda: engine.generate("hello"),
        lambda: engine.generate(PROMPT),
        lambda: list(engine.stream(PROMPT)),
        lambda: engine.run_all([request]),
        lambda: engine.add_drafter(None),
    ):
        with pytest.raises(AerieError) as caught:
            use()
        assert caught.value.reason is Reason.ENGINE_CLOSED


def test_closing_frees_models_and_caches_on_the_device_thread(load_tiny):
    engine, freed = load_tiny(), {}
    engine.generate(PROMPT, max_tokens=4, drafter="random")
    stream = engine.stream(PROMPT, drafter="random", **LONG)
    next(stream)
    held = {
        "target": engine.target,
        "model": engine.target.model,
        "drafter": engine.drafters[0]._model,
        "kv": next(iter(engine.verifier.sessions.values())).kv,
    }
    for name, value in held.items():
        weakref.finalize(value, lambda name=name: freed.setdefault(name, threading.current_thread().name))
    del held, value
    engine.close()
    assert freed.keys() == {"target", "model", "drafter", "kv"}
    assert {freed[name] for name in ("target", "model", "drafter")} == {"aerie-device"}


@pytest.fixture
def interruptible():
    """A runner in the background ignores SIGINT, and Python then raises nothing."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_generation(tiny_engine):
    # Slow enough that it could not end by itself in time.
    tiny_engine.add_drafter(Faulty(tiny_engine.info.vocab_size, "observe", lambda: time.sleep(0.02)))

    def interrupt():
        wait_until(lambda: both_sides(tiny_engine) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tiny_engine.generate(PROMPT, drafter="faulty", **LONG)
    thread.join()
    wait_until(lambda: both_sides(tiny_engine) == 0, seconds=2)
    assert len(plain_tokens(tiny_engine)) == 12


def test_closing_does_not_wait_for_a_device_that_hangs(load_tiny, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "CLOSE_SECONDS", 0.2)
    engine, entered, release = load_tiny(), threading.Event(), threading.Event()

    def hang():
        entered.set()
        release.wait(20)

    engine.add_drafter(Faulty(engine.info.vocab_size, "top_children", hang))
    stream = engine.stream(PROMPT, drafter="faulty")
    try:
        next(stream)
        assert entered.wait(10)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
        assert "the device did not end" in caplog.text
        with pytest.raises(AerieError, match="closed"):
            list(stream)
    finally:
        release.set()
        device_thread().submit(lambda: None).result(10)  # an exit while MLX runs aborts the process
