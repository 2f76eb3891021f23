"""The actors of one process and what connects them: local ports, an in-memory registry and bus."""

import asyncio
import contextlib

from tokenizers import Tokenizer

from services.drafter.compiled import CompiledDrafting
from services.drafter.family import DraftModel, TraceableDraftModel
from services.drafter.host import DrafterHost
from services.embedded.ports import LocalDrafterPort, LocalVerifierPort
from services.orchestrator.directory import Directory
from services.orchestrator.service import DEFAULT_LIMITS, Limits, Orchestrator
from services.orchestrator.text import ChatTemplate
from services.runtime.bus import MemoryBus
from services.runtime.device import DeviceThread, Priority
from services.runtime.registry import Entry, MemoryRegistry
from services.speculation.errors import AerieError, Reason, is_integer
from services.speculation.messages import DrafterInfo
from services.targets.target import Target
from services.verifier.host import VerifierHost


class Parts:
    """Verifier, drafters and orchestrator on one event loop. Use ``start``.

    Attributes:
        registry, bus: Of this process.
        verifier: Owns the target.
        drafters: Those that run.
        directory: Offers them to sessions.
        orchestrator: Serves requests.
    """

    def __init__(self, target: Target, device: DeviceThread, verifier: VerifierHost, limits: Limits) -> None:
        self.registry = MemoryRegistry()
        self.bus = verifier.bus
        self.verifier = verifier
        self.drafters: list[DrafterHost] = []
        self.directory = Directory(self.registry, self._dial, target.info, self.bus, local=True)
        files = target.tokenizer
        template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self.orchestrator = Orchestrator(
            LocalVerifierPort(verifier),
            target.info,
            Tokenizer.from_str(files.tokenizer_json),
            template,
            self.directory,
            self.bus,
            limits,
        )
        self._target = target.info
        self._device = device
        self._ports: dict[str, LocalDrafterPort] = {}  # by address, which is the drafter's name here
        self._leaving: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        target: Target,
        model: TraceableDraftModel | None,
        device: DeviceThread,
        kv_bytes: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        bus: MemoryBus | None = None,
    ) -> "Parts":
        """Start every actor; ``model`` is the drafter, None decodes plainly.

        Raises:
            AerieError: The drafter does not fit.
        """
        verifier = await device.run(lambda: VerifierHost(target, device, kv_bytes, bus))
        parts = cls(target, device, verifier, limits)
        verifier.start()
        parts.directory.start()
        try:
            if model:
                await parts.add_drafter(model, CompiledDrafting(model) if target.info.device == "gpu" else None)
        except BaseException:
            await parts.stop()
            raise
        return parts

    async def add_drafter(self, model: DraftModel, compiled: CompiledDrafting | None = None) -> None:
        """Host one more drafter.

        Raises:
            AerieError: CHECKPOINT_INCOMPATIBLE, its taps are not the target's; INVALID_ARGUMENT, its name is taken.
        """
        info: DrafterInfo = model.info
        self._check_drafter(info)
        host = DrafterHost(model, self._device, compiled)
        host.start()
        host.on_stop(lambda: self._drafter_stopped(host))
        self.drafters.append(host)
        self._ports[info.name] = LocalDrafterPort(host)
        await self.registry.join(Entry(info.name, "drafter", info.name))
        await self.directory.refresh()

    async def stop(self) -> None:
        """Stop every actor. Sessions that run lose their services."""
        for drafter in tuple(self.drafters):
            await drafter.stop()
        await self.verifier.stop()
        await asyncio.sleep(0)  # for what is called when they have stopped
        if self._leaving:
            await asyncio.wait(self._leaving)
        await self.directory.stop()

    def _check_drafter(self, info: DrafterInfo) -> None:
        texts = (info.name, info.family, "" if info.target_fingerprint is None else info.target_fingerprint)
        if not all(isinstance(text, str) for text in texts) or not isinstance(info.taps, tuple):
            raise AerieError(Reason.INVALID_ARGUMENT, f"a drafter's name, family, taps or fingerprint: {info!r}")
        if info.name in ("", "auto", "off"):
            raise AerieError(Reason.INVALID_ARGUMENT, f"no drafter can be named {info.name!r}")
        layers = self._target.layers
        if wrong := [tap for tap in info.taps if tap != "final" and not (is_integer(tap) and 0 <= int(tap) <= layers)]:
            raise AerieError(
                Reason.CHECKPOINT_INCOMPATIBLE,
                f"drafter {info.name!r} reads tap {wrong[0]}; the target has 0..{layers}",
            )
        if info.name in self._ports:
            raise AerieError(Reason.INVALID_ARGUMENT, f"there is a drafter {info.name!r} already")

    def _dial(self, address: str) -> LocalDrafterPort:
        if address not in self._ports:
            raise ConnectionError(f"the drafter {address} has stopped")
        return self._ports[address]

    def _drafter_stopped(self, host: DrafterHost) -> None:
        """A drafter that is gone is not offered; one that holds the device lets no session run."""
        self.drafters.remove(host)
        del self._ports[host.info.name]
        leaving = asyncio.create_task(self._leave(host.info.name))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        if host.hung:
            self._block(f"{host.name} does not answer, and holds the device")

    async def _leave(self, name: str) -> None:
        await self.registry.leave(name)
        with contextlib.suppress(ConnectionError):  # the directory stops, too
            await self.directory.refresh()

    def _block(self, why: str) -> None:
        """Take no session until the device is free again."""
        verifier, loop = self.verifier, asyncio.get_running_loop()
        verifier.blocked = why
        verifier.fail_sessions(why)

        def unblock() -> None:
            verifier.blocked = None

        self._device.submit(lambda: loop.call_soon_threadsafe(unblock), Priority.DRAFT)
