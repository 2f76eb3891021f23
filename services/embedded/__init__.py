"""Verifier, drafter and orchestrator as actors of one process."""

from services.embedded.engine import Engine, Result
from services.orchestrator.generation import Chunk, Done
from services.orchestrator.routing import TreeOptions
from services.speculation.errors import AerieError, Reason
from services.speculation.warpers import Sampler

__all__ = ["AerieError", "Chunk", "Done", "Engine", "Reason", "Result", "Sampler", "TreeOptions"]
