"""Muon's momentum in its first steps: optax's bias-corrected Nesterov against the papers'.

Command:  electra-jax experiment benchmarks/muon_rule.py --out=runs/muon_rule
          --rows=benchmarks/results/muon_rule.jsonl
Data:     runs/quickstart/data, built by `electra-jax quickstart`
Hardware: two CPU cores, a minute a run.

Question: the update is NS(b m + (1 - b) g) in Jordan 2024 and Liu et al. 2025. optax divides m by
1 - b^(t + 1) and g by 1 - b^t first, which weighs the gradient differently until both are near 1,
after 60 steps. Does that change what the quickstart's network has learned?
Measure: held-out masked-LM loss after 60 and after 300 steps, three seeds, paired.
Rule, decided before: the papers' rule becomes an option of `muon` if it is better after 300 steps
by more than 0.02 nats and by more than twice the paired difference's standard error.
Expected: the papers' loss minus optax's is 0.0006 +- 0.0006 nats after 60 steps, 0.0024 +- 0.0006
after 300.
"""

import jax
import optax

import electra_jax
from electra_jax.core import optimizer
from electra_jax.experiments.definition import Arm, Experiment


def papers(cfg: optimizer.OptimizerConfig, schedule) -> optax.GradientTransformation:
  """Returns `muon` with the papers' momentum; orthogonalisation does not see its scale."""

  def groups(params):
    axes = optimizer.matrix_axes(params)
    return jax.tree.map(lambda _, a: "matrices" if a else "others", params, axes)

  matrices = optax.chain(
    optax.trace(0.95, nesterov=True),
    optax.contrib.muon(
      schedule,
      beta=0.0,
      nesterov=False,
      weight_decay=cfg.weight_decay,
      muon_weight_dimension_numbers=optimizer.matrix_axes,
      consistent_rms=0.2,
    ),
  )
  others = optimizer.OPTIMIZERS["adamw"].make(cfg, schedule)
  return optax.partition({"matrices": matrices, "others": others}, groups)


electra_jax.register(optimizer={"muon_papers": optimizer.OptimizerDef(papers, elementwise=False)})


def get_experiment(arg: str | None = None) -> Experiment:
  """Returns the experiment; `arg` is not used."""
  arms = {
    "optax": Arm("quickstart"),
    "papers": Arm("quickstart", {"optimizer.name": "muon_papers"}),
  }
  return Experiment(
    arms=arms,
    control="optax",
    budgets=(60, 300),
    unit="steps",
    fields={"eval.every_steps": 0},
    heldout=("mlm_loss", "rtd_auc"),
  )
