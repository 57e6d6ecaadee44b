"""Does this machine's accelerator compute the same as its CPU in float32?

  python benchmarks/numerics.py [--smoke] [--json OUT]

gradient      loss and gradient of a training step, dropout included, compared with the same step on
              the CPU in float32: in float32 at the highest and the default precision of products,
              and in bfloat16
attention     XLA's and cuDNN's, with gradients, on whole, padded and packed rows, compared with
              XLA's on the CPU in float32 from the same bfloat16 numbers
packed        states of the documents of a packed row compared with each document alone
accumulation  the gradient in four microbatches compared with the gradient of the whole batch

An error is |found - expected| / |expected| over all numbers. Exits with 1 if an error is above its
tolerance. Needs no TensorFlow and no data. On a CPU it compares the CPU with itself.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax
from train_step import VOCAB

from electra_jax.config import files, specs
from electra_jax.core import attention, networks, objectives, step
from electra_jax.core.batch import Batch
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.runtime import parallel


class Precision(NamedTuple):
  """A dtype of activations, the precision of products, and their tolerated errors."""

  dtype: str
  products: str | None  # as jax.default_matmul_precision
  loss: float
  gradient: float


# Sources of error: each number on the way is rounded by 6e-8 (float32), its factors by 5e-4 (TF32,
# the GPUs' default for float32) or 2e-3 (bfloat16). Twelve layers round some hundred times in a
# row; if at random, that is ten times as much: half of it shows in a CPU's bfloat16 (1.1e-2), twice
# it is tolerated (float32: more, for sums of 100,000 terms in another order). A loss is a mean.
PRECISIONS = {
  "float32, highest": Precision("float32", "highest", 1e-5, 1e-4),
  "float32": Precision("float32", None, 5e-4, 1e-2),
  "bfloat16": Precision("bfloat16", None, 2e-3, 4e-2),
}
# Configuration, fields, tokens of a row, precisions. Samples differ where rounding moves a
# generator's probability over a random number, so rounded ones are compared without samples of it.
FIXED_NOISE = {"generator.kind": "uniform", "generator.tie": "none"}
CASES = {
  "masked LM, the paper's blocks": ("bert.py:small", {}, 128, tuple(PRECISIONS)),
  "detection, ModernBERT's blocks": ("modern.py:17m", FIXED_NOISE, 256, tuple(PRECISIONS)),
  "ELECTRA": ("small.py", {}, 128, ("float32, highest",)),
}
ROWS = 16
SMOKE = {
  "model.num_layers": 2,
  "model.hidden_size": 32,
  "model.num_heads": 1,
  "model.ffn_size": 32,
  "model.embedding_size": 32,
  "model.window": 8,
}
SMOKE_LENGTH, SMOKE_ROWS = 32, 4
DOCUMENTS = (100, 37, 250, 8, 60)  # tokens of the documents of a packed row
SMOKE_DOCUMENTS = (9, 15)


def check(what: str, tolerance: float, error: Callable[..., float], *args) -> dict:
  """Compares with error(*args); reports an exception, so that other comparisons go on."""
  found, reason = None, ""
  try:
    found = error(*args)
    if not np.isfinite(found):
      found, reason = None, f"the error is {found}"
  except Exception as raised:  # whatever a compiler or a library raises
    reason = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
  holds = found is not None and found <= tolerance
  return {"what": what, "error": found, "tolerance": tolerance, "reason": reason, "holds": holds}


def distance(found, expected) -> float:
  """Returns |found - expected| / |expected| over all numbers of two trees."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  parts = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
  apart = sum(np.square(a - b).sum() for a, b in parts)
  return float(np.sqrt(apart / sum(np.square(b).sum() for _, b in parts)))


