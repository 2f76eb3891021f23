"""Read every published spelling of an EAGLE-3 config into one frozen spec."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from services.speculation.errors import AerieError, Reason

TapConvention = Literal["boundary", "layer-output"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Overrides:
    """What a user may force where a config is ambiguous (None: decide from the config)."""

    tap_convention: TapConvention | None = None
    taps: tuple[int, ...] | None = None
    recycle_post_norm: bool | None = None
    norm_before_residual: bool | None = None


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class Eagle3Spec:
    """An EAGLE-3 drafter in normal form.

    Attributes:
        hidden_size: Width H of the drafter.
        target_hidden_size: Width Ht of each tap.
        target_vocab_size, draft_vocab_size: Sizes V and Vd.
        layers: Decoder layers; the first reads (embedding, hidden), later ones are plain.
        heads, kv_heads, head_dim: Attention shape; heads * head_dim need not equal H.
        intermediate_size: SwiGLU width.
        rms_norm_eps: Of every norm.
        rope_theta, rope_scaling: The drafter's own RoPE, in mlx-lm's spelling.
        taps: Boundary indices; None means the default (2, n // 2, n - 3) of a target with n layers.
        tap_count: Number of taps.
        attention_bias, mlp_bias, fc_bias: Linear layers with biases.
        qk_norm: RMSNorm on each query and key head.
        norm_before_residual: The residual is the normalised hidden state.
        norm_before_fc: One RMSNorm over the concatenated taps.
        fc_norm: One RMSNorm for each tap.
        recycle_post_norm: Recycled states pass the final norm (EAGLE-3.1's ``norm_output``).
        own_embedding: The checkpoint carries ``embed_tokens``.
        head: Where logits come from: its own head, its embedding, or the target's head.
        logit_scale: Multiplies the logits.
        sliding_window: Rows that its layers were trained to look back, or None.
        decisions: How each ambiguity was settled, for ``aerie inspect``.
        unknown: Config keys that nothing here reads.
    """

    hidden_size: int
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    taps: tuple[int, ...] | None
    tap_count: int
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    recycle_post_norm: bool = False
    own_embedding: bool = False
    head: Literal["own", "embedding", "target"] = "own"
    logit_scale: float = 1.0
    sliding_window: int | None = None
    decisions: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def resolve_taps(self, target_layers: int) -> "Eagle3Spec":
        """Fill in default taps and check that every tap exists.

        Raises:
            AerieError: CHECKPOINT_INCOMPATIBLE.
        """
        taps = self.taps
        if taps is None:
            if self.tap_count != 3 or target_layers < 7:  # below, the default boundaries collide
                _refuse(
                    Reason.CHECKPOINT_INCOMPATIBLE,
                    f"no tap ids for {self.tap_count} taps over {target_layers} layers; give them explicitly",
                )
            taps = (2, target_layers // 2, target_layers - 3)
        if any(not 0 <= tap <= target_layers for tap in taps):
            _refuse(Reason.CHECKPOINT_INCOMPATIBLE, f"taps {taps} outside the target's 0..{target_layers}")
        return replace(self, taps=taps)


@dataclass
class _Reader:
    """Reads keys and remembers which were read."""

    values: dict[str, Any]
    used: set[str] = field(default_factory=set)

    def get(self, *names: str, default: Any = None) -> Any:
        found = default
        for name in reversed(names):
            self.used.add(name)
            if self.values.get(name) is not None:
                found = self.values[name]
        return found

    def need(self, *names: str) -> Any:
        if (value := self.get(*names)) is None:
            _refuse(Reason.CHECKPOINT_INVALID, f"config.json lacks {names[0]}")
        return value

    def size(self, *names: str, default: int | None = None) -> int:
        value = self.need(*names) if default is None else self.get(*names, default=default)
        return _size(names[0], value)

    def flag(self, *names: str) -> bool:
        value = self.get(*names, default=False)
        if not isinstance(value, bool):
            _refuse(Reason.CHECKPOINT_INVALID, f"{names[0]} is {value!r:.40}, neither true nor false")
        return value


_LARGEST = 2**24
"""Far above any real size: what is larger is damage."""


def _size(name: str, value: object) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST:
        _refuse(Reason.CHECKPOINT_INVALID, f"{name} is {value!r:.40}, not a whole number from 1 to {_LARGEST}")
    return value


def _positive(name: str, value: object, above: float = 0.0) -> float:
    """A number that float32 carries."""
    if type(value) not in (int, float) or not max(above, 1e-30) < value < 1e30:  # type: ignore[operator]
        _refuse(Reason.CHECKPOINT_INVALID, f"{name} is {value!r:.40}, not a finite number above {above:g}")
    return float(value)  # type: ignore[arg-type]


# Keys that say nothing about the forward pass, or repeat what the tensors say.
_IGNORED = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range bos_token_id
    eos_token_id pad_token_id max_position_embeddings attention_dropout pretraining_tp auto_map
    max_window_layers speculators_version speculators_config speculators_model_type modules_to_not_save
    has_no_defaults_at_init mode _name_or_path num_aux_hidden_states
    use_aux_hidden_state next_layer_regular embed_requires_grad aerie""".split()  # noqa: SIM905
)
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank")
_WRAPPERS = ("transformer_layer_config", "eagle_config")
# Rope scalings: the keys that each needs, and those that it may have.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ("mrope_section", "mrope_interleaved")),
    "mrope": ((), ("mrope_section", "mrope_interleaved")),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"), ("beta_fast", "beta_slow")),
}


