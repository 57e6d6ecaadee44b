"""The Python of version 0.1's page on extensions, as it stood there, its imports in one place."""

import jax
import jax.numpy as jnp
import numpy as np

from electra_jax.core import masking, networks
from electra_jax.core.encoder import BLOCKS, BlockDef
from electra_jax.core.generators import GENERATORS, GeneratorDef, GeneratorOutput
from electra_jax.core.layers import norm
from electra_jax.core.objectives import OBJECTIVES, ObjectiveDef
from electra_jax.core.terms import detection_terms
from electra_jax.finetune.labels import METRICS, Metric, TextTask
from electra_jax.finetune.tasks import TASKS


def shuffled(spec, params, inputs):
  """Moves the chosen tokens of each sequence one place on, and detects which moved."""
  batch, keys, step = inputs.batch, inputs.keys, inputs.step
  chosen = masking.choose(batch, spec.masking, keys.positions, step)
  number = jnp.maximum(chosen.weights.sum(-1, keepdims=True), 1).astype(jnp.int32)
  source = (jnp.arange(chosen.labels.shape[1]) + 1) % number
  moved = jnp.take_along_axis(chosen.labels, source, axis=1)
  ids, has_moved = masking.corrupt(batch.ids, chosen, moved)
  states = networks.main_states(spec, params, ids, batch, keys.discriminator_dropout)
  scores = networks.token_logits(spec.discriminator, params["discriminator"], "rtd_head", states)
  weight = spec.discriminator_weight.at(step)
  return detection_terms("shuffled", scores, has_moved, batch.padding_mask, weight)


OBJECTIVES["shuffled"] = ObjectiveDef(shuffled, uses_generator=False)


def similar(spec, params, inputs):
  """Samples by the cosine between the discriminator's word embeddings."""
  word = jax.lax.stop_gradient(networks.embeddings(spec, params, "discriminator")["word"])
  word = word / jnp.linalg.norm(word, axis=-1, keepdims=True)
  logits = 10.0 * word[inputs.masked.labels] @ word.T  # [B, K, V]
  return GeneratorOutput(logits, terms={})


GENERATORS["similar"] = GeneratorDef(similar)


def parallel(cfg, x, attend, feed_forward, normalised):
  """Returns [B, L, D] of x [B, L, D]."""
  y = norm(cfg, "norm")(x).astype(cfg.compute.dtype)
  return x + attend(y) + feed_forward(y)


BLOCKS["parallel"] = BlockDef(parallel, residual=True)


def balanced_accuracy(rows, classes):
  """Returns the mean recall of the classes; rows [n, 2] hold label and prediction."""
  labels, right = rows[:, 0], rows[:, 0] == rows[:, 1]
  return float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


METRICS["balanced"] = Metric(balanced_accuracy, ("classification",))
TASKS["docstrings"] = TextTask(
  "docstrings",
  "Docstrings",
  text="text",
  label="label",
  labels=("class", "function"),
  folders=("docstrings",),
  metrics=("balanced", "accuracy"),
)