def ragged_batch(rows: int, length: int) -> Batch:
  """Returns rows of random tokens in two segments, filled by half or more."""
  rng = np.random.default_rng(0)
  mask = np.arange(length) < rng.integers(length // 2, length + 1, rows)[:, None]
  ids = np.where(mask, rng.integers(1000, VOCAB.size, mask.shape), 0).astype(np.int32)
  segments = ((np.arange(length) >= length // 3) & mask).astype(np.int32)
  return Batch(ids, segments, mask, np.arange(rows, dtype=np.int32))


class Case:
  """A network and a batch whose gradient is computed in several ways.

  Args:
    name: a key of CASES.
  """

  def __init__(self, name: str, smoke: bool):
    file, fields, length, self.precisions = CASES[name]
    self.name = name
    self.config = files.load_named(file)
    self.config.update_from_flattened_dict(fields | (SMOKE if smoke else {}))
    self.batch = ragged_batch(SMOKE_ROWS if smoke else ROWS, SMOKE_LENGTH if smoke else length)
    self.config.model.attention = "xla"
    with jax.default_device(jax.devices("cpu")[0]):
      spec = specs.make_spec(self.config, VOCAB)
      self.params = jax.device_get(jax.jit(objectives.init_params, static_argnums=0)(
        spec, jax.random.key(0)
      ))  # fmt: skip

  def gradient(
    self, device: jax.Device, precision: Precision, accumulation: int = 1
  ) -> tuple[float, dict]:
    """Returns the loss and the gradient of a training step on a device."""
    config = self.config.copy_and_resolve_references()
    config.model.dtype = precision.dtype
    # The state of this optimizer is the gradient.
    tx = optax.GradientTransformation(
      lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params: (grads,) * 2
    )
    function = step.make_train_step(
      objectives.make(specs.make_spec(config, VOCAB)),
      tx,
      lambda number: 0.0,
      seed=0,
      accumulation=accumulation,
    )
    zeros = jax.tree.map(np.zeros_like, self.params)
    state = step.TrainState(np.zeros([], np.int32), self.params, zeros)
    batch = jax.tree.map(lambda x: x[None], self.batch)
    with jax.default_matmul_precision(precision.products):
      state, packed = parallel.map_train_step(function, devices=(device,))(state, batch)
    return float(packed.unpack(packed.read())["loss"]), jax.device_get(state.opt_state)


def check_gradients(device: jax.Device, smoke: bool) -> list[dict]:
  """Compares steps on the device with the CPU's."""
  found = []
  for case in (Case(name, smoke) for name in CASES):
    expected = case.gradient(jax.devices("cpu")[0], PRECISIONS["float32, highest"])
    for name in case.precisions:
      precision, title = PRECISIONS[name], f"{case.name}, {name}"
      computed = functools.cache(functools.partial(case.gradient, device, precision))
      for part, tolerance in (("loss", precision.loss), ("gradient", precision.gradient)):

        def error(part=int(part == "gradient"), computed=computed, expected=expected) -> float:
          return distance(computed()[part], expected[part])

        found.append(check(f"{part}: {title}", tolerance, error))
  return found


def check_accumulation(device: jax.Device, smoke: bool) -> list[dict]:
  """Compares microbatches with the whole batch."""
  name = next(iter(CASES))
  case, precision = Case(name, smoke), PRECISIONS["float32, highest"]

  def error() -> float:
    whole, parts = (case.gradient(device, precision, n)[1] for n in (1, 4))
    return distance(parts, whole)

  # The same numbers in float32, added up in another order.
  return [check(f"accumulation: {name}, four microbatches", 1e-5, error)]


def check_attention(device: jax.Device, smoke: bool) -> tuple[list[dict], list[str]]:
  """Compares implementations of attention; also returns what could not be compared."""
  B, L, H, d = (2, 32, 2, 8) if smoke else (4, 512, 12, 64)
  cfg = TransformerConfig(1000, H * d, H * d, 1, H, 4 * H * d, L)
  rng = np.random.default_rng(0)
  # Numbers of bfloat16, on the host: they go to either device.
  q, k, v, weights = rng.normal(size=(4, B, L, H, d)).astype(jnp.bfloat16)
  padded = np.arange(L) < rng.integers(L // 4, L + 1, B)[:, None]
  documents = np.where(padded, 1 + np.arange(L) // (L // 4), 0).astype(np.int32)
  rows = {
    "whole rows": (np.ones((B, L), bool), None),
    "padded rows": (padded, None),
    "packed rows": (padded, documents),
  }

  def outputs(name: str, mask, ids, device, dtype):
    def total(q, k, v):
      inputs = attention.Inputs(q, k, v, mask, ids, None)
      out = attention.ATTENTION[name].apply(cfg, inputs, False)
      out = jnp.where(mask[..., None, None], out, 0)
      return (out.astype(jnp.float32) * weights.astype(np.float32)).sum(), out

    qkv = jax.device_put([x.astype(dtype) for x in (q, k, v)], device)
    grads, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*qkv)
    return jax.device_get([x.astype(jnp.float32) for x in (out, *grads)])

  def error(name: str, mask, ids) -> float:
    with jax.default_matmul_precision("highest"):
      expected = outputs("xla", mask, ids, jax.devices("cpu")[0], jnp.float32)
    return distance(outputs(name, mask, ids, device, jnp.bfloat16), expected)

  found, could_not = [], []
  for name in ("xla", "cudnn"):
    if (needed := attention.ATTENTION[name].platform) not in (None, device.platform):
      could_not.append(f"attention by {name}: needs a {needed}")
      continue
    for title, (mask, ids) in rows.items():
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Probabilities, outputs and gradients are rounded to bfloat16, by 2e-3 each.
        result = check(f"attention: {name}, {title}", 1e-2, error, name, mask, ids)
      if any("Hopper" in str(warning.message) for warning in caught):
        could_not.append(f"attention by {name}, {title}: needs Hopper")
      else:
        found.append(result)
  return found, could_not


def check_packed(device: jax.Device, smoke: bool) -> list[dict]:
  """Compares the documents of a packed row with each alone."""
  config = files.load("modern.py", "17m")
  config.update_from_flattened_dict(SMOKE if smoke else {})
  sizes = SMOKE_DOCUMENTS if smoke else DOCUMENTS
  L, rng = SMOKE_LENGTH if smoke else 512, np.random.default_rng(0)
  documents = np.zeros((1, L), np.int32)
  documents[0, : sum(sizes)] = np.repeat(np.arange(len(sizes)) + 1, sizes)
  ids = np.where(documents, rng.integers(1000, VOCAB.size, (1, L)), 0).astype(np.int32)
  with jax.default_device(jax.devices("cpu")[0]):
    config.model.attention = "xla"
    cfg = specs.make_spec(config, VOCAB).discriminator
    tables = networks.init_embeddings(cfg, jax.random.key(0))
    weights = networks.init_encoder(cfg, jax.random.key(1))
    network = jax.device_get({"embeddings": tables, "encoder": weights})

  def error(name: str, dtype: str) -> float:
    own_way = cfg.computed(dtype=dtype, attention=name)

    @jax.jit
    def encode(network, ids, documents):
      rows = jnp.arange(len(ids), dtype=jnp.int32)
      batch = Batch(ids, jnp.zeros_like(ids), documents > 0, rows, documents)
      return networks.encode(own_way, network, ids, batch, None)

    on_device = jax.device_put(network, device)
    with jax.default_matmul_precision("highest"):
      together = np.asarray(encode(on_device, ids, documents), np.float32)[0]
      alone = np.zeros_like(together)
      for number, size in enumerate(sizes, 1):
        own = documents[0] == number
        row, mask = np.zeros((2, 1, L), np.int32)
        row[0, :size], mask[0, :size] = ids[0, own], 1
        alone[own] = np.asarray(encode(on_device, row, mask), np.float32)[0, :size]
    used = documents[0] > 0
    return distance(together[used], alone[used])

  # Sums of other lengths and orders; in bfloat16 rounded at each layer.
  kinds = (("xla", "float32", 1e-5), ("xla", "bfloat16", 3e-2), ("cudnn", "bfloat16", 3e-2))
  return [
    check(f"packed rows: {name}, {dtype}", tolerance, error, name, dtype)
    for name, dtype, tolerance in kinds
    if attention.ATTENTION[name].platform in (None, device.platform)  # else in the row of attention
  ]


def main(smoke: bool = False) -> dict:
  """
  --smoke  tiny networks
  """
  device = jax.devices()[0]
  try:
    jax.devices("cpu")
  except RuntimeError:
    raise SystemExit("error: JAX has no CPU besides the accelerator: unset JAX_PLATFORMS") from None
  checks = check_gradients(device, smoke)
  found, could_not = check_attention(device, smoke)
  checks += found + check_packed(device, smoke) + check_accumulation(device, smoke)
  return {
    "device": device.device_kind,
    "checks": checks,
    "wrong": [f"{c['what']}: {c['reason'] or c['error']}" for c in checks if not c["holds"]],
    "could_not": could_not,
  }


if __name__ == "__main__":
  machine.start(main)
