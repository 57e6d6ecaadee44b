"""Learning rates for the speedrun, from networks of two smaller widths on a CPU: an experiment.

  electra-jax experiment benchmarks/speedrun_rates.py:DATA --out=DIR --at-once=2

Question: which rate do configs/speedrun.py:electra and :bert need at width 512, which is too large
to search on a CPU? Muon's updates have the root mean square of AdamW's at any width, so the best
rate should not depend on the width. Two layers of 128 train for 300 steps of 32 x 128 tokens at
1e-3 and its doubles until the loss rises; bert also for 900 steps at the best rate, its neighbours,
and lower rates until the loss rises, because the best rate falls with longer runs; and two layers
of 256 for 300 steps at the best rate and its neighbours. Schedule, optimizer and the decay's share
are the speedrun's. The measure is the main network's held-out loss: mlm_loss for bert, and
replace_mlm_loss + 5 rtd_loss, as in training, for electra. Rule: if 256 prefers the rate of 128 or
a neighbour, width does not matter. The fall of the best rate with three times the steps is
extrapolated to the speedrun's steps as a power law.

DATA has text.txt to pretrain on. results/speedrun_rates.jsonl has rows in an earlier form, with
columns for arm, width, steps and rate.
"""

from pathlib import Path

from electra_jax.experiments.definition import Arm, Experiment

STEPS = 300
# {(arm, width, multiple of STEPS): the rates that the rule asks for}
RATES = {
  ("electra", 128, 1): (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
  ("electra", 256, 1): (8e-3, 1.6e-2, 3.2e-2),
  ("bert", 128, 1): (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
  ("bert", 128, 3): (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
  ("bert", 256, 1): (1.6e-2, 3.2e-2),
}
SMALLER = {
  "model.num_layers": 2,
  "model.unroll": 2,
  "train.batch_size": 32,
  "train.accumulation": 4,
  "train.minutes": None,
  "data.vocab_size": 8192,
  "data.vocab_train_mb": 20.0,
  "data.holdout_frac": 0.01,
  "eval.every_steps": 0,
  "eval.batch_size": 32,
  "eval.max_examples": 1024,
}


# Two layers have no quarter, which the generator would have.
OWN = {"electra": {"generator.depth_multiplier": 1 / 2}, "bert": {}}


def shaped(width: int) -> dict:
  """Returns the changes to the speedrun's configuration for a network of a width."""
  return {
    "model.hidden_size": width,
    "model.embedding_size": width,
    "model.num_heads": width // 64,
    "model.ffn_size": width * 3 // 2,
  }


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  return Experiment(
    arms={
      f"{arm} {width} {times * STEPS} {rate:g}": Arm(
        f"configs/speedrun.py:{arm}", shaped(width) | OWN[arm], (rate,), times=float(times)
      )
      for (arm, width, times), rates in RATES.items()
      for rate in rates
    },
    budgets=(STEPS,),
    unit="steps",
    seeds=1,
    fields=SMALLER | {"data.dir": str(data / "shards"), "data.sources": f"text:{data}/text.txt"},
    heldout=("mlm_loss", "replace_mlm_loss", "rtd_loss", "rtd_auc", "unigram_auc"),
  )
