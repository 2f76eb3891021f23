"""What ``--drafter`` names, and what loading refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.drafter import loader
from services.drafter.eagle3.config import Overrides
from services.drafter.loader import choose_checkpoint, load_chosen, load_drafter, shipped_checkpoint
from services.speculation.errors import AerieError, Reason
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, draw_weights

DESIGN = Design()
TARGET = checkpoints.target_info(DESIGN)


def write_tiny(folder: Path, fingerprint: str | None = None) -> Path:
    config = checkpoints.specforge(DESIGN)
    if fingerprint:
        config["aerie"] = {"target_fingerprint": fingerprint}
    return checkpoints.write(folder, config, checkpoints.tensors_of(draw_weights(DESIGN)))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoints folder with drafters for two targets."""
    root = tmp_path / "checkpoints"
    monkeypatch.setattr(loader, "CHECKPOINTS", root)
    write_tiny(root / "another" / "eagle3", "a" * 64)
    write_tiny(root / "unmarked" / "eagle3")
    return write_tiny(root / "tiny" / "eagle3", TARGET.weights_fingerprint)


def test_auto_and_a_family_find_what_is_shipped_for_the_target(shipped: Path) -> None:
    assert choose_checkpoint("auto", TARGET) == shipped
    assert choose_checkpoint("eagle3", TARGET) == shipped
    assert choose_checkpoint("off", TARGET) is None


def test_another_target_gets_plain_decoding_under_auto_and_an_error_by_name(shipped: Path) -> None:
    other = replace(TARGET, weights_fingerprint="0" * 64, name="other-model")
    assert choose_checkpoint("auto", other) is None
    with pytest.raises(AerieError, match="other-model") as caught:
        choose_checkpoint("eagle3", other)
    assert caught.value.reason == Reason.DRAFTER_UNAVAILABLE


def test_anything_else_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_checkpoint("./mine", TARGET) == Path("mine")
    assert choose_checkpoint("~/mine", TARGET) == tmp_path / "mine"


def test_the_package_ships_a_drafter_that_names_its_target() -> None:
    config = next(loader.CHECKPOINTS.glob("smollm2-135m-instruct/eagle3/config.json"))
    fingerprint = json.loads(config.read_text())["aerie"]["target_fingerprint"]
    assert shipped_checkpoint("eagle3", replace(TARGET, weights_fingerprint=fingerprint)) == config.parent


def test_loads_a_folder(tmp_path: Path) -> None:
    shared = checkpoints.shared_by(draw_weights(DESIGN))
    folder = write_tiny(tmp_path / "my-drafter", TARGET.weights_fingerprint)
    info = load_drafter(folder, TARGET, shared).info
    assert (info.name, info.family, info.taps) == ("my-drafter", "eagle3", DESIGN.taps)
    assert info.target_fingerprint == TARGET.weights_fingerprint
    assert info.parameters == sum(tensor.size for tensor in draw_weights(DESIGN).own.values())
    forced = load_drafter(folder, TARGET, shared, Overrides(taps=(3, 4, 8)))
    assert forced.info.taps == (3, 4, 8)


def test_refuses_what_is_no_folder_and_what_does_not_fit(tmp_path: Path) -> None:
    shared = checkpoints.shared_by(draw_weights(DESIGN))
    folder = write_tiny(tmp_path / "made-for-another", "a" * 64)
    cases = [
        (tmp_path / "nowhere", TARGET, Reason.CHECKPOINT_NOT_FOUND, "nowhere"),
        (folder / "config.json", TARGET, Reason.CHECKPOINT_NOT_FOUND, "config.json"),
        (tmp_path, TARGET, Reason.CHECKPOINT_NOT_FOUND, "config.json"),
        (folder, TARGET, Reason.CHECKPOINT_INCOMPATIBLE, "made for target aaaaaaaaaaaa"),
    ]
    for path, target, reason, words in cases:
        with pytest.raises(AerieError, match=words) as caught:
            load_drafter(path, target, shared)
        assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["hass", "HASS", "medusa", "eagle2"])
def test_a_family_that_is_not_built_is_named(name: str) -> None:
    with pytest.raises(AerieError, match=f"{name} is not built; built: eagle3") as caught:
        choose_checkpoint(name, TARGET)
    assert caught.value.reason == Reason.FAMILY_NOT_BUILT


def test_a_checkpoint_that_names_its_family_is_loaded_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "aerie": {"family": "other"}}))
    shared = checkpoints.shared_by(draw_weights(DESIGN))
    with pytest.raises(AerieError, match="of the family 'other'; built: eagle3") as caught:
        load_drafter(folder, TARGET, shared)
    assert caught.value.reason == Reason.FAMILY_NOT_BUILT
    monkeypatch.setitem(loader.FAMILIES, "other", lambda path, target, shared, overrides: (path, target))
    assert load_drafter(folder, TARGET, shared) == (folder, TARGET)
    (folder / "config.json").write_text(json.dumps({**config, "aerie": {"family": ["eagle3"]}}))
    with pytest.raises(AerieError, match="family"):
        load_drafter(folder, TARGET, shared)


def test_config_keys_that_nothing_reads_are_reported_on_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny(tmp_path / "mine")
    shared = checkpoints.shared_by(draw_weights(DESIGN))
    load_drafter(folder, TARGET, shared)
    assert not caplog.records
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "new_flag": 1}))
    load_drafter(folder, TARGET, shared)
    assert "nothing reads: new_flag" in caplog.text


@pytest.mark.parametrize("broken", ["config", "weights"])
def test_a_shipped_drafter_that_does_not_load_is_a_warning_under_auto(
    shipped: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared = checkpoints.shared_by(draw_weights(DESIGN))
    assert load_chosen("auto", TARGET, shared).info.family == "eagle3"
    assert load_chosen("off", TARGET, shared) is None
    (shipped / {"config": "config.json", "weights": "model.safetensors"}[broken]).write_text("{")
    assert load_chosen("auto", TARGET, shared) is None
    assert len(caplog.records) == 1
    for name in ("eagle3", str(shipped)):
        with pytest.raises(AerieError) as caught:
            load_chosen(name, TARGET, shared)
        assert caught.value.reason == Reason.CHECKPOINT_INVALID


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 300, "/" + "a" * 300, "nul\0"])
def test_a_name_that_no_folder_can_have_is_not_found(name: str) -> None:
    with pytest.raises(AerieError, match="no such folder") as caught:
        load_drafter(choose_checkpoint(name, TARGET), TARGET, lambda name: None)
    assert caught.value.reason == Reason.CHECKPOINT_NOT_FOUND
    assert len(caught.value.message) < 200


def test_a_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(AerieError, match=r"model\.safetensors is a file; a drafter is a folder"):
        load_drafter(tmp_path / "model.safetensors", TARGET, lambda name: None)
