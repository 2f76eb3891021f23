"""Presets, overrides and the choice of a drafter."""

from dataclasses import replace

import pytest

from services.orchestrator.directory import Directory, Offer, why_unfit
from services.orchestrator.routing import PRESETS, TreeOptions, pick_drafter
from services.runtime.bus import MemoryBus
from services.runtime.registry import MemoryRegistry
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import DrafterInfo, DrafterStatus, TargetInfo

TARGET = TargetInfo("t", "abc", "tok", 30, 576, 1000, 8192, (2,), "float32", "cpu", 64)


def directory(*offers):
    made = Directory(MemoryRegistry(), lambda address: None, TARGET, MemoryBus())
    made.offers = {offer.name: offer for offer in offers}
    return made


def offer(instance, name, family="eagle3", sessions=0, reported=0):
    status = DrafterStatus(DrafterInfo(name, family, (1,), None, 0), reported)
    return Offer(instance, instance, None, status, None, sessions)


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


def test_family_name_and_instance_pick_and_off_picks_none():
    both = directory(offer("1", "a", "hass"), offer("2", "b"))
    wanted = ("eagle3", "b", "2", "a", "1", "hass", "auto")
    assert "".join(pick_drafter(both, name).name for name in wanted) == "2221111"
    assert pick_drafter(both, "off") is None


def test_what_is_asked_for_and_not_there_is_an_error():
    assert pick_drafter(directory(), "auto") is None
    with pytest.raises(AerieError, match=r"there: a, b") as caught:
        pick_drafter(directory(offer("1", "b"), offer("2", "a"), offer("3", "a")), "c")
    assert caught.value.reason is Reason.DRAFTER_UNAVAILABLE


def test_of_one_drafter_the_instance_with_the_fewest_sessions_is_picked():
    """The drafter's own count also knows of other orchestrators'."""
    three = directory(offer("1", "a", sessions=2), offer("2", "a", reported=3), offer("3", "a", sessions=1, reported=1))
    assert pick_drafter(three, "auto").name == "3"
    assert pick_drafter(three, "a", {three.offers["3"]}).name == "1"
    # Another drafter is another matter: load never chooses between drafters.
    assert pick_drafter(directory(offer("1", "a", sessions=9), offer("2", "b")), "auto").name == "1"


FITS = DrafterInfo("d", "eagle3", (1, 30, "final"), "abc", 0)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (FITS, None),
        (replace(FITS, target_fingerprint=None), None),
        (replace(FITS, target_fingerprint="xyz"), "xyz"),
        (replace(FITS, taps=()), "no tap"),
        (replace(FITS, taps=(31,)), "tap 31"),
        (replace(FITS, taps=(-1,)), "tap -1"),
    ],
)
def test_a_drafter_must_fit_the_target(info, why):
    assert (why_unfit(info, TARGET) or "") == "" if why is None else why in why_unfit(info, TARGET)
