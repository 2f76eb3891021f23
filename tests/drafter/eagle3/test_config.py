"""Every published spelling of a config becomes one spec; what is not EAGLE-3 is named."""

from dataclasses import replace
from typing import Any

import pytest

from services.drafter.eagle3.config import NO_OVERRIDES, Eagle3Spec, Overrides, read_config
from services.drafter.eagle3.weights import Shape, canonical_name
from services.speculation.errors import AerieError, Reason
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, draw_weights

DESIGN = Design()


def shapes_of(design: Design) -> dict[str, Shape]:
    return {canonical_name(n): tuple(t.shape) for n, t in checkpoints.tensors_of(draw_weights(design)).items()}


def read(config: dict[str, Any], design: Design = DESIGN, overrides: Overrides = NO_OVERRIDES) -> Eagle3Spec:
    return read_config(config, shapes_of(design), overrides)


def with_ids(ids: list[int] | None, **changes: Any) -> dict[str, Any]:
    return {**checkpoints.specforge(DESIGN), "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, **changes}


@pytest.mark.parametrize(
    ("ids", "is_speculators", "overrides", "boundaries"),
    [
        # SpecForge, SGLang, TensorRT-LLM: the layer whose output is read. Qwen3-235B, DeepSeek-V3, gpt-oss-120b.
        ([1, 46, 90], False, NO_OVERRIDES, (2, 47, 91)),
        ([1, 29, 57], False, NO_OVERRIDES, (2, 30, 58)),
        ([1, 17, 33], False, NO_OVERRIDES, (2, 18, 34)),
        # EAGLE, vLLM, NVIDIA: layers already applied. The last of gpt-oss's 36 layers is after every block.
        ([2, 15, 27], False, NO_OVERRIDES, (2, 15, 27)),
        ([24, 30, 36], False, NO_OVERRIDES, (24, 30, 36)),
        # speculators ids are always boundaries, also when they begin with 1.
        ([1, 15, 27], True, NO_OVERRIDES, (1, 15, 27)),
        # thoughtworks names attention layers; nothing in the config says so.
        ([3, 23, 47], False, Overrides(tap_convention="layer-output"), (4, 24, 48)),
        ([1, 15, 27], False, Overrides(tap_convention="boundary"), (1, 15, 27)),
        ([1, 15, 27], False, Overrides(taps=(2, 14, 26)), (2, 14, 26)),
        (None, False, Overrides(taps=(2, 14, 26)), (2, 14, 26)),
    ],
)
def test_reads_both_tap_conventions(
    ids: list[int], is_speculators: bool, overrides: Overrides, boundaries: tuple[int, ...]
) -> None:
    config = with_ids(ids)
    if is_speculators:
        config = {**checkpoints.speculators(DESIGN), "eagle_aux_hidden_state_layer_ids": ids}
    spec = read(config, overrides=overrides)
    assert spec.taps == boundaries
    assert spec.tap_count == 3
    assert any("tap" in decision for decision in spec.decisions)


@pytest.mark.parametrize(("layers", "boundaries"), [(32, (2, 16, 29)), (30, (2, 15, 27)), (7, (2, 3, 4))])
def test_missing_tap_ids_mean_the_default_of_the_target(layers: int, boundaries: tuple[int, ...]) -> None:
    for config in (with_ids(None), {**checkpoints.specforge(DESIGN), "eagle_config": None}):
        spec = read(config)
        assert spec.taps is None
        assert spec.resolve_taps(layers).taps == boundaries


@pytest.mark.parametrize(
    ("changes", "layers", "words"),
    [
        ({"taps": None}, 6, "explicitly"),
        ({"taps": None, "tap_count": 4}, 30, "explicitly"),
        ({"taps": (2, 15, 31)}, 30, "31"),
        ({"taps": (-1, 15, 30)}, 30, "-1"),
    ],
)
def test_refuses_taps_that_the_target_lacks(changes: dict[str, Any], layers: int, words: str) -> None:
    spec = replace(read(with_ids([2, 15, 27])), **changes)
    with pytest.raises(AerieError, match=words) as caught:
        spec.resolve_taps(layers)
    assert caught.value.reason == Reason.CHECKPOINT_INCOMPATIBLE


def test_the_boundary_after_the_last_layer_is_a_tap() -> None:
    assert read(with_ids([24, 30, 36])).resolve_taps(36).taps == (24, 30, 36)


def test_speculators_and_others_differ_in_the_default_residual() -> None:
    config = checkpoints.speculators(replace(DESIGN, norm_before_residual=True))
    assert "norm_before_residual" not in config
    assert read(config).norm_before_residual is True
    assert read({**config, "norm_before_residual": False}).norm_before_residual is False
    assert read({**config, "norm_before_residual": None}).norm_before_residual is True
    plain = checkpoints.specforge(DESIGN)
    assert read(plain).norm_before_residual is False
    assert read({**plain, "norm_before_residual": True}).norm_before_residual is True
    assert read(plain, overrides=Overrides(norm_before_residual=True)).norm_before_residual is True
    assert any("norm_before_residual" in decision for decision in read(plain).decisions)


def test_post_norm_recycling_has_two_names_and_an_override() -> None:
    plain = checkpoints.specforge(DESIGN)
    assert read(plain).recycle_post_norm is False
    assert read({**plain, "norm_output": True}).recycle_post_norm is True
    nested = {**plain["eagle_config"], "return_hidden_post_norm": True}
    assert read({**plain, "eagle_config": nested}).recycle_post_norm is True
    forced = read({**plain, "norm_output": True}, overrides=Overrides(recycle_post_norm=False))
    assert forced.recycle_post_norm is False
    assert any("forced" in decision for decision in forced.decisions)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10000.0, None),  # never the target's
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2.0}}, 500000.0, ("linear", 2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 7.0}, 7.0, ("linear", 4.0)),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 2, 1]}}, 10000.0, None),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}, 10000.0, None),
    ],
)
def test_reads_rope_in_both_spellings(config: dict[str, Any], theta: float, scaling: tuple[str, float] | None) -> None:
    base = {k: v for k, v in checkpoints.specforge(DESIGN).items() if not k.startswith("rope")}
    spec = read({**base, **config})
    assert spec.rope_theta == theta
    found = spec.rope_scaling and (spec.rope_scaling["rope_type"], spec.rope_scaling["factor"])
    assert found == scaling
    assert not spec.unknown


