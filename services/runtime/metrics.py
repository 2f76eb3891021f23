"""Prometheus metrics of one process: a registry of its own, and the page that shows it."""

from collections.abc import Callable, Mapping
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.runtime.addresses import parse_address
from services.runtime.bus import Bus
from services.speculation.errors import AerieError, Reason


class Mailbox(Protocol):
    """An actor, or its supervisor."""

    @property
    def waiting(self) -> int: ...


class ProcessMetrics:
    """What every process counts.

    Attributes:
        registry: Where services add their own.
    """

    def __init__(self, bus: Bus) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        self.gauge("aerie_events_dropped", "Events that a full bus has dropped.", lambda: bus.dropped)
        self._depths = Gauge(
            "aerie_mailbox_depth", "Messages that wait in an actor.", ["actor"], registry=self.registry
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def watch(self, actors: Mapping[str, Mailbox]) -> None:
        """Show how many messages wait in actors, by name."""
        for name, actor in actors.items():
            self._depths.labels(name).set_function(lambda actor=actor: actor.waiting)  # type: ignore[misc]

    def route(self) -> Route:
        """``/metrics`` for an HTTP server that is there anyway."""

        def show(_: Request) -> Response:
            page = prometheus_client.generate_latest(self.registry)
            return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)

        return Route("/metrics", show)

    def serve(self, text: str) -> Callable[[], None]:
        """Serve the page at ``host:port``, in a thread of its own; calling what is returned ends that.

        Raises:
            AerieError: INVALID_ARGUMENT, it cannot listen there.
        """
        address = parse_address(text, "--metrics")
        if not address.host:
            raise AerieError(Reason.INVALID_ARGUMENT, "--metrics takes host:port")
        try:
            server, thread = prometheus_client.start_http_server(
                address.port, address.host.strip("[]"), registry=self.registry
            )
        except OSError as error:
            raise AerieError(Reason.INVALID_ARGUMENT, f"cannot listen at {text}: {error.strerror}") from None

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join(1.0)

        return end
