"""A short run of modern.py:17m on little text, to test a machine or a change against its band.

Command:  python -m electra_jax.data.build --config=configs/modern_short.py
          export JAX_NUM_CPU_DEVICES=2
          python -m electra_jax.train --config=configs/modern_short.py --workdir=runs/modern_short
          --config.health.reference=configs/bands/modern_short.json
Hardware: two CPU cores, eight minutes; on a GPU add --config.train.accumulation=1.
Expected: held-out masked-LM loss 5.15 to 5.43 nats (unigram entropy 6.11), discriminator AUC 0.546
          to 0.548, over four seeds.

The network, generator, objective and optimizer are those of modern.py:17m; sequences, batch,
warm-up and decay are shorter, the rate is lower and the text is the quickstart's. In 300 steps the
generator learns to use context, the discriminator hardly.
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is not used."""
  c = load("modern.py", "17m")
  c.data.dir = "runs/modern_short/data"
  c.data.vocab_size = 8192
  c.data.seq_length = 128
  c.data.holdout_frac = 0.02
  c.optimizer.learning_rate = 5e-4  # from 1e-3 on some seeds are unstable at this batch size
  c.optimizer.warmup_steps = 40
  c.optimizer.decay_steps = 30
  c.train.batch_size = 32
  c.train.accumulation = 4
  c.train.steps = 300
  c.eval.every_steps = 100
  c.eval.max_examples = 512
  c.checkpoint.every_steps = 100
  c.log.every_steps = 25
  return c