@pytest.mark.parametrize(
    ("rope", "reason", "words"),
    [
        ({"type": "dynamic", "factor": 2.0}, Reason.FAMILY_NOT_BUILT, "dynamic"),
        ({"full_attention": {"rope_theta": 1e6}}, Reason.FAMILY_NOT_BUILT, "each type of layer"),
        ({"type": "linear"}, Reason.CHECKPOINT_INVALID, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, Reason.CHECKPOINT_INVALID, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": 8.0}, Reason.CHECKPOINT_INVALID, "original_max_position_embeddings"),
    ],
)
def test_refuses_rope_that_it_cannot_honour(rope: dict[str, Any], reason: Reason, words: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(AerieError, match=words) as caught:
            read({**checkpoints.specforge(DESIGN), "rope_scaling": None, key: rope})
        assert caught.value.reason == reason


def test_reports_what_nothing_reads() -> None:
    scaling = {"type": "linear", "factor": 2.0, "attention_factor": 1.5}
    config = {**checkpoints.nvidia(DESIGN), "warp_drive": 1, "rope_scaling": scaling, "absent": None}
    config["eagle_config"] = {**config["eagle_config"], "use_mtp_layernorm": True}
    assert read(config).unknown == ("rope_scaling.attention_factor", "use_mtp_layernorm", "warp_drive")
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 2.0}
    assert read({**checkpoints.specforge(DESIGN), "rope_scaling": yarn}).unknown == ("rope_scaling.mscale",)
    for spelling in (checkpoints.specforge, checkpoints.nvidia, checkpoints.speculators, checkpoints.nebius):
        assert read(spelling(DESIGN)).unknown == ()


def test_null_means_absent() -> None:
    config = checkpoints.speculators(DESIGN)
    nulls = {"hidden_size": None, "target_hidden_size": None, "vocab_size": None, "eagle_config": None}
    spec = read({**config, **nulls})
    assert (spec.hidden_size, spec.target_hidden_size, spec.target_vocab_size) == (24, 24, 53)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"target_hidden_size": 25}, "not a multiple of 25"),
        ({"target_hidden_size": 36}, "needs embedding and head"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 6]}}, "4 tap ids, but fc reads 3"),
    ],
)
def test_refuses_configs_that_contradict(changes: dict[str, Any], words: str) -> None:
    config = {**checkpoints.specforge(DESIGN), **changes}
    if "target_hidden_size" in changes:
        config["eagle_config"] = None
    with pytest.raises(AerieError, match=words) as caught:
        read(config)
    assert caught.value.reason == Reason.CHECKPOINT_INVALID


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({}, {"mask_hidden": (1, 1, 72)}, "P-EAGLE"),
        ({"ptd_token_id": 7}, {}, "P-EAGLE"),
        ({"pard_token": 7}, {}, "P-EAGLE"),
        ({"kv_lora_rank": 512}, {}, "MLA"),
        ({}, {"layers.0.self_attn.kv_a_proj_with_mqa.weight": (8, 48)}, "MLA"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
        ({"eagle_config": {"next_layer_regular": False}}, {}, "eh_proj"),
        ({}, {"eh_proj.weight": (24, 48)}, "eh_proj"),
        ({}, {"enorm.weight": (24,)}, "eh_proj"),
        ({}, {"fc.weight": (24, 48), "layers.0.self_attn.q_proj.weight": (32, 24)}, "EAGLE-1"),
        ({"speculators_model_type": "eagle"}, {}, "'eagle'"),
        ({"speculators_model_type": "dflash"}, {}, "'dflash'"),
        ({"hidden_act": "gelu"}, {}, "gelu"),
    ],
)
def test_names_what_is_not_built(changes: dict[str, Any], tensors: dict[str, Shape], words: str) -> None:
    with pytest.raises(AerieError, match=words) as caught:
        read_config({**checkpoints.specforge(DESIGN), **changes}, {**shapes_of(DESIGN), **tensors})
    assert caught.value.reason == Reason.FAMILY_NOT_BUILT


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, 512),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 512, "use_sliding_window": True}, 512),
        ({"sliding_window": 512, "use_sliding_window": False}, None),
        ({"sliding_window": 512}, None),
        ({"layer_types": ["sliding_attention"]}, None),
    ],
)
def test_reads_the_window_that_draft_layers_were_trained_with(keys: dict[str, Any], window: int | None) -> None:
    config = checkpoints.speculators(DESIGN)
    config["transformer_layer_config"] |= keys
    assert read(config).sliding_window == window