def read_config(raw: Mapping[str, Any], shapes: Mapping[str, Shape], overrides: Overrides = NO_OVERRIDES) -> Eagle3Spec:
    """Normalise a config.

    Args:
        raw: ``config.json``: official, SpecForge, AngelSlim, NVIDIA or speculators.
        shapes: Canonical tensor names (see ``weights.canonical_name``) and shapes.
        overrides: Forced readings.

    Raises:
        AerieError: FAMILY_NOT_BUILT for what is not EAGLE-3, CHECKPOINT_INVALID for a config that contradicts
            itself or its tensors.
    """
    refuse_other_families(raw, shapes)
    is_speculators = "speculators_model_type" in raw
    c = _Reader(_flatten(raw))
    decisions: list[str] = []

    hidden, vocab, heads = c.size("hidden_size"), c.size("vocab_size"), c.size("num_attention_heads")
    target_hidden = c.size("target_hidden_size", default=hidden)
    draft_vocab = c.size("draft_vocab_size", "truncated_vocab_size", default=vocab)
    taps, tap_count = _read_taps(c, is_speculators, shapes, target_hidden, overrides, decisions)
    residual = c.flag("norm_before_residual")
    if c.get("norm_before_residual") is None:
        residual = is_speculators
        style = "speculators" if is_speculators else "EAGLE"
        decisions.append(f"norm_before_residual absent: {residual} ({style} default)")
    recycle = c.flag("norm_output", "return_hidden_post_norm")
    if recycle:
        decisions.append("norm_output: recycled states are post-norm (vLLM's reading; SpecForge trains pre-norm)")
    if overrides.recycle_post_norm is not None:
        recycle = overrides.recycle_post_norm
        decisions.append(f"recycle_post_norm forced to {recycle}")
    if overrides.norm_before_residual is not None:
        residual = overrides.norm_before_residual
        decisions.append(f"norm_before_residual forced to {residual}")
    theta, scaling, unknown_rope = _read_rope(c)
    if (activation := c.get("hidden_act", default="silu")) not in ("silu", "swish"):
        _refuse(Reason.FAMILY_NOT_BUILT, f"an MLP with {activation!r} in a drafter")
    tied = c.flag("tie_word_embeddings")
    spec = Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        target_vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        layers=_read_layers(c, shapes),
        heads=heads,
        kv_heads=c.size("num_key_value_heads", default=heads),
        head_dim=c.size("head_dim", default=max(hidden // heads, 1)),
        intermediate_size=c.size("intermediate_size_mlp", "intermediate_size"),
        rms_norm_eps=_positive("rms_norm_eps", c.get("rms_norm_eps", default=1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        taps=taps,
        tap_count=tap_count,
        # Qwen-style layers have biases that no key announces.
        attention_bias=c.flag("attention_bias") or "layers.0.self_attn.q_proj.bias" in shapes,
        mlp_bias=c.flag("mlp_bias") or "layers.0.mlp.up_proj.bias" in shapes,
        fc_bias=c.flag("bias") or "fc.bias" in shapes,
        qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        norm_before_residual=residual,
        norm_before_fc=c.flag("norm_before_fc"),
        fc_norm=c.flag("fc_norm"),
        recycle_post_norm=recycle,
        own_embedding="embed_tokens.weight" in shapes,
        head=_read_head(shapes, tied, draft_vocab, vocab),
        logit_scale=_positive("logit_scale", c.get("logit_scale", default=1.0)),
        sliding_window=_read_window(c),
        decisions=tuple(decisions),
        unknown=tuple(sorted([*unknown_rope, *(k for k in c.values if k not in c.used and k not in _IGNORED)])),
    )
    _check(spec, target_hidden)
    return spec


def refuse_other_families(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    """Name what is not EAGLE-3 (FAMILY_NOT_BUILT) instead of loading it wrongly."""
    nested = _flatten(raw)
    model_type = nested.get("speculators_model_type", "eagle3")
    if model_type != "eagle3":
        _refuse(Reason.FAMILY_NOT_BUILT, f"a speculators {model_type!r} checkpoint, not EAGLE-3")
    if "mask_hidden" in shapes or any(key in nested for key in ("ptd_token_id", "pard_token")):
        _refuse(Reason.FAMILY_NOT_BUILT, "a P-EAGLE (parallel drafting) checkpoint")
    if any(nested.get(key) for key in _MLA_KEYS) or any(".kv_a_proj" in name for name in shapes):
        _refuse(Reason.FAMILY_NOT_BUILT, "an EAGLE-3 drafter with multi-head latent attention (MLA)")
    if nested.get("use_aux_hidden_state") is False:
        _refuse(Reason.FAMILY_NOT_BUILT, "use_aux_hidden_state is false: an EAGLE-1 style input")
    if any("eh_proj" in name or "enorm" in name for name in shapes) or nested.get("next_layer_regular") is False:
        _refuse(Reason.FAMILY_NOT_BUILT, "an EAGLE-3 variant with eh_proj")
    query, fc = shapes.get("layers.0.self_attn.q_proj.weight"), shapes.get("fc.weight")
    hidden = nested.get("hidden_size")
    if query and hidden and query[1] == hidden and fc and fc[1] == 2 * hidden:
        _refuse(Reason.FAMILY_NOT_BUILT, "an EAGLE-1/EAGLE-2 checkpoint (fc over embedding and hidden state)")


def _read_layers(c: _Reader, shapes: Mapping[str, Shape]) -> int:
    layers = c.size("num_hidden_layers", default=1)
    if layers > max(len(shapes), 1):  # before anybody lists the tensors of that many
        _refuse(Reason.CHECKPOINT_INVALID, f"num_hidden_layers is {layers}, for {len(shapes)} tensors")
    return layers


def _read_taps(
    c: _Reader,
    is_speculators: bool,
    shapes: Mapping[str, Shape],
    target_hidden: int,
    overrides: Overrides,
    decisions: list[str],
) -> tuple[tuple[int, ...] | None, int]:
    """Tap ids have two conventions for the same tensors: a boundary index, or the layer whose output it is."""
    ids = c.get("eagle_aux_hidden_state_layer_ids", "target_layer_ids")
    width = shapes.get("fc.weight", (0, 3 * target_hidden))[1]
    if width % target_hidden:
        _refuse(Reason.CHECKPOINT_INVALID, f"fc reads {width} values, not a multiple of {target_hidden}")
    count = width // target_hidden
    if overrides.taps is not None:
        ids, convention = list(overrides.taps), "boundary"
        decisions.append(f"taps forced to boundaries {ids}")
    elif ids is None:
        decisions.append("no tap ids: the default boundaries (2, n // 2, n - 3)")
        return None, count
    elif not isinstance(ids, list) or not ids:
        _refuse(Reason.CHECKPOINT_INVALID, f"tap ids {ids!r:.80} are not a list of numbers")
    else:
        convention = overrides.tap_convention or _convention(ids, is_speculators)
        decisions.append(f"tap ids {list(ids)} read as {convention}{' (forced)' if overrides.tap_convention else ''}")
    if any(type(i) is not int for i in ids) or len(set(ids)) != len(ids):
        _refuse(Reason.CHECKPOINT_INVALID, f"tap ids {ids!r:.80} are not different whole numbers")
    if len(ids) != count:
        _refuse(Reason.CHECKPOINT_INVALID, f"{len(ids)} tap ids, but fc reads {count} taps")
    shift = 1 if convention == "layer-output" else 0
    return tuple(i + shift for i in ids), count


def _convention(ids: list[int], is_speculators: bool) -> TapConvention:
    """speculators ids are boundaries; else a first id of 1 marks layer outputs (SGLang's rule)."""
    return "layer-output" if not is_speculators and ids[0] == 1 else "boundary"


def _read_rope(c: _Reader) -> tuple[float, dict[str, Any] | None, list[str]]:
    """Base, scaling in mlx-lm's spelling, and scaling keys that nothing here reads.

    The base is the drafter's own, 10000 when its config has none; never the target's.
    """
    scaling = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in scaling.values()):
        _refuse(Reason.FAMILY_NOT_BUILT, "a drafter with another RoPE for each type of layer")
    theta, outer = scaling.pop("rope_theta", None), c.get("rope_theta", default=10000.0)
    types = [kind for key in ("type", "rope_type") if (kind := scaling.pop(key, None))]
    kind = types[-1] if types else "default"
    if kind not in _ROPE_KEYS:
        _refuse(Reason.FAMILY_NOT_BUILT, f"rope scaling {kind!r} in a drafter")
    needed, optional = _ROPE_KEYS[kind]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):  # one alone means nothing (transformers' rule)
        optional += ("mscale", "mscale_all_dim")
    if missing := [key for key in needed if scaling.get(key) is None]:
        _refuse(Reason.CHECKPOINT_INVALID, f"rope scaling {kind!r} lacks {', '.join(missing)}")
    read = {key: scaling.pop(key) for key in (*needed, *optional) if scaling.get(key) is not None}
    unknown = [f"rope_scaling.{key}" for key, value in scaling.items() if value is not None]
    plain = kind in ("default", "mrope")  # text positions are equal in every mrope section
    read = {key: _read_rope_value(key, value) for key, value in read.items()}
    # YaRN divides by the base's logarithm.
    return (
        _positive("rope_theta", outer if theta is None else theta, above=1.0),
        None if plain else {"rope_type": kind, **read},
        unknown,
    )


def _read_rope_value(key: str, value: Any) -> Any:
    if key.startswith("mrope"):
        return value
    if key == "original_max_position_embeddings":
        return _size(f"rope_scaling.{key}", value)
    return _positive(f"rope_scaling.{key}", value)


def _read_window(c: _Reader) -> int | None:
    """speculators marks draft layers "sliding_attention"; without that mark a window is Mistral's or is unused."""
    window, kinds, used = c.get("sliding_window"), c.get("layer_types"), c.get("use_sliding_window")
    slides = "sliding_attention" in kinds if kinds else used is True
    return _size("sliding_window", window) if window is not None and slides else None


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys: the top level wins over the wrappers, null is absent."""
    levels = [*(raw.get(wrapper) or {} for wrapper in _WRAPPERS), raw]
    return {key: v for level in levels for key, v in level.items() if v is not None and key not in _WRAPPERS}


def _read_head(
    shapes: Mapping[str, Shape], tied: bool, draft_vocab: int, vocab: int
) -> Literal["own", "embedding", "target"]:
    if "lm_head.weight" in shapes:
        return "own"
    if draft_vocab != vocab:
        _refuse(Reason.CHECKPOINT_INVALID, "lm_head is missing and the draft vocabulary is reduced")
    return "embedding" if tied and "embed_tokens.weight" in shapes else "target"


def _check(spec: Eagle3Spec, target_hidden: int) -> None:
    if spec.norm_before_fc and spec.fc_norm:
        _refuse(Reason.CHECKPOINT_INVALID, "norm_before_fc and fc_norm exclude each other")
    if spec.head_dim % 2:
        _refuse(Reason.CHECKPOINT_INVALID, f"head_dim is {spec.head_dim}: a RoPE rotates pairs")
    if spec.heads % spec.kv_heads:
        _refuse(Reason.CHECKPOINT_INVALID, f"{spec.heads} heads do not divide into {spec.kv_heads} KV heads")
    shares = not spec.own_embedding or spec.head == "target"
    if target_hidden != spec.hidden_size and shares:
        _refuse(Reason.CHECKPOINT_INVALID, "a drafter of another width than its target needs embedding and head")


def _refuse(reason: Reason, message: str) -> NoReturn:
    raise AerieError(reason, message)
