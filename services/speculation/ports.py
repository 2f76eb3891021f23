"""Ports: how the orchestrator reaches a verifier and a drafter, in this process or another."""

from typing import Generic, Protocol, TypeVar

from services.speculation.messages import DrafterStatus, FromDrafter, FromVerifier, TargetInfo, ToDrafter, ToVerifier

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class Stream(Protocol, Generic[Out, In]):
    """One session's life on one service. Its end, however it comes, releases the lease."""

    async def send(self, message: Out) -> None:
        """Queue a message.

        Raises:
            ConnectionError: The service is gone, or the stream is closed.
            AerieError: RESOURCE_EXHAUSTED, the service does not keep up.
        """
        ...

    async def receive(self) -> In:
        """The next message.

        Raises:
            ConnectionError: The service is gone, or the stream is closed.
        """
        ...

    async def close(self) -> None:
        """End the stream, also that of a dead service; a second time changes nothing."""
        ...


class VerifierStream(Stream[ToVerifier, FromVerifier], Protocol):
    """A session's stream to a verifier, whose ``History`` is sent by credit."""

    def acknowledge(self, size: int) -> None:
        """``size`` bytes of history have gone on to a drafter: as much more may come."""
        ...


class VerifierPort(Protocol):
    """A verifier service."""

    async def info(self) -> TargetInfo:
        """Raises ConnectionError: It is not there."""
        ...

    def connect(self, seconds: float | None = None) -> VerifierStream:
        """A stream of one session, which the service ends after ``seconds`` if it still lives."""
        ...


class DrafterPort(Protocol):
    """A drafter service."""

    async def status(self) -> DrafterStatus:
        """Raises ConnectionError: It is not there, or takes no sessions."""
        ...

    def connect(self, seconds: float | None = None) -> Stream[ToDrafter, FromDrafter]:
        """A stream of one session, which the service ends after ``seconds`` if it still lives."""
        ...