def refused(changes: dict[str, Any]) -> str:
    with pytest.raises(AerieError) as caught:
        read({**checkpoints.specforge(DESIGN), **changes})
    assert caught.value.reason == Reason.CHECKPOINT_INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


SIZES = ("hidden_size", "vocab_size", "draft_vocab_size", "target_hidden_size", "intermediate_size", "head_dim")
COUNTS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")


@pytest.mark.parametrize("value", [0, -1, 1.0, "8", [8], True, 10**12, 10**400, float("nan")])
@pytest.mark.parametrize("key", [*SIZES, *COUNTS])
def test_sizes_are_whole_numbers_that_a_file_can_have(key: str, value: Any) -> None:
    assert key in refused({key: value})


@pytest.mark.parametrize("value", [0, -1.0, "x", [1.0], True, float("nan"), float("inf"), 1e300, 1e-300, 10**400])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "logit_scale", "rope_scaling.factor"])
def test_numbers_are_positive_and_fit_float32(key: str, value: Any) -> None:
    outer, _, inner = key.partition(".")
    assert key in refused({outer: {"type": "linear", inner: value} if inner else value})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "original_max"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": "x"}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_slow": -1}, "beta_slow"),
    ],
)
def test_rope_values_are_checked_one_by_one(scaling: dict[str, Any], words: str) -> None:
    assert words in refused({"rope_scaling": scaling})


@pytest.mark.parametrize("layers", [10**5, 2**24])
def test_more_layers_than_tensors_are_refused_before_they_are_listed(layers: int) -> None:
    assert f"num_hidden_layers is {layers}, for" in refused({"num_hidden_layers": layers})


@pytest.mark.parametrize(
    "ids", [[2, 2, 3], ["1", "2", "3"], [1.5, 2, 3], [True, 2, 3], [[1], 2, 3], "123", {"a": 1}, [], 5]
)
def test_tap_ids_are_different_whole_numbers(ids: Any) -> None:
    assert "tap ids" in refused({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}})


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "attention_bias"])
@pytest.mark.parametrize("value", ["false", 0, [True]])
def test_flags_are_true_or_false(key: str, value: Any) -> None:
    """A text "false" would be true."""
    assert key in refused({key: value})


@pytest.mark.parametrize("window", [0, -5, "x", 1.5])
def test_a_window_that_is_used_has_a_size(window: Any) -> None:
    assert "sliding_window" in refused({"sliding_window": window, "use_sliding_window": True})
    assert read({**checkpoints.specforge(DESIGN), "sliding_window": window}).sliding_window is None


def test_heads_of_odd_width_are_refused() -> None:
    assert "head_dim is 7" in refused({"head_dim": 7})
