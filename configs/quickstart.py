"""A small ELECTRA on the text in Python's standard library, in minutes on two cores.

Command:  electra-jax quickstart, in a clone make quickstart; part by part:
          electra-jax build --config=configs/quickstart.py
          export JAX_NUM_CPU_DEVICES=2
          electra-jax train --config=configs/quickstart.py --workdir=runs/quickstart
          electra-jax show --model=runs/quickstart
          electra-jax report runs/quickstart --out=runs/quickstart/report.html
Hardware: two CPU cores, three to six minutes of training.
Expected: held-out masked-LM loss 3.15 to 3.22 nats (unigram entropy 6.10), discriminator AUC 0.740
          to 0.755, over four seeds.

Four ModernBERT blocks, trained with Muon (LOG.md).
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
  c.model.rope_theta = 1000.0  # faster rotation for few positions
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
  c.generator.width_multiplier = 1.0  # the width of the embeddings: transformers can load it
  c.generator.depth_multiplier = 0.5
  c.objective.mask_prob = 0.25  # more to learn from in each step
  c.objective.discriminator_weight = 5.0  # at 50 detection dominates the shared embeddings
  # Higher temperature at first: a discriminator does not start to learn against a good generator
  c.objective.temperature_schedule = "0%=2,40%=1"
  c.data.dir = "runs/quickstart/data"
  c.data.vocab_size = 2048
  c.data.seq_length = 64
  c.data.holdout_frac = 0.02
  c.optimizer.name = "muon"  # 0.6 nats better than AdamW, with windows
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
