"""Optimizers: the original's and optax's. Learning rates are in `learning_rates`.

Source: Clark et al. 2020, Appendix A, and the original's code.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax import Schedule

from electra_jax.core.params import map_named, tree_norm


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Fields as in configs/base.py; steps are optimizer steps."""

  name: str
  learning_rate: float
  schedule: str
  warmup_steps: int
  decay_power: float
  weight_decay: float
  b1: float
  b2: float
  eps: float
  clip_norm: float
  separate_optimizers: bool = False
  generator_learning_rate: float | None = None
  generator_weight_decay: float | None = None
  generator_clip_norm: float | None = None
  sharded: bool = False
  decay_steps: int = 0

  def __post_init__(self):
    if self.sharded and not OPTIMIZERS[self.name].elementwise:
      raise ValueError(
        f"optimizer.sharded must be False for {self.name}, whose updates need whole arrays"
      )

  def for_generator(self) -> "OptimizerConfig":
    """Returns the generator's settings, by default the discriminator's."""
    own = {
      name: getattr(self, f"generator_{name}")
      for name in ("learning_rate", "weight_decay", "clip_norm")
    }
    return dataclasses.replace(self, **{k: v for k, v in own.items() if v is not None})


def scale_by_electra_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
  """m / (sqrt(v) + eps), without bias correction.

  As in the original, eps is outside the root. Without bias correction early updates are too large
  (6.5 times near step 10, 3.2 times at step 100, 1.3 times at step 1000). Use a long warm-up
  (10,000 steps), or adamw in short runs.
  """

  def init(params):
    return optax.ScaleByAdamState(
      count=jnp.zeros([], jnp.int32),
      mu=jax.tree.map(jnp.zeros_like, params),
      nu=jax.tree.map(jnp.zeros_like, params),
    )

  def update(grads, state, params=None):
    del params
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
    return updates, optax.ScaleByAdamState(state.count + 1, mu, nu)

  return optax.GradientTransformation(init, update)


def decay_mask(params) -> dict:
  """Returns True for weights that decay: all, embeddings too, but biases and LayerNorm's."""

  def decays(names, _):
    return not (names[-1] in ("bias", "scale") or any("norm" in name for name in names))

  return map_named(decays, params)


