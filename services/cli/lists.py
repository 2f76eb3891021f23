"""``aerie sessions`` and ``aerie drafters``: what services hold and know, as a table or as JSON."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from services.cli.dialling import security_of
from services.cli.report import printable
from services.client import AsyncClient
from services.orchestrator.grpc_ports import GrpcVerifierPort
from services.runtime.addresses import parse_address
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import SessionSummary
from services.wire.orchestrator import DrafterLine


def list_sessions(options: argparse.Namespace) -> int:
    """Print the sessions that a verifier holds, the oldest first."""
    parse_address(options.address)
    sessions = sorted(asyncio.run(_sessions(options)), key=lambda session: -session.age_seconds)
    if options.json:
        print(json.dumps([vars(session) for session in sessions]))
        return 0
    rows = [
        (
            s.session,
            s.state,
            s.committed,
            s.round,
            _bytes(s.kv_bytes),
            _bytes(s.feature_bytes),
            f"{s.age_seconds:.1f} s",
        )
        for s in sessions
    ]
    _print_table(("session", "state", "committed", "round", "KV", "features", "age"), rows)
    return 0


def list_drafters(options: argparse.Namespace) -> int:
    """Print the drafters that an orchestrator offers, then the others and why it does not."""
    parse_address(options.address)
    lines = asyncio.run(_drafters(options))
    if options.json:
        print(json.dumps([_drafter_json(line) for line in lines]))
        return 0
    offered = [
        (
            line.name,
            line.status.info.name,
            line.status.info.family,
            (line.status.info.target_fingerprint or "any")[:12],
            line.sessions,
            f"{1000 * line.status.draft_seconds:.1f} ms" if line.status.draft_seconds else "-",
            line.address,
        )
        for line in lines
        if line.status
    ]
    _print_table(("instance", "drafter", "family", "target", "sessions", "T_draft", "address"), offered)
    for line in lines:
        if line.status is None:
            print(printable(f"{line.name} is not offered: {line.detail}"))
    return 0


async def _sessions(options: argparse.Namespace) -> list[SessionSummary]:
    async with security_of(options).open(options.address) as channel:
        try:
            return await GrpcVerifierPort(channel, channel).sessions()
        except ConnectionError as error:
            message = f"no verifier answers at {options.address}: {error}"
            raise AerieError(Reason.SERVICE_UNAVAILABLE, message) from None


async def _drafters(options: argparse.Namespace) -> list[DrafterLine]:
    async with AsyncClient(options.address, security=security_of(options), retries=0) as client:
        return await client.drafters()


def _drafter_json(line: DrafterLine) -> dict[str, Any]:
    if line.status is None:
        return {"instance": line.name, "ready": False, "detail": line.detail}
    info = line.status.info
    return {
        "instance": line.name,
        "ready": True,
        "drafter": info.name,
        "family": info.family,
        "target_fingerprint": info.target_fingerprint,
        "taps": list(info.taps),
        "parameters": info.parameters,
        "sessions": line.sessions,
        "draft_seconds": line.status.draft_seconds,
        "address": line.address,
    }


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need; numbers and their units to the right."""
    cells = [heads, *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
