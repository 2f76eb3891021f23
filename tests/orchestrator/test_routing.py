"""Presets, overrides and the choice of a drafter."""

import pytest

from services.orchestrator.routing import PRESETS, TreeOptions, pick_drafter
from services.runtime.registry import Entry, MemoryRegistry
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo

TARGET = TargetInfo("t", "abc", "tok", 30, 576, 1000, 8192, (2,), "float32", "cpu", 64)


def entry(name, family="eagle3", fingerprint=None):
    return Entry(name, "drafter", None, {"family": family, "taps": (1,), "target_fingerprint": fingerprint})


def registry(*entries):
    filled = MemoryRegistry()
    for e in entries:
        filled.join(e)
    return filled


def test_overrides_replace_single_fields_of_the_preset():
    budget = TreeOptions(nodes=9).budget(TARGET)
    assert (budget.max_nodes, budget.max_depth, budget.top_k) == (9, PRESETS["cpu"].max_depth, PRESETS["cpu"].top_k)


@pytest.mark.parametrize(
    "options", [TreeOptions(nodes=0), TreeOptions(nodes=65), TreeOptions(depth=-1), TreeOptions(top_k=0)]
)
def test_impossible_trees_are_refused(options):
    with pytest.raises(AerieError) as caught:
        options.budget(TARGET)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_drafters_of_another_target_are_never_picked():
    other = registry(entry("a", fingerprint="xyz"))
    assert pick_drafter(other, "auto", TARGET) is None
    with pytest.raises(AerieError) as caught:
        pick_drafter(other, "a", TARGET)
    assert caught.value.reason is Reason.DRAFTER_UNAVAILABLE


def test_family_and_name_pick_and_off_picks_none():
    both = registry(entry("a", "hass"), entry("b", "eagle3", "abc"))
    assert pick_drafter(both, "eagle3", TARGET).name == "b"
    assert pick_drafter(both, "a", TARGET).name == "a"
    assert pick_drafter(both, "off", TARGET) is None
