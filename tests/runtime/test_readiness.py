"""Health as a client sees it: liveness, readiness, and a Watch that streams."""

import asyncio
import logging
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.device import DeviceThread, Priority
from services.runtime.grpc_server import start_server
from services.runtime.readiness import Readiness

NAME = "aerie.test.v1.TestService"
STATES = health_pb2.HealthCheckResponse


def play(scenario, checks, tmp_path):
    async def run():
        server, address, servicer = await start_server(f"unix:{tmp_path}/h", lambda server: None, [NAME])
        readiness = Readiness(servicer, [NAME], checks)
        readiness.start()
        async with grpc.aio.insecure_channel(address) as channel:
            await scenario(health_pb2_grpc.HealthStub(channel), readiness)
        await readiness.stop()
        await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), 20))


async def state(stub, name=NAME):
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


def test_liveness_is_not_readiness(tmp_path, caplog):
    why = ["the verifier is away"]

    async def scenario(stub, readiness):
        await readiness.refresh()
        assert (await state(stub), await state(stub, "")) == (STATES.NOT_SERVING, STATES.SERVING)
        assert readiness.reason == "verifier: the verifier is away"
        why.clear()
        await readiness.refresh()
        assert (await state(stub), readiness.reason) == (STATES.SERVING, None)
        why.append("away again")
        await asyncio.sleep(0.6)  # by itself
        assert await state(stub) == STATES.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await state(stub, "aerie.none.v1.NoService")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    with caplog.at_level(logging.INFO):
        play(scenario, {"verifier": lambda: why[0] if why else None, "fine": lambda: None}, tmp_path)
    said = [record.getMessage() for record in caplog.records if "ready" in record.getMessage()]
    assert said == ["not ready: verifier: the verifier is away", "ready again", "not ready: verifier: away again"]


def test_watch_streams_every_change(tmp_path):
    why = []

    async def scenario(stub, readiness):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        seen = [(await watch.read()).status]
        for change in (lambda: why.append("busy"), why.clear):
            change()
            await readiness.refresh()
            seen.append((await watch.read()).status)
        await readiness.withdraw()
        seen.append((await watch.read()).status)
        assert seen == [STATES.SERVING, STATES.NOT_SERVING, STATES.SERVING, STATES.NOT_SERVING]
        await readiness.refresh()
        assert await state(stub) == STATES.NOT_SERVING  # for good
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="aerie.none.v1.NoService"))
        assert (await unknown.read()).status == STATES.SERVICE_UNKNOWN
        for call in (watch, unknown):
            call.cancel()

    play(scenario, {"check": lambda: why[0] if why else None}, tmp_path)


def test_readiness_follows_the_device_thread_within_two_seconds(tmp_path):
    """Stuck, then free again, then dead."""
    device, gate = DeviceThread(), threading.Event()

    async def scenario(stub, readiness):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == STATES.SERVING
        start = time.monotonic()
        device.submit(lambda: gate.wait(10), Priority.VERIFY)
        assert (await watch.read()).status == STATES.NOT_SERVING
        assert time.monotonic() - start < 2.0
        assert "busy with one job" in readiness.reason
        gate.set()
        assert (await watch.read()).status == STATES.SERVING
        start = time.monotonic()
        with device._wake:
            device._queue.insert(0, (-1, -1, "no job"))
            device._wake.notify()
        assert (await watch.read()).status == STATES.NOT_SERVING
        assert time.monotonic() - start < 2.0
        assert "died" in readiness.reason
        watch.cancel()

    play(scenario, {"device": device.stalled}, tmp_path)
