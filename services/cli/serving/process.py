"""What a serving process has: its services, its ways to others, and what must end with it."""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from redis.asyncio import Redis

from services.orchestrator.grpc_ports import GrpcDrafterPort, GrpcVerifierPort
from services.orchestrator.openai.server import HttpServer
from services.runtime.bus import MemoryBus
from services.runtime.gate import Gate
from services.runtime.metrics import ProcessMetrics
from services.runtime.readiness import Check, Readiness
from services.runtime.redis_bus import RedisBus
from services.runtime.redis_client import connect_redis
from services.runtime.redis_registry import RedisRegistry
from services.runtime.security import BULK_OPTIONS, ChannelSecurity, Keys, ServerSecurity, read_keys
from services.runtime.supervisor import Supervisor
from services.speculation.errors import AerieError, Reason

log = logging.getLogger(__name__)

DEFAULT_VERIFIER, DEFAULT_DRAFTER = "127.0.0.1:50051", "127.0.0.1:50052"


@dataclass(frozen=True)
class Hosted:
    """One gRPC service: its full name, by which its health is asked for, and what registers its servicer."""

    name: str
    add: Callable[[Any], None]

    @property
    def kind(self) -> str:
        """What the registry calls such a service: "verifier" of aerie.verifier.v1.VerifierService."""
        return self.name.split(".")[1]


class Process:
    """Use as an async context manager: everything that it opened ends with it.

    Attributes:
        kind: "verifier", "drafter", "orchestrator" or "all".
        gate: Closed when the process drains.
        bus: Events of this process; with Redis they go there, too.
        registry: With Redis, where services find each other.
        hosted: Its gRPC services.
        http: Its HTTP server, if it has one.
        entry_data: What the registry says of it.
        metrics: Of this process.
        checks: Why it is not ready, by what is looked at; ``readiness`` asks them once it serves.
        fatal: Why it can serve no longer: a supervisor must start it again.
        cut_off: Told why, these end what still runs after the drain, so that clients hear of it.
        api_keys: Of clients.
        security: What its gRPC port demands.
    """

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self.kind = kind
        self.gate = Gate()
        self.bus = MemoryBus()
        self.registry: RedisRegistry | None = None
        self.hosted: list[Hosted] = []
        self.http: HttpServer | None = None
        self.entry_data: dict[str, Any] = {}
        self.metrics = ProcessMetrics(self.bus)
        self.checks: dict[str, Check] = {}
        self.readiness: Supervisor[Readiness] | None = None
        self.fatal: list[Check] = []
        self.cut_off: list[Callable[[str], None]] = []
        self.api_keys = read_keys("AERIE_API_KEY", getattr(options, "api_key_file", None))
        worker_keys = read_keys("AERIE_WORKER_KEY", options.worker_key_file)
        # Whoever serves clients takes their keys; workers among themselves have their own.
        faces_clients = kind in ("orchestrator", "all")
        all_keys: Keys = (*self.api_keys, *worker_keys)
        keys = all_keys if faces_clients and self.api_keys else () if faces_clients else worker_keys
        self.security = ServerSecurity(keys, options.tls_cert, options.tls_key, options.tls_client_ca)
        shown = read_keys("AERIE_KEY", getattr(options, "key_file", None)) or worker_keys
        self._dialling = ChannelSecurity(
            shown[0] if shown else None,
            getattr(options, "ca", None),
            getattr(options, "cert", None),
            getattr(options, "cert_key", None),
        )
        self._redis_url: str | None = options.redis
        self._channels: dict[tuple[str, tuple[tuple[str, int], ...]], grpc.aio.Channel] = {}
        self._ends = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Process":
        if self._redis_url:
            try:
                client = connect_redis(self._redis_url)
            except ValueError as error:
                raise AerieError(Reason.INVALID_ARGUMENT, f"--redis: {error}") from None
            self._ends.push_async_callback(client.aclose)
            self.registry = RedisRegistry(client)
            self._forward_events(client)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._ends.aclose()

    def on_end(self, end: Callable[[], Awaitable[None]]) -> None:
        """Await ``end`` when the process ends; what was registered last ends first."""
        self._ends.push_async_callback(end)

    def supervise(self, name: str, supervisor: Supervisor[Any]) -> None:
        """Start an actor that is made anew when it fails; should that not help, this process can serve no longer."""
        supervisor.start()
        self.fatal.append(lambda: supervisor.failure)
        self.metrics.watch({name: supervisor})

    def dial(self, address: str, options: tuple[tuple[str, int], ...] = ()) -> grpc.aio.Channel:
        """A channel to another service, one for each set of options."""
        if (address, options) not in self._channels:
            channel = self._dialling.open(address, options)
            self._channels[address, options] = channel
            self._ends.push_async_callback(channel.close)
        return self._channels[address, options]

    def verifier_port(self, address: str) -> GrpcVerifierPort:
        return GrpcVerifierPort(self.dial(address), self.dial(address, BULK_OPTIONS))

    def drafter_port(self, address: str) -> GrpcDrafterPort:
        return GrpcDrafterPort(self.dial(address))

    async def find_verifier(self, address: str | None) -> str:
        """The verifier's address: the one that is given, else the first in the registry.

        Raises:
            ConnectionError: There is none yet, or Redis is away.
        """
        if address or self.registry is None:
            return address or DEFAULT_VERIFIER
        if entries := await self.registry.list("verifier"):
            return entries[0].address
        raise ConnectionError("no verifier has registered")

    def _forward_events(self, client: Redis) -> None:
        remote = RedisBus(client)
        remote.start()
        waiting = self.bus.subscribe(capacity=1024)

        async def forward() -> None:
            async for event in waiting:
                remote.publish(event.topic, **event.data)

        self.metrics.gauge(
            "aerie_redis_events_dropped", "Events that did not reach Redis.", lambda: remote.dropped + waiting.dropped
        )

        forwarding = asyncio.create_task(forward(), name="events to Redis")

        async def end() -> None:
            forwarding.cancel()
            await remote.drain(1.0)

        self._ends.push_async_callback(end)
