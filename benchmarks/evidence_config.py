"""The contestants of benchmarks/evidence.py: the quickstart with 8,192 vocabulary entries.

Command:  python -m electra_jax.train --config=benchmarks/evidence_config.py:ARM --workdir=DIR
          --config.data.dir=SHARDS
Hardware: two CPU cores.
Expected: docs/evidence.md.
"""

from ml_collections import ConfigDict

from electra_jax.config import load

# One optimizer, samples at temperature 1, and for ELECTRA the paper's weight. The others have the
# quickstart's curriculum and two optimizers, and a discriminator weight of 5.
AS_PUBLISHED = {
  "bert": {},
  "electra": {"objective.discriminator_weight": 50.0},
  "electra_15": {"objective.discriminator_weight": 50.0},
  "replace_mlm": {},
  "all_tokens_mlm": {},
  "electric": {},
  "electra_tt": {},  # ELECTRA's loss, and Electric's generator and weight
}
TUNED = ("electra", "electra_mlm", "metro", "coco_lm")
# Arms that start from another arm's run of half the FLOPs: {arm: the other}. The first is a control
# with the same objective and a second schedule.
STARTS = {f"{name}-from-bert": "bert" for name in ("bert", "electra", "electra_mlm")}
# Tuned arms with Electric's generator: {arm: the discriminator's weight}.
TOWERS = {"electra_mlm-tt": 5.0, "electra_mlm-tt-w1": 1.0}
ARMS = (*AS_PUBLISHED, *(f"{name}-tuned" for name in TUNED), *STARTS, *TOWERS)


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is one of ARMS."""
  if arg not in ARMS:
    raise ValueError(f"{arg!r} is not one of {', '.join(ARMS)}")
  objective = arg.partition("-")[0]
  c = load(f"{objective}.py", "quickstart")
  if c.generator.width_multiplier == 1.0:  # the quickstart's, which was narrow for these rows
    c.generator.width_multiplier, c.generator.depth_multiplier = 5 / 16, 1.0
  if arg in AS_PUBLISHED:
    c.objective.temperature_schedule = ""
    c.optimizer.separate_optimizers = False
    c.optimizer.generator_learning_rate = None
    c.update_from_flattened_dict(AS_PUBLISHED[objective])
  if arg in TOWERS:
    c.generator = load("electric.py", "quickstart").generator
    c.objective.discriminator_weight = TOWERS[arg]
  c.data.vocab_size = 8192
  c.data.holdout_frac = 0.01
  c.data.vocab_train_mb = 20.0
  c.eval.every_steps = 0
  c.eval.max_examples = 2048
  c.log.trackers = ""
  return c
