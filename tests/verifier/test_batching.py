"""Batches by hand: what goes in, what waits on, in which order."""

from collections import deque
from types import SimpleNamespace

import pytest

from services.speculation.messages import Verify
from services.speculation.trees import DraftTree
from services.verifier.batching import take_batch
from services.verifier.work import Work


def session(length, prompt=0, closed=False):
    return SimpleNamespace(kv=SimpleNamespace(length=length), tokens=[0] * prompt, closed=closed, attachment=0)


def prompt(done, length, **state):
    return Work(session(done, length, **state), (), 0)


def tree(base, nodes):
    drafted = DraftTree.build([1] * nodes, range(-1, nodes - 1))
    return Work(session(base), (), 0, Verify("s", 0, 0, base, drafted))


def past(start, stop):
    return Work(session(stop), (), 0, past=(start, stop))


def shape(batch):
    return [len(work.verify.tree) if work.verify else work.length for work in batch]


@pytest.mark.parametrize(
    ("ready", "device", "taken", "left"),
    [
        ([prompt(0, 1000)], "cpu", [256], 0),
        ([prompt(0, 100), prompt(0, 100), prompt(0, 100)], "cpu", [100, 100, 56], 0),
        ([prompt(0, 256), prompt(0, 100)], "cpu", [256], 1),
        # 256 x 512 / (512 + 3584) = 32 rows, and half of that leaves room for 128 at the start of a prompt.
        ([prompt(3584, 9000)], "cpu", [32], 0),
        ([prompt(3584, 3600), prompt(0, 1000)], "cpu", [16, 128], 0),
        ([prompt(10**6, 2 * 10**6)], "cpu", [1], 0),
        ([prompt(3584, 9000)], "gpu", [256], 0),
        ([past(3584, 9000)], "cpu", [32], 0),
        # Trees go whole, and have room of their own.
        ([tree(0, 200), tree(0, 200), tree(0, 200)], "cpu", [200, 200], 1),
        ([tree(10**6, 60), tree(0, 2)], "cpu", [60], 1),
        ([tree(0, 12), prompt(0, 300), tree(0, 12)], "cpu", [12, 256, 12], 0),
        ([prompt(0, 10, closed=True)], "cpu", [], 0),
        ([], "cpu", [], 0),
    ],
    ids=str,
)
def test_batches(ready, device, taken, left):
    waiting = deque(ready)
    assert shape(take_batch(waiting, device)) == taken
    assert len(waiting) == left


def test_what_does_not_fit_keeps_its_order_and_comes_next():
    works = [prompt(0, 256), prompt(0, 3), prompt(0, 4)]
    waiting = deque(works)
    take_batch(waiting, "cpu")
    assert [work.session for work in waiting] == [work.session for work in works[1:]]
    assert shape(take_batch(waiting, "cpu")) == [3, 4]
