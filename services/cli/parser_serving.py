"""Options of the commands that run services, and of those that look at them."""

import argparse
from pathlib import Path
from typing import Any

from services.cli.parser_shared import add_overrides, add_threads, at_least, seconds

PORTS = {"verifier": 50051, "drafter": 50052, "orchestrator": 50050, "all": 50050}
DEFAULT_HTTP = "127.0.0.1:8000"


def add_serving(commands: Any) -> None:
    """``serve``, ``health``, ``sessions`` and ``drafters``."""
    serve = commands.add_parser("serve", help="run the services: a verifier, a drafter, an orchestrator, or all in one")
    kinds = serve.add_subparsers(dest="kind", required=True, metavar="SERVICE")
    _add_verifier(kinds.add_parser("verifier", help="owns the target and its KV cache"))
    _add_drafter(kinds.add_parser("drafter", help="proposes tokens"))
    _add_orchestrator(kinds.add_parser("orchestrator", help="runs the rounds and serves clients"))
    _add_all(kinds.add_parser("all", help="the three in one process, behind one port"))

    health = commands.add_parser("health", help="how services are; exit code 0 when all of them serve")
    health.add_argument("addresses", nargs="+", metavar="ADDR", help="host:port or unix:PATH")
    health.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="for each answer (default: 3)")
    _add_dialling(health)
    health.set_defaults(run=_run_health)
    sessions = commands.add_parser("sessions", help="the sessions that a verifier holds")
    drafters = commands.add_parser("drafters", help="the drafters that an orchestrator knows")
    for command, run in ((sessions, _run_sessions), (drafters, _run_drafters)):
        command.add_argument("address", metavar="ADDR", help="host:port or unix:PATH")
        command.add_argument("--json", action="store_true", help="print JSON")
        _add_dialling(command)
        command.set_defaults(run=run)


def _add_verifier(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_service(parser, "verifier")
    parser.set_defaults(run=_run_verifier, drafter="off")


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    _add_drafter_choice(parser)
    parser.add_argument(
        "--verifier", metavar="ADDR", help="where it learns of the target (default: 127.0.0.1:50051, or as Redis says)"
    )
    add_threads(parser)
    add_overrides(parser)
    _add_service(parser, "drafter")
    _add_dialling(parser)
    parser.set_defaults(run=_run_drafter, target="-")


def _add_orchestrator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", metavar="ADDR", help="(default: 127.0.0.1:50051, or as Redis says)")
    parser.add_argument(
        "--drafter",
        nargs="+",
        action="extend",
        metavar="ADDR",
        help="one or more (default: 127.0.0.1:50052, or those that Redis knows)",
    )
    _add_clients(parser)
    _add_service(parser, "orchestrator")
    _add_dialling(parser)
    parser.set_defaults(run=_run_orchestrator)


def _add_all(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_drafter_choice(parser)
    add_overrides(parser)
    _add_clients(parser)
    _add_service(parser, "all")
    parser.set_defaults(run=_run_all)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        default="smollm2",
        metavar="TARGET",
        help="smollm2, a Hub id, a folder or a .gguf (default: smollm2)",
    )
    parser.add_argument(
        "--kv-bytes", type=at_least(1), metavar="N", help="budget of all sessions' caches (default: none)"
    )
    add_threads(parser)


def _add_drafter_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter",
        default="auto",
        metavar="DRAFTER",
        help="auto (a shipped one that fits), eagle3 or a checkpoint folder (default: auto)",
    )


def _add_clients(parser: argparse.ArgumentParser) -> None:
    clients = parser.add_argument_group("clients")
    clients.add_argument(
        "--http", nargs="?", const=DEFAULT_HTTP, metavar="ADDR", help=f"serve OpenAI's API, too (bare: {DEFAULT_HTTP})"
    )
    clients.add_argument(
        "--max-sessions", type=at_least(1), default=256, metavar="N", help="sessions that run at once (default: 256)"
    )
    clients.add_argument(
        "--max-queue",
        type=at_least(0),
        default=1024,
        metavar="N",
        help="sessions that wait; more are refused (default: 1024)",
    )
    clients.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys of clients, one a line (or AERIE_API_KEY)"
    )


def _add_service(parser: argparse.ArgumentParser, kind: str) -> None:
    service = parser.add_argument_group("service")
    default = f"127.0.0.1:{PORTS[kind]}"
    service.add_argument(
        "--listen", default=default, metavar="ADDR", help=f"host:port or unix:PATH (default: {default})"
    )
    service.add_argument("--redis", metavar="URL", help="find and be found through Redis: redis://HOST:PORT")
    service.add_argument(
        "--advertise", metavar="ADDR", help="what others dial (default: --listen, with this host's name for 0.0.0.0)"
    )
    service.add_argument(
        "--drain", type=seconds, default=30.0, metavar="SECONDS", help="for sessions that run at the end (default: 30)"
    )
    service.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics there")
    service.add_argument("--log-format", choices=("text", "json"), default="text")
    service.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    guards = parser.add_argument_group("access")
    guards.add_argument(
        "--worker-key-file", type=Path, metavar="FILE", help="keys among services, one a line (or AERIE_WORKER_KEY)"
    )
    guards.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    guards.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve TLS with this certificate (PEM)")
    guards.add_argument("--tls-key", type=Path, metavar="FILE", help="its key (PEM)")
    guards.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="demand clients' certificates from this CA")


def _add_dialling(parser: argparse.ArgumentParser) -> None:
    dialling = parser.add_argument_group("reaching services")
    dialling.add_argument("--ca", type=Path, metavar="FILE", help="they speak TLS; their certificates are of this CA")
    dialling.add_argument("--cert", type=Path, metavar="FILE", help="our certificate (PEM), where they demand one")
    dialling.add_argument("--cert-key", type=Path, metavar="FILE", help="its key (PEM)")
    dialling.add_argument("--key-file", type=Path, metavar="FILE", help="the key to show (or AERIE_KEY)")


def _run_verifier(options: argparse.Namespace) -> int:
    from services.cli.serving.verifier import serve_verifier

    return serve_verifier(options)


def _run_drafter(options: argparse.Namespace) -> int:
    from services.cli.serving.drafter import serve_drafter

    return serve_drafter(options)


def _run_orchestrator(options: argparse.Namespace) -> int:
    from services.cli.serving.orchestrator import serve_orchestrator

    return serve_orchestrator(options)


def _run_all(options: argparse.Namespace) -> int:
    from services.cli.serving.everything import serve_all

    return serve_all(options)


def _run_health(options: argparse.Namespace) -> int:
    from services.cli.health import health

    return health(options)


def _run_sessions(options: argparse.Namespace) -> int:
    from services.cli.lists import list_sessions

    return list_sessions(options)


def _run_drafters(options: argparse.Namespace) -> int:
    from services.cli.lists import list_drafters

    return list_drafters(options)
