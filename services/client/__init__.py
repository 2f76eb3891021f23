"""Clients of an orchestrator, without MLX.

with Client("127.0.0.1:50050") as client:
    print(client.generate("Why is the sky blue?", max_tokens=64).text)
"""

from services.client.blocking import Client, Stream
from services.client.client import AsyncClient, Generation, Item, ServiceInfo
from services.client.requests import Options
from services.runtime.security import ChannelSecurity, Key
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TokenLogProbs
from services.speculation.warpers import Sampler
from services.wire.orchestrator import ChunkMessage, DoneMessage, DrafterLine

__all__ = [
    "AerieError",
    "AsyncClient",
    "ChannelSecurity",
    "ChunkMessage",
    "Client",
    "DoneMessage",
    "DrafterLine",
    "Generation",
    "Item",
    "Key",
    "Options",
    "Reason",
    "Sampler",
    "ServiceInfo",
    "Stream",
    "TokenLogProbs",
]
