import asyncio
import gc
import threading
import time
import weakref

import pytest

from services.runtime.device import DeviceThread, Priority, device_thread


@pytest.fixture(scope="module")
def device():
    return DeviceThread()


class Hold:
    """Keeps the thread busy until released, so that work queues up behind it."""

    def __init__(self, device):
        self._gate, entered = threading.Event(), threading.Event()

        def wait():
            entered.set()
            assert self._gate.wait(10)

        self.future = device.submit(wait, Priority.DRAFT)
        assert entered.wait(10)

    def release(self):
        self._gate.set()


def test_all_work_runs_on_one_thread(device):
    threads = {device.submit(threading.get_ident).result(10) for _ in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_work_runs_by_priority_then_in_order_of_arrival(device):
    hold, ran = Hold(device), []
    kinds = [Priority.SLICE, Priority.VERIFY, Priority.DRAFT, Priority.SLICE, Priority.VERIFY, Priority.DRAFT]
    futures = [device.submit(lambda work=(kind.name, i): ran.append(work), kind) for i, kind in enumerate(kinds)]
    hold.release()
    for future in futures:
        future.result(10)
    assert ran == [("DRAFT", 2), ("DRAFT", 5), ("VERIFY", 1), ("VERIFY", 4), ("SLICE", 0), ("SLICE", 3)]


def test_slices_are_what_is_not_said_otherwise(device):
    hold, ran = Hold(device), []
    last = device.submit(lambda: ran.append("unsaid"))
    device.submit(lambda: ran.append("verify"), Priority.VERIFY)
    hold.release()
    last.result(10)
    assert ran == ["verify", "unsaid"]


@pytest.mark.parametrize("error", [KeyError("gone"), SystemExit(3), KeyboardInterrupt()])
def test_exceptions_travel_to_the_caller_and_the_thread_goes_on(device, error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        device.submit(fail).result(10)
    assert caught.value is error
    assert device.submit(lambda: 7).result(10) == 7


def test_cancelled_work_is_skipped(device):
    hold, ran = Hold(device), []
    dropped, kept = device.submit(lambda: ran.append("dropped")), device.submit(lambda: ran.append("kept"))
    assert dropped.cancel()
    hold.release()
    kept.result(10)
    assert ran == ["kept"]


def test_coroutines_wait_without_blocking_their_loop(device):
    async def scenario():
        hold = Hold(device)
        waiting = asyncio.create_task(device.run(lambda: 42, Priority.VERIFY))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        hold.release()
        assert await asyncio.wait_for(waiting, 10) == 42
        with pytest.raises(ZeroDivisionError):
            await device.run(lambda: 1 // 0)

    asyncio.run(scenario())


def test_a_cancelled_coroutine_drops_work_that_has_not_started(device):
    async def scenario():
        hold, ran = Hold(device), []
        waiting = asyncio.create_task(device.run(lambda: ran.append("dropped")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        hold.release()
        await device.run(lambda: ran.append("kept"))
        assert ran == ["kept"]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["done", "failed", "cancelled"])
def test_an_idle_thread_holds_on_to_nothing(device, how):
    """A closure can hold a model: when its work is over, so is the thread's hold on it."""

    class Model:
        def work(self):
            if how == "failed":
                raise RuntimeError

    model = Model()
    alive = weakref.ref(model)
    hold = Hold(device)
    future = device.submit(model.work)
    if how == "cancelled":
        future.cancel()
    hold.release()
    if how != "cancelled":
        future.exception(10)
    del model, future
    for _ in range(100):
        gc.collect()
        if alive() is None:
            break
        threading.Event().wait(0.01)
    assert alive() is None


def test_a_process_has_one_device_thread():
    assert device_thread() is device_thread()


def test_a_job_that_takes_long_is_a_stall_until_it_ends(device):
    device.submit(lambda: None).result(10)
    assert device.stalled() is None
    hold = Hold(device)
    assert device.stalled() is None
    assert "busy" in device.stalled(limit=0.0)
    hold.release()
    hold.future.result(10)
    device.submit(lambda: None).result(10)
    until = time.monotonic() + 10
    while device.busy_since is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert device.stalled(limit=0.0) is None


def test_a_dead_thread_keeps_nobody_waiting():
    """No job can kill it: a queue that is damaged does."""
    device = DeviceThread()
    hold = Hold(device)
    waiting = [device.submit(lambda: None) for _ in range(3)]
    with device._wake:
        device._queue.insert(0, (-1, -1, "no job"))
    hold.release()
    for future in waiting:
        with pytest.raises(ConnectionError, match="died"):
            future.result(1)
    assert device.stalled() == "the device thread has died"
    with pytest.raises(ConnectionError, match="died"):
        device.submit(lambda: None).result(1)


def test_what_a_job_raises_is_its_own(device):
    def leave():
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(SystemExit):
            device.submit(leave).result(10)
    assert device.stalled() is None
