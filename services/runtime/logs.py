"""Structured logs of services: one line a record, with the session that it is about."""

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.types import EventDict, Processor

Form = Literal["text", "json"]


def configure_logging(service: str, form: Form = "text", level: str = "info", out: TextIO | None = None) -> None:
    """Send every record of this process to ``out`` in one form; loggers stay those of ``logging``.

    Fields: ``timestamp`` (UTC), ``level``, ``logger``, ``service``, ``event``, ``session`` where one is bound, and
    ``exception`` with its traceback.

    Args:
        service: What this process is.
        form: "text" for people, "json" for collectors.
        level: Least level of our own records; other libraries' begin at warnings.
        out: Standard error when None.
    """

    def add_service(_: object, __: str, event: EventDict) -> EventDict:
        return {"service": service, **event}

    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        structlog.processors.format_exc_info,
    ]
    render: Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, sort_keys=False)
    )
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root, ours = logging.getLogger(), logging.getLogger("services")
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.handlers.clear()  # what a command shows in one line is in these lines
    ours.setLevel(level.upper())
