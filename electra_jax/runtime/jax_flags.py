"""JAX's flags that change what is computed: pinned, recorded with a run, or an error."""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from electra_jax.core.params import PRNG

# {flag: value}: random numbers depend on these.
PINNED = {
  "jax_default_prng_impl": PRNG,
  "jax_threefry_partitionable": True,
  "jax_random_seed_offset": 0,
  "jax_high_dynamic_range_gumbel": False,
}
_GUARDS = "", "_host_to_device", "_device_to_host", "_device_to_device"
# {flag: the values with which this package works, the default first}
NEEDED = {
  "jax_enable_x64": (False,),
  "jax_disable_jit": (False,),
  "jax_no_tracing": (False,),
  "jax_no_execution": (False,),
  "jax_numpy_dtype_promotion": ("standard",),
  "jax_numpy_rank_promotion": ("allow", "warn"),
} | {f"jax_transfer_guard{kind}": ("allow", None, "log", "log_explicit") for kind in _GUARDS}
# They change the rounding of a run, which therefore keeps them. Versions of JAX lack some.
RECORDED = (
  "jax_default_matmul_precision",
  "jax_softmax_custom_jvp",
  "jax_allow_f16_reductions",
  "jax_accurate_erf_inv",
  "jax_use_hlo_logistic_lowering",
  "jax_disable_most_optimizations",
  "jax_optimization_level",
)
VARIABLES = "NVIDIA_TF32_OVERRIDE", "LIBTPU_INIT_ARGS", "XLA_FLAGS"
# Options of XLA_FLAGS that leave numbers alone.
_HARMLESS = re.compile("device_count|dump|timeout|log")


class FlagError(ValueError):
  """A flag of JAX has a value with which this package cannot compute."""


def check() -> None:
  """Raises FlagError if a flag has a value outside NEEDED."""
  for flag, values in NEEDED.items():
    if (value := getattr(jax.config, flag, values[0])) not in values:
      raise FlagError(
        f"cannot compute with {flag.upper()}={value}: unset the variable, or call"
        f" jax.config.update({flag!r}, {values[0]!r})"
      )


@contextlib.contextmanager
def pinned() -> Iterator[None]:
  """Sets the flags of PINNED for the block or function; a warning names those that differ.

  Raises FlagError as `check`.
  """
  check()
  before = {flag: getattr(jax.config, flag) for flag in PINNED if hasattr(jax.config, flag)}
  for flag, value in before.items():
    if value != PINNED[flag]:
      text = f"{flag.upper()}={value} has no effect here: training uses {PINNED[flag]}"
      warnings.warn(text, stacklevel=1)
      jax.config.update(flag, PINNED[flag])
  try:
    yield
  finally:
    for flag, value in before.items():
      jax.config.update(flag, value)


def record() -> dict[str, Any]:
  """Returns {flag or variable: value}, for JSON; None for what this version of JAX lacks."""
  values = {flag: getattr(jax.config, flag, None) for flag in (*PINNED, *RECORDED)}
  values |= {name: os.environ.get(name, "") for name in VARIABLES}
  words = values["XLA_FLAGS"].split()
  values["XLA_FLAGS"] = " ".join(sorted(word for word in words if not _HARMLESS.search(word)))
  return {
    name.removeprefix("jax_"): str(value) if isinstance(value, str) else value
    for name, value in values.items()
  }
