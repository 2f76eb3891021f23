"""Verifier, drafter and orchestrator as actors of one process."""

from services.embedded.engine import Engine, Result

__all__ = ["Engine", "Result"]
