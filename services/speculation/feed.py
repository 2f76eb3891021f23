"""What a session's drafter has been sent, and when it may be asked: part of the session's state, pure.

A drafter's rows come in order: the history first, in slices, then those of each verdict. While the history is not
complete, or a draft has not been answered, later rows are held back.
"""

from dataclasses import dataclass, replace

from services.speculation.messages import Features, History, Observe, Open, OpenDraft, Tap

SOON_ROWS = 512
"""A prompt of no more rows is read about as soon as a tree is grown."""
HELD_ROWS = 256
"""A drafter for which more rows wait does not keep up: it is given up."""


@dataclass(frozen=True)
class Feed:
    """The drafter's side of one session.

    Attributes:
        session: The session's name at the drafter: another one for each attachment, so that the end of an old
            stream is never taken for that of a new one.
        epoch: Of the session.
        taps: What the drafter reads.
        number: Which attachment this is; slices of other ones are not for this drafter.
        history_end: Position of the first row that comes with a verdict.
        primed: The history is complete.
        held: Rows of verdicts that wait.
        asked: Round of the draft that has not been answered.
    """

    session: str
    epoch: int
    taps: tuple[Tap, ...]
    number: int
    history_end: int
    primed: bool = False
    held: tuple[Observe, ...] = ()
    asked: int | None = None

    @staticmethod
    def from_start(opened: Open) -> "Feed":
        """Of a drafter that is there when the session opens: ``opened`` asks for its taps."""
        return Feed(opened.session, opened.epoch, opened.taps, 0, len(opened.tokens))

    @staticmethod
    def attached(opened: Open, number: int, taps: tuple[Tap, ...], rows: int) -> "Feed":
        """Of a drafter that joins when the target's cache holds ``rows`` rows."""
        return Feed(f"{opened.session}#{number}", opened.epoch, taps, number, rows)

    @property
    def ready(self) -> bool:
        """It has been sent all there is, and nothing is asked of it.

        The history of a short prompt is on its way when its first draft is asked for: the drafter waits for it.
        """
        comes_soon = self.number == 0 and not self.held and self.history_end <= SOON_ROWS
        return self.asked is None and (self.primed or comes_soon)

    @property
    def overrun(self) -> bool:
        return sum(len(observe.tokens) for observe in self.held) > HELD_ROWS

    def open(self, opened: Open) -> OpenDraft:
        return OpenDraft(self.session, self.epoch, opened.sampler, opened.seed)

    def take_history(self, history: History) -> tuple["Feed", tuple[Observe, ...]]:
        """Pass a slice on; the last one lets go of what was held."""
        observe = self._observe(history.features, history.tokens)
        end = history.features.base + len(history.tokens)
        if end < self.history_end:
            return self, (observe,)
        return replace(self, primed=True)._let_go(observe)

    def take_rows(self, features: Features, tokens: tuple[int, ...]) -> tuple["Feed", tuple[Observe, ...]]:
        """Pass a verdict's rows on, or hold them.

        Raises:
            KeyError: They lack a tap.
        """
        feed = replace(self, held=(*self.held, self._observe(features, tokens)))
        return feed._let_go() if feed.primed and feed.asked is None else (feed, ())

    def answered(self) -> tuple["Feed", tuple[Observe, ...]]:
        """The draft that was asked for is answered, in time or late."""
        feed = replace(self, asked=None)
        return feed._let_go() if feed.primed else (feed, ())

    def _let_go(self, *first: Observe) -> tuple["Feed", tuple[Observe, ...]]:
        return replace(self, held=()), (*first, *self.held)

    def _observe(self, features: Features, tokens: tuple[int, ...]) -> Observe:
        return Observe(self.session, self.epoch, features.at(self.taps), tokens)
