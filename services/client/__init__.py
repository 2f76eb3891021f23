"""Clients of an orchestrator, without MLX.

with Client("127.0.0.1:50050") as client:
    print(client.generate("Why is the sky blue?").text)
"""

from services.client.client import AsyncClient, Client, Generation

__all__ = ["AsyncClient", "Client", "Generation"]
