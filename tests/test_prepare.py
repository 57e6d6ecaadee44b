"""What is worked out before a run starts: baselines, evaluation batches, what is checked."""

import itertools

import jax
import numpy as np
import pytest

from electra_jax.data import pretrain_batches
from electra_jax.monitor.baselines import Baselines
from electra_jax.pretrain.run import prepare


def test_the_unigram_entropy_is_that_of_ordinary_tokens(tiny_shards):
  heldout = pretrain_batches.Shards.open(tiny_shards, "heldout")
  batches = pretrain_batches.eval_batches(heldout, batch_size=8, max_examples=10_000)
  tokens = np.concatenate([b.ids[b.padding_mask] for b in itertools.islice(batches, 99)])
  tokens = tokens[~np.isin(tokens, heldout.vocab.special_ids)]
  _, counts = np.unique(tokens, return_counts=True)
  p = counts / counts.sum()
  found = Baselines.of(heldout.frequencies, group=8)
  assert found.entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
  assert found.most_frequent == pytest.approx(p.max(), rel=1e-12)


@pytest.mark.parametrize("name", ["electra", "coco_lm"])
def test_an_evaluation_of_few_examples_has_whole_groups_on_each_device(name, tiny_config, tmp_path):
  tiny_config.update_from_flattened_dict({"objective.name": name, "eval.batch_size": 64})
  devices, group = jax.device_count(), 8 if name == "coco_lm" else 1
  found = prepare(tiny_config, tmp_path, False).eval_batch_size
  assert found % (devices * group) == 0
  assert 20 <= found < 20 + devices * group  # eval.max_examples is 20


def test_what_a_schedule_explains_is_not_checked_for_a_collapse(tiny_config, tmp_path):
  o = tiny_config.objective
  o.discriminator_weight_schedule, o.temperature_schedule = "4=0,4=50", "6=1,12=0.5"
  run = prepare(tiny_config, tmp_path, False)
  o.discriminator_weight_schedule = o.temperature_schedule = ""
  o.discriminator_weight, o.temperature = 0.0, 0.1
  assert prepare(tiny_config, tmp_path, False).suspended_checks(9) == ()  # constants are checked
  suspended = [run.suspended_checks(step) for step in (3, 6, 9)]
  assert suspended == [("auc", "recall"), (), ("sample_entropy",)]
