"""What `evidence.py` compares: objectives, phases of pretraining, tasks."""

from typing import NamedTuple

# Objectives and their GLUE dev averages at base size (Clark et al. 2020, Table 5).
PAPER = {
  "electra": 85.0,
  "all_tokens_mlm": 84.3,
  "replace_mlm": 82.4,
  "electra_15": 82.4,
  "bert": 82.2,
}
MINUTES = 55.0  # that the steps of PHASES are for


class Phase(NamedTuple):
  """A part of a pretraining: `steps` are the reference's, `warmup_steps` everybody's."""

  seq_length: int
  examples: str  # as config.data.examples
  batch_size: int
  steps: int
  learning_rate: float
  warmup_steps: int


PHASES = (
  Phase(8, "packed", 128, 4000, 1e-3, 100),
  Phase(32, "segments", 32, 8000, 1e-3, 100),
  Phase(64, "segments", 16, 4000, 1e-3, 100),
)
# The paper's blocks, where configs/quickstart.py has ModernBERT's.
PAPER_BLOCKS = {
  "model.ffn_size": 512,
  "model.block": "post_norm",
  "model.norm": "layer_norm",
  "model.layer_norm_eps": 1e-12,
  "model.feed_forward": "gelu",
  "model.positions": "learned",
  "model.biases": True,
  "model.token_types": True,
  "model.first_norm": True,
  "model.head_norm": False,
  "model.init_stddev": 0.1,
}
# What differs from configs/quickstart.py, in every pretraining and the build.
RECIPE = PAPER_BLOCKS | {
  "model.num_layers": 2,
  "model.unroll": 2,
  "generator.width_multiplier": 1 / 4,
  "objective.discriminator_weight": 50.0,
  "objective.temperature_schedule": "",
  "optimizer.decay_power": 0.5,
  "model.max_positions": 128,
  "data.vocab_size": 2048,
  "data.vocab_train_mb": 20.0,
  "data.holdout_frac": 0.01,
  "log.tensorboard": False,
}


class Finetuning(NamedTuple):
  """One command of the fine-tuning program: what it is given, and the tasks it measures."""

  config: str
  tasks: tuple[str, ...]
  overrides: dict


FINETUNINGS = {
  "sst2": Finetuning(
    "glue.py:sst2", ("sst2",), {"train.epochs": 1.0, "data.train_examples": 20000}
  ),
  "cola": Finetuning("glue.py:cola", ("cola",), {"train.epochs": 1.0}),
  "pairs": Finetuning("glue.py:mrpc,stsb", ("mrpc", "stsb"), {"train.epochs": 1.0}),
  "rte": Finetuning("glue.py:rte", ("rte",), {"train.epochs": 3.0}),
  "chunk": Finetuning("tagging.py:chunk", ("chunk",), {"train.epochs": 2.0}),
}
# Of every task. Longer texts are cut at the longest sequence of pretraining. The paper's rate is
# for thousands of steps of a wider network.
FINETUNE_RECIPE = {
  "data.max_length": 64,
  "data.buckets": 2,
  "optimizer.learning_rate": 5e-4,
  "keep": "none",
}


class Setting(NamedTuple):
  """What is done: all of it, or a smoke test."""

  nets: str  # the configuration with the sizes
  objectives: tuple[str, ...]
  phases: tuple[Phase, ...]
  recipe: dict  # what differs from it
  finetunings: dict[str, Finetuning]
  finetune_recipe: dict
  seeds: int


def quickstart_setting(minutes: float, objectives: tuple[str, ...]) -> Setting:
  """Returns the comparison for two cores, its steps in proportion to the minutes."""
  phases = tuple(p._replace(steps=max(1, round(p.steps * minutes / MINUTES))) for p in PHASES)
  return Setting("quickstart", objectives, phases, RECIPE, FINETUNINGS, FINETUNE_RECIPE, seeds=3)


def small_setting(steps: int, objectives: tuple[str, ...]) -> Setting:
  """Returns the comparison for an accelerator: ELECTRA-Small, fine-tuned as in the paper."""
  phases = (Phase(128, "segments", 128, steps, 5e-4, max(1, steps // 100)),)
  finetunings = {name: f._replace(overrides={}) for name, f in FINETUNINGS.items()}
  recipe = {"model.max_positions": 128, "log.tensorboard": False}
  return Setting("small", objectives, phases, recipe, finetunings, {"keep": "none"}, seeds=5)


def smoke_setting(setting: Setting) -> Setting:
  """Returns a few steps of two objectives and two tasks, to see that everything runs."""
  phases = tuple(p._replace(steps=20, batch_size=16, warmup_steps=2) for p in setting.phases)
  finetunings = {
    "rte": Finetuning("glue.py:rte", ("rte",), {"train.epochs": 1.0}),
    "chunk": Finetuning("tagging.py:chunk", ("chunk",), {"train.epochs": 1.0}),
  }
  recipe = setting.recipe | {"data.vocab_train_mb": 2.0, "eval.max_examples": 64}
  finetune_recipe = setting.finetune_recipe | {"data.train_examples": 128, "data.buckets": 1}
  return Setting(
    setting.nets, ("electra", "bert"), phases, recipe, finetunings, finetune_recipe, seeds=2
  )