def _electra_adam(cfg: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
  return optax.chain(
    scale_by_electra_adam(cfg.b1, cfg.b2, cfg.eps),
    optax.add_decayed_weights(cfg.weight_decay, mask=decay_mask),
    optax.scale_by_learning_rate(schedule),
  )


def _adamw(cfg: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
  return optax.adamw(
    schedule, cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay, mask=decay_mask
  )


# {layer: (input axes, output axes)} of hidden weight matrices, without the axis of stacked layers.
# The other axes (q, k and v, or a gate) count matrices.
MATRICES = {
  "qkv": ((0,), (2, 3)),  # [D, 3, H, d]
  "attention_output": ((0, 1), (2,)),  # [H, d, D]
  "ffn_in": ((0,), (-1,)),  # [D, F] or [D, 2, F]
  "ffn_output": ((0,), (1,)),
  "project": ((0,), (1,)),
  "dense": ((0,), (1,)),  # of heads
}


def matrix_axes(params) -> dict:
  """Returns Muon's axes of each hidden weight matrix, None for other weights."""

  def axes(names, x):
    if names[-1] != "kernel" or names[-2] not in MATRICES:
      return None
    stacked = "layers" in names
    inputs, outputs = (
      tuple(a + stacked if a >= 0 else x.ndim + a for a in axes) for axes in MATRICES[names[-2]]
    )
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)

  return map_named(axes, params)


def _muon(cfg: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
  """Muon for the matrices of hidden layers, AdamW for the rest (Jordan 2024; Liu et al. 2025).

  b1, b2 and eps are AdamW's; Muon has a Nesterov momentum of 0.95. Differs from both papers: optax
  corrects the bias of the momentum and of the gradient in it, which changes a tenth to a quarter of
  the updates of steps 2 and 3, and none to 0.1 % from step 60 on (benchmarks/muon_rule.py).
  """

  def groups(params):
    axes = matrix_axes(params)
    return jax.tree.map(lambda _, a: "matrices" if a else "others", params, axes)

  matrices = optax.contrib.muon(
    schedule,
    weight_decay=cfg.weight_decay,
    muon_weight_dimension_numbers=matrix_axes,
    consistent_rms=0.2,  # AdamW's update size, so that one learning rate fits both (Liu et al. 2.2)
  )
  return optax.partition({"matrices": matrices, "others": _adamw(cfg, schedule)}, groups)


@dataclasses.dataclass(frozen=True)
class OptimizerDef:
  """The definition of an optimizer."""

  # (config, schedule) -> the transformation, without clipping
  make: Callable[[OptimizerConfig, Schedule], optax.GradientTransformation]
  elementwise: bool  # whether an element's update depends only on that element, as ZeRO-1 needs


OPTIMIZERS = {
  "electra_adam": OptimizerDef(_electra_adam, elementwise=True),
  "adamw": OptimizerDef(_adamw, elementwise=True),
  "muon": OptimizerDef(_muon, elementwise=False),
}


def clip_by_norm(max_norm: float, norm: Callable) -> optax.GradientTransformation:
  """Scales a gradient down to `max_norm` if norm(gradient) exceeds it."""

  def clip(grads, _):
    length = norm(grads)
    return jax.tree.map(
      lambda g: jnp.where(length < max_norm, g, (g / length.astype(g.dtype)) * max_norm), grads
    )

  return optax.stateless(clip)


def make_optimizer(
  cfg: OptimizerConfig,
  schedule: Schedule,
  groups: Callable | None = None,
  norm: Callable = tree_norm,
) -> optax.GradientTransformation:
  """Returns clipping by global norm, then `cfg.name` with decoupled weight decay.

  It clips the global batch's gradient once, while the original on TPUs clips each core's gradient
  before the mean. With `cfg.separate_optimizers` each network is clipped by its gradient's norm, so
  that the loss weights do not interact.

  Args:
    groups: (params) -> "generator", "discriminator" or "frozen" for each weight; None: one group.
    norm: returns the norm of a gradient tree; `zero.norm` for a sharded one.
  """

  def trained(cfg: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    return optax.chain(clip_by_norm(cfg.clip_norm, norm), OPTIMIZERS[cfg.name].make(cfg, schedule))

  if groups is None:
    return trained(cfg, schedule)
  parts = {"frozen": optax.set_to_zero()}
  if cfg.separate_optimizers:
    own = cfg.for_generator()
    ratio = own.learning_rate / cfg.learning_rate  # every schedule is proportional to its rate
    parts["generator"] = trained(own, lambda step: schedule(step) * ratio)
    parts["discriminator"] = trained(cfg, schedule)
    return optax.partition(parts, groups)
  parts["trained"] = trained(cfg, schedule)
  merged = {"frozen": "frozen", "generator": "trained", "discriminator": "trained"}
  return optax.partition(parts, lambda params: jax.tree.map(merged.get, groups(params)))


def layer_rates(params: dict, num_layers: int, decay: float, skip: bool = False) -> dict:
  """Returns a learning-rate multiplier for each weight in fine-tuning.

  1 for the head, `decay` for the top layer and the norm after it, decay^2 for the next layer,
  decay^(N + 1) for the embeddings and their projection (Clark et al. 2020, Appendix B).

  Args:
    params: {"embeddings", "encoder": {"layers": stacked [N, ...], ...}, "head"}.
    skip: as in the original's code, decay^2 for the top layer, decay^(N + 2) for the embeddings.

  >>> params = {"head": jnp.ones(3), "encoder": {"layers": jnp.ones((2, 5))}, "embeddings": 1.0}
  >>> rates = layer_rates(params, 2, 0.5)
  >>> rates["head"], rates["encoder"]["layers"].ravel().tolist(), rates["embeddings"]
  (1.0, [0.25, 0.5], 0.125)
  """

  def rate(names, x):
    if names[0] == "head":
      return 1.0
    if names[:2] == ["encoder", "final_norm"]:
      return decay ** (1 + skip)
    if names[:2] == ["encoder", "layers"]:
      exponents = num_layers + skip - jnp.arange(num_layers)
      return (decay**exponents).reshape(-1, *(1,) * (jnp.ndim(x) - 1))
    return decay ** (num_layers + 1 + skip)

  return map_named(rate, params)


def scale_each(rates: dict) -> optax.GradientTransformation:
  """Multiplies each update by its rate, a number or a broadcastable array."""
  return optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, rates))
