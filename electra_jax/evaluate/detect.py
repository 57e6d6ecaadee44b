"""Detection of replacements that no generator wrote: tokens drawn by their frequency."""

from collections.abc import Sequence

import numpy as np

from electra_jax.core import objectives, step
from electra_jax.core.masking import Masking
from electra_jax.core.networks import PretrainSpec, TokenCounts
from electra_jax.data import pretrain_batches
from electra_jax.interop.sources import Network
from electra_jax.monitor import metrics
from electra_jax.runtime import parallel


def auc(
  network: Network,
  data: pretrain_batches.Shards,
  frequencies: Sequence[float] | np.ndarray,
  batch_size: int,
  examples: int,
) -> float:
  """Returns the AUC of detecting replacements of 15 % of the tokens, drawn by frequency.

  It is `unigram_auc` of a run's evaluations: the same replacements for every network on the data.

  Args:
    network: has an "rtd_head".
    data: held-out shards.
    frequencies: of each token in the training text, [V].
    examples: how many of them at most, evenly spaced.

  Raises:
    ValueError: the devices do not divide the batch.
  """
  parallel.check_divisible(batch_size, 1)
  vocab = data.vocab
  rates = Masking(0.15, 1.0, 1.0, mask_id=vocab.mask, special_ids=tuple(vocab.special_ids))
  counts = TokenCounts(frequencies)
  spec = PretrainSpec(network.cfg, network.cfg, rates, tying="none", frequencies=counts)
  weights = dict(network.weights)
  params = {"embeddings": weights.pop("embeddings"), "discriminator": weights}

  def terms(params, batch, keys, step):
    return objectives.detect_unigrams(spec, params, batch)

  evaluate = step.make_eval_step(terms, seed=0)
  batches = pretrain_batches.eval_batches(data, batch_size=batch_size, max_examples=examples)
  placed = parallel.replicate(params)
  with parallel.full_precision():
    values = metrics.evaluate(
      parallel.map_eval_step(evaluate), placed, parallel.prefetch(batches), 0
    )
  return values["unigram_auc"]
