import pytest

from services.runtime.registry import LEASE_SECONDS, Entry, MemoryRegistry


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def entry(name, kind="drafter", port=None):
    return Entry(name, kind, port, {})


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return MemoryRegistry(clock)


def names(registry, kind=None):
    return [found.name for found in registry.list(kind)]


def test_entries_are_listed_by_name_and_kind(registry):
    for found in (entry("b"), entry("a"), entry("target", "verifier")):
        registry.join(found)
    assert names(registry) == ["a", "b", "target"]
    assert names(registry, "drafter") == ["a", "b"]
    assert names(registry, "verifier") == ["target"]
    assert names(registry, "other") == []


def test_an_entry_without_a_lease_stays_until_it_leaves(registry, clock):
    registry.join(entry("a"))
    assert registry.renew("a", lease=3)
    clock.now += 1e9
    assert names(registry) == ["a"]
    registry.leave("a")
    registry.leave("a")
    assert names(registry) == []


def test_a_lease_ends_unless_it_is_renewed(registry, clock):
    registry.join(entry("a"), lease=3)
    clock.now += 2.9
    assert registry.renew("a")
    clock.now += LEASE_SECONDS - 0.1
    assert names(registry) == ["a"]
    assert registry.renew("a", lease=10)
    clock.now += 9.9
    assert names(registry) == ["a"]
    clock.now += 0.1
    assert names(registry) == []


def test_an_ended_lease_cannot_be_renewed(registry, clock):
    registry.join(entry("a"), lease=3)
    clock.now += 3
    assert not registry.renew("a")
    assert not registry.renew("never there")
    assert names(registry) == []
    registry.join(entry("a"), lease=3)
    assert names(registry) == ["a"]


def test_joining_again_replaces_port_and_lease(registry, clock):
    registry.join(entry("a", port="old"), lease=1)
    registry.join(entry("a", port="new"), lease=5)
    clock.now += 2
    assert [found.port for found in registry.list()] == ["new"]


def test_leases_end_one_by_one(registry, clock):
    for name, lease in (("a", 1), ("b", 2), ("c", None)):
        registry.join(entry(name), lease)
    seen = []
    for _ in range(3):
        seen.append(names(registry))
        clock.now += 1
    assert seen == [["a", "b", "c"], ["b", "c"], ["c"]]
