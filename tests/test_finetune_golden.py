"""Fine-tuning from files to weights: what is on record, and four updates by hand in NumPy."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from golden import finetuning

from electra_jax.core import layers, networks
from electra_jax.core.batch import Batch
from electra_jax.core.params import named
from electra_jax.finetune import batches, loop
from electra_jax.runtime import parallel

EXPECTED = json.loads((Path(finetuning.__file__).parent / "finetuning.json").read_text())


@pytest.mark.parametrize("task", finetuning.TASKS)
def test_two_epochs_give_the_losses_weights_and_answers_on_record(task):
  # Adam divides small gradients by their size, so that rounding grows with each of six updates.
  assert finetuning.difference(finetuning.run(task), EXPECTED[task]) < 1e-4


def learned(numbers: np.ndarray) -> np.ndarray:
  """What a regression learns of its labels: their standard scores."""
  return (numbers - numbers.mean()) / numbers.std()


def test_a_regression_learns_its_labels_scaled_and_answers_in_their_unit():
  _, data, _ = finetuning.load("regression")
  numbers = np.array([row["number"] for row in finetuning.rows("train")])
  found = [row.target["label"] for row in data.train]
  np.testing.assert_allclose(found, learned(numbers), rtol=1e-6)
  answers = data.info.text.label_type.predictions(data.info.text, np.array(found, np.float64))
  np.testing.assert_allclose(answers, numbers, rtol=1e-6)


def test_four_updates_are_adams_by_hand_at_the_rates_of_their_step_and_layer():
  encoder, data, settings = finetuning.load("regression")
  B, T, W = finetuning.BATCH, 6, 2  # rows, steps, warm-up: 0.34 of the steps
  lr, decay, weight_decay, clip, b1, b2, eps = 1e-2, 0.8, 0.01, 10.0, 0.9, 0.999, 1e-6

  @jax.jit
  def gradient(params, ids, types, mask, labels):
    def loss(params):
      batch = Batch(ids, types, mask, np.arange(B))
      x = networks.encode(encoder.cfg, params, ids, batch, None)[:, 0]
      for name in ("dense", "out_proj"):
        x = x @ params["head"][name]["kernel"] + params["head"][name]["bias"]
        x = layers.gelu(x) if name == "dense" else x
      # B times the mean over the rows: the sum in a full batch, as the original's.
      return B * ((x[:, 0] - labels) ** 2 * mask[:, 0]).sum() / mask[:, 0].sum()

    return jax.value_and_grad(loss)(params)

  def rate_of(name: str, ndim: int):  # Clark et al. 2020, Appendix B
    if name.startswith("encoder/layers"):
      return np.array([decay**2, decay]).reshape(2, *[1] * (ndim - 1))
    return 1.0 if name.startswith("head") else decay**3

  def double(tree) -> dict:
    return {name: np.float64(x) for name, x in named(jax.device_get(tree)).items()}

  state, step = loop.start(encoder.cfg, data.info.head.make(), encoder.weights, settings, T)
  numbers = np.array([row["number"] for row in finetuning.rows("train")])
  labels_of = dict(zip((row.ids.tobytes() for row in data.train), learned(numbers), strict=True))
  memory = {}
  taken = batches.batches(
    data.train, buckets=(24,), batch_size=B, epochs=2.0, seeds=settings.seeds, pad=0
  )
  for t, batch in zip(range(4), taken, strict=False):  # an epoch of three, one of them short
    before = jax.device_get(state.train.params)
    state, packed = step(state, parallel.shard(batch))
    losses = packed.unpack(packed.read())["loss"]
    rate = lr * (1 - t / T) * min(1, t / W)
    for place, seed in enumerate(settings.seeds):
      ids, mask = batch.ids[:, place], batch.padding_mask[:, place]
      labels = [labels_of.get(x[m].tobytes(), 0) for x, m in zip(ids, mask, strict=True)]
      own = jax.tree.map(lambda x, place=place: x[place], before)
      types = batch.token_type_ids[:, place]
      loss, grads = gradient(own, ids, types, mask, np.float32(labels))
      np.testing.assert_allclose(losses[place], loss, rtol=1e-5)
      grads, own = double(grads), double(own)
      new = double(jax.tree.map(lambda x, place=place: x[place], state.train.params))
      norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
      for name, g in grads.items():
        g = g * min(1, clip / norm)
        m, v = memory.get((seed, name), (0, 0))
        m, v = memory[seed, name] = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        update = m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps)
        if not ("norm" in name or name.endswith("bias")):
          update += weight_decay * own[name]
        delta = -rate * rate_of(name, g.ndim) * update
        moved = new[name] - own[name]
        if name.endswith("qkv/bias"):  # a key's bias has no effect: its gradient is rounding
          moved, delta = moved[:, [0, 2]], delta[:, [0, 2]]
        # Weights near 1 have 6e-8 of rounding. A gradient near eps has the rounding of its sums.
        np.testing.assert_allclose(moved, delta, rtol=2e-3, atol=2e-6, err_msg=f"{t} {name}")
