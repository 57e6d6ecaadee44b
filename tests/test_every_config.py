"""Every configuration trains with a small network."""

from pathlib import Path

import pytest
from conftest import make_tiny_config
from golden import losses
from ml_collections import ConfigDict
from test_train import lines

from electra_jax.config import files
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.pretrain import train
from electra_jax.pretrain.loop import batches_from
from electra_jax.pretrain.run import prepare

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(p.name for p in (ROOT / "configs").glob("*.py"))


def shrunk(name: str, tiny_shards) -> ConfigDict:
  """Returns a configuration with a small network and two steps on the tiny shards."""
  file, _, arg = name.partition(":")
  config, small = files.load(file, arg or None), make_tiny_config(tiny_shards)
  embeds_apart = config.model.embedding_size != config.model.hidden_size
  for group in ("data", "eval", "checkpoint", "log"):
    config[group] = small[group]
  config.model.update(
    hidden_size=96,
    num_layers=2,
    ffn_size=192,
    embedding_size=24 if embeds_apart else 96,
    max_positions=16,
    unroll=min(config.model.unroll, 2),
    window=8,
  )
  config.optimizer.decay_steps = 0
  config.generator.depth_multiplier = max(config.generator.depth_multiplier, 0.5)
  config.train.update(batch_size=8, steps=2, accumulation=1)
  if "contrast_group" in OBJECTIVES[config.objective.name].own_fields:
    config.objective.contrast_group = 1  # a device has one row
  return config


# test_golden_losses trains and evaluates the others.
NOT_GOLDEN = sorted({*CONFIGS} - {file.partition(":")[0] for file, _ in losses.CASES.values()})


@pytest.mark.long
@pytest.mark.parametrize(
  "name", [*NOT_GOLDEN, "electric.py:modern:17m", "electra_mlm.py:modern:17m"]
)
def test_training_and_evaluation_of_every_other_config_can_be_traced(name, tiny_shards, tmp_path):
  run = prepare(shrunk(name, tiny_shards), tmp_path, verify=False)
  batch, state = next(batches_from(run, 0, ())), run.fns.shapes
  run.fns.train_step.lower(state, batch)
  run.fns.eval_step.lower(state.params, batch)


@pytest.mark.long
@pytest.mark.parametrize("name", ["coco_lm.py", "electric.py", "modern.py"])
def test_a_config_trains_two_steps_when_shrunk(name, tiny_shards, tmp_path, capsys):
  assert train.train(shrunk(name, tiny_shards), tmp_path).step == 2
  assert ("contrast_loss is 0" in capsys.readouterr().out) == (name == "coco_lm.py")
  assert [x["step"] for x in lines(tmp_path)] == [0, 2, 2]
