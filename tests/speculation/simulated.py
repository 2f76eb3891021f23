"""A verifier and a drafter without models: they read their stream of messages strictly and answer from a table."""

from functools import cache

import numpy as np

from services.speculation.errors import Reason
from services.speculation.messages import (
    Attach,
    Draft,
    Drafted,
    Features,
    History,
    NeedFeatures,
    Observe,
    Open,
    OpenDraft,
    PortError,
    Prefilled,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.trees import DraftTree
from tests.speculation.random_trees import ancestry

VOCAB, EOS = 30, 29


class SimulatedTarget:
    """The next token is a function of every token before it."""

    def __init__(self, seed: int, eos: bool) -> None:
        @cache
        def after(tokens: tuple[int, ...]) -> int:
            return int(np.random.default_rng([seed, *tokens]).integers(VOCAB if eos else VOCAB - 1))

        self.after = after

    def plain(self, request: Open, context_length: int) -> tuple[list[int], str]:
        """What plain decoding emits, and how it ends."""
        tokens = list(request.tokens)
        while len(tokens) < min(request.prompt_len + request.max_tokens, context_length):
            tokens.append(self.after(tuple(tokens)))
            if tokens[-1] in request.eos_ids:
                return tokens[len(request.tokens) :], "stop"
        return tokens[len(request.tokens) :], "length"


def true_rows(tokens: list[int], start: int, stop: int) -> Features:
    """Features that say which position and which prefix they belong to."""
    rows = [[position, hash(tuple(tokens[: position + 1])) % 2**31] for position in range(start, stop)]
    return Features(start, {0: np.array(rows, np.int64).reshape(-1, 2)})


class SimulatedVerifier:
    """Accepts by trying every path of a tree against the target; refuses what the real one refuses."""

    def __init__(self, target: SimulatedTarget, context_length: int, max_nodes: int) -> None:
        self._target, self._context_length, self._max_nodes = target, context_length, max_nodes
        self.tokens: list[int] = []
        self.round = self.attachment = 0

    def receive(self, message: Open | Verify | Truncate | Attach) -> list[History | Prefilled | Verdict | PortError]:
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Attach):
            assert message.number > self.attachment
            self.taps, self.attachment = message.taps, message.number
            return self._history(0, len(self.tokens) - 1) if message.taps else []
        if isinstance(message, Truncate):
            assert self.request.prompt_len < message.length <= len(self.tokens)
            del self.tokens[message.length :]
            return []
        # A round that is not the next one is the orchestrator's mistake, never a drafter's.
        assert (message.epoch, message.round, message.base_len) == (self.request.epoch, self.round, len(self.tokens))
        tree = message.tree
        assert tree.tokens[0] == self.tokens[-1]
        paths = [ancestry(tree.parents, node) for node in range(len(tree))]
        assert len(self.tokens) + max(map(len, paths)) <= self._limit
        if len(tree) > self._max_nodes or (tree.tokens < 0).any() or (tree.tokens >= VOCAB).any():
            return [PortError(message.session, Reason.INVALID_TREE, "over a limit")]
        return [self._verdict(message, max((p for p in paths if self._accepts(tree, p)), key=len))]

    def _open(self, request: Open) -> list[History | Prefilled]:
        self.request, self.tokens, self.taps = request, list(request.tokens), request.taps
        self._limit = min(request.prompt_len + request.max_tokens, self._context_length)
        prompt = len(self.tokens)
        finish = self._commit([self._target.after(request.tokens)])
        prefilled = Prefilled(request.session, request.epoch, self.tokens[-1], finish, 0.0)
        return [*(self._history(0, prompt) if self.taps else []), prefilled]

    def _history(self, start: int, stop: int) -> list[History]:
        place, half = (self.request.session, self.request.epoch), (start + stop) // 2
        cuts = [(start, half), (half, stop)] if start < half else [(start, stop)]
        return [
            History(*place, true_rows(self.tokens, a, b), tuple(self.tokens[a + 1 : b + 1]), self.attachment)
            for a, b in cuts
        ]

    def _accepts(self, tree: DraftTree, path: list[int]) -> bool:
        drafted = [int(tree.tokens[node]) for node in path[1:]]
        return all(
            self._target.after((*self.tokens, *drafted[:i])) == token and token not in self.request.eos_ids
            for i, token in enumerate(drafted)
        )

    def _verdict(self, verify: Verify, path: list[int]) -> Verdict:
        base = len(self.tokens)
        drafted = [int(verify.tree.tokens[node]) for node in path[1:]]
        tokens = [*drafted, self._target.after((*self.tokens, *drafted))]
        finish = self._commit(tokens)
        features = true_rows(self.tokens, base - 1, base - 1 + len(path)) if self.taps else Features(base - 1, {})
        round_ = verify.round
        self.round += 1
        return Verdict(verify.session, verify.epoch, round_, base, tuple(path), tuple(tokens), finish, features, 0.0)

    def _commit(self, tokens: list[int]) -> str | None:
        self.tokens += tokens
        if tokens[-1] in self.request.eos_ids:
            return "stop"
        return "length" if len(self.tokens) >= self._limit else None


class SimulatedDrafter:
    """Guesses well, badly or wrongly. It insists on true rows, each position once and in order."""

    def __init__(self, target: SimulatedTarget, rng: np.random.Generator, prompt: tuple[int, ...]) -> None:
        self._target, self._rng = target, rng
        self._known = [prompt[0]]
        self._waiting: Draft | None = None
        self.opened = False

    def receive(self, message: OpenDraft | Observe | Draft) -> list[Drafted | NeedFeatures]:
        if isinstance(message, OpenDraft):
            self.opened = True
            return []
        assert self.opened
        if isinstance(message, Observe):
            assert message.features.base == len(self._known) - 1
            assert len(message.features) == len(message.tokens)
            start = message.features.base
            self._known += message.tokens
            expected = true_rows(self._known, start, start + len(message.tokens))
            np.testing.assert_array_equal(message.features.rows[0], expected.rows[0])
            waiting, self._waiting = self._waiting, None
            return self.receive(waiting) if waiting else []
        if message.base_len > len(self._known):  # rows that are on another stream
            assert self._waiting is None
            self._waiting = message
            return []
        assert message.base_len == len(self._known)
        if self._rng.random() < 0.01:
            return [NeedFeatures(message.session, message.epoch, message.round, ((0, 1),))]
        return [Drafted(message.session, message.epoch, message.round, message.base_len, self._tree(message), 0.0)]

    def _tree(self, draft: Draft) -> DraftTree:
        kind = self._rng.choice(["good", "wrong root", "deep", "huge", "alien"], p=[0.9, 0.04, 0.04, 0.01, 0.01])
        tokens, parents = [self._known[-1]], [-1]
        depth = 40 if kind == "deep" else draft.budget.max_depth
        spine, path = 0, tuple(self._known)
        for _ in range(depth):
            likely = self._target.after(path)
            guess = likely if self._rng.random() < 0.8 else (likely + 1) % VOCAB
            tokens += [(guess + 2) % VOCAB, guess]
            parents += [spine, spine]
            spine, path = len(tokens) - 1, (*path, guess)
        if kind == "wrong root":
            tokens[0] = (tokens[0] + 1) % VOCAB
        if kind == "alien":
            tokens[-1] = VOCAB + 5
        if kind == "huge":
            tokens += [1] * 200
            parents += [0] * 200
        return DraftTree.build(tokens, parents)
