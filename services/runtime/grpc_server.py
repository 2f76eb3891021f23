"""What every gRPC service stands on: options, keys and TLS, health, reflection."""

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.runtime.addresses import check_free, parse_address
from services.runtime.bridge import FILE_BYTES, MESSAGE_BYTES
from services.runtime.rich_status import GuardInterceptor
from services.runtime.security import KeyInterceptor, ServerSecurity
from services.speculation.errors import AerieError, Reason

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", FILE_BYTES),  # streams of messages keep to MESSAGE_BYTES themselves
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Clients ping idle streams during long generations: never an offence.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # two servers must not share a port silently
)
NO_SECURITY = ServerSecurity()


async def start_server(
    address: str,
    add: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    security: ServerSecurity = NO_SECURITY,
) -> tuple[grpc.aio.Server, str, health.aio.HealthServicer]:
    """Start a server with health and reflection; its services are ready, and so is the process ("").

    Args:
        address: ``host:port`` (port 0 picks one) or ``unix:PATH``.
        add: Registers the servicers.
        services: Their full names.
        security: What it demands of callers.

    Returns:
        The server, the address that it listens on, and its health.

    Raises:
        AerieError: INVALID_ARGUMENT, it cannot listen there, or what TLS needs cannot be read.
    """
    wanted, credentials = parse_address(address, "the address to listen at"), security.credentials()
    check_free(wanted)  # gRPC would take a unix socket from whoever serves there
    interceptors: list[grpc.aio.ServerInterceptor] = [GuardInterceptor()]
    if security.keys:
        interceptors.insert(0, KeyInterceptor(security.keys))
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    add(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot listen at {address}: {error}") from None
    await server.start()
    for name in ("", *services):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, f"{wanted.host}:{port}" if wanted.host else address, checks
