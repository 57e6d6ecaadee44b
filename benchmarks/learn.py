"""Does every objective learn? An experiment of 200 steps at quickstart size, one seed.

  electra-jax experiment benchmarks/learn.py:DATA --out=DIR

DATA has text.txt to pretrain on. All arms have the quickstart's learning rate and 64 x 16 tokens
per step. The second stage of two_stage starts from the networks of the first.
"""

from pathlib import Path

from electra_jax.experiments.definition import Arm, Experiment

OBJECTIVES = (
  "electra", "electra_15", "replace_mlm", "all_tokens_mlm", "bert", "adversarial", "electric",
  "electra_tt",
)  # fmt: skip


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  return Experiment(
    arms={
      **{name: Arm(f"{name}:quickstart") for name in OBJECTIVES},
      "stage 1": Arm("two_stage:stage1,quickstart"),
      "stage 2": Arm(
        "two_stage:stage2,quickstart",
        after="stage 1",
        times=2.0,
        start_fields=("init_from", "generator.init_from"),
      ),
    },
    budgets=(200,),
    unit="steps",
    seeds=1,
    fields={
      "data.dir": str(data / "shards"),
      "data.sources": f"text:{data / 'text.txt'}",
      "optimizer.warmup_steps": 20,
      "log.trackers": "",
    },
    heldout=("mlm_loss", "replace_mlm_loss", "all_tokens_loss", "rtd_loss", "rtd_auc"),
  )
