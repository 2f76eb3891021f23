"""A client of a running orchestrator: ``python docs/examples/client.py ADDR`` (``aerie serve all`` runs one)."""

import asyncio
import sys
from contextlib import aclosing

from services.client import AerieError, AsyncClient, ChunkMessage, Client


def ask(address: str) -> None:
    """Whole answers, and one as it comes."""
    with Client(address) as client:
        print(client.info().model)
        answer = client.generate("What is the capital of France?", max_tokens=16)
        print(answer.text, answer.usage, f"{answer.stats['acceptance_length']:.2f} tokens a round")

        again = client.generate("Name a colour.", temperature=0.9, seed=answer.seed, max_tokens=8)
        assert again.text == client.generate("Name a colour.", temperature=0.9, seed=answer.seed, max_tokens=8).text

        for item in client.stream([{"role": "user", "content": "Count to five."}], max_tokens=24):
            if isinstance(item, ChunkMessage):
                print(item.text, end="", flush=True)
        print()

        try:
            client.generate("Hi", drafter="no-such-drafter")
        except AerieError as error:
            print(error.reason)


async def ask_side_by_side(address: str) -> None:
    """Several at once; the last one is cancelled by leaving it."""
    async with AsyncClient(address) as client:
        prompts = ("Name a river.", "Name a mountain.")
        for answer in await asyncio.gather(*(client.generate(p, max_tokens=12, deadline=60.0) for p in prompts)):
            print(answer.text)
        async with aclosing(client.stream("Tell me a long story.", max_tokens=500)) as items:
            async for item in items:
                print(item)
                break


if __name__ == "__main__":
    ask(sys.argv[1])
    asyncio.run(ask_side_by_side(sys.argv[1]))
