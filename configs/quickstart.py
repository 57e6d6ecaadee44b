"""A small ELECTRA on the English that every Python installation carries, in minutes on two cores.

Command:  electra-jax quickstart, in a clone make quickstart; part by part:
          electra-jax build --config=configs/quickstart.py
          export JAX_NUM_CPU_DEVICES=2
          electra-jax train --config=configs/quickstart.py --workdir=runs/quickstart
          electra-jax show --model=runs/quickstart
          electra-jax report runs/quickstart --out=runs/quickstart/report.html
Hardware: two CPU cores, three to six minutes of training.
Expected: four seeds ended at a held-out masked-LM loss of 3.15 to 3.22 nats, the unigram entropy
          being 6.10, and at a discriminator AUC of 0.740 to 0.755.

Four of ModernBERT's blocks, by Muon (LOG.md).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is not used."""
  c = load("base.py", arg)
  c.model.hidden_size = 128
  c.model.num_layers = 4
  c.model.num_heads = 4
  c.model.ffn_size = 384
  c.model.embedding_size = 128
  c.model.max_positions = 64
  c.model.block = "pre_norm"  # ModernBERT's blocks, as in configs/modern.py
  c.model.norm = "layer_norm_no_bias"
  c.model.layer_norm_eps = 1e-5
  c.model.feed_forward = "geglu"
  c.model.positions = "rope"
  c.model.rope_theta = 1000.0  # fewer positions, faster turns
  c.model.local_rope_theta = 1000.0
  c.model.global_every = 3
  c.model.window = 16
  c.model.biases = False
  c.model.token_types = False
  c.model.first_norm = False
  c.model.head_norm = True
  c.model.dropout = 0.0  # less than one epoch: nothing to overfit
  c.model.attention_dropout = 0.0
  c.model.init_stddev = 0.05  # 0.02 at the paper's widths: about 0.5 to 1 / sqrt(width)
  c.model.unroll = 4
  c.generator.width_multiplier = 1.0  # the embeddings' width, so that transformers can load it
  c.generator.depth_multiplier = 0.5
  c.objective.mask_prob = 0.25  # more to learn from in each step
  c.objective.discriminator_weight = 5.0  # 50 pulls the shared embeddings away from the words here
  # Wilder samples at first: a discriminator that meets a good generator too early stays at chance
  c.objective.temperature_schedule = "0%=2,40%=1"
  c.data.dir = "runs/quickstart/data"
  c.data.vocab_size = 2048
  c.data.seq_length = 64
  c.data.holdout_frac = 0.02
  c.optimizer.name = "muon"  # with the windows 0.6 nats ahead of AdamW
  c.optimizer.schedule = "joined"
  c.optimizer.b2 = 0.98
  c.optimizer.separate_optimizers = True
  c.optimizer.learning_rate = 3.2e-3  # of the discriminator; AdamW: 1.2e-3
  c.optimizer.generator_learning_rate = 3.2e-3  # AdamW: 2e-3
  c.optimizer.warmup_steps = 100
  c.health.after_step = 1000
  c.train.batch_size = 16
  c.train.steps = 2000
  c.eval.every_steps = 500
  c.eval.max_examples = 1024
  c.checkpoint.every_steps = 500
  c.log.every_steps = 100
  return c
