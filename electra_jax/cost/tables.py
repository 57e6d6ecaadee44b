"""Tables of FLOPs for electra-jax flops."""

import functools

from ml_collections import ConfigDict
from rich.table import Column, Table

from electra_jax.config import validate
from electra_jax.core import flops
from electra_jax.cost import paper
from electra_jax.pretrain.run import spec_without_data

_number = functools.partial(Column, justify="right")


def paper_table() -> Table:
  """Returns a table of the paper's models with FLOPs counted here and printed in the paper."""
  caption = (
    "ELECTRA-Small and its fractions: 1.4e18 in the paper's tables, but 1.294e18 in its script and"
    " here. Left out: ELMo, XLNet and T5, which are fixed numbers in the script."
  )
  columns = map(_number, ("batch", "steps", "here", "paper"))
  title = "training FLOPs by the paper's accounting"
  table = Table("model", *columns, title=title, caption=caption)
  for name, (nets, batch_size, steps, published) in paper.PAPER.items():
    total = paper.train_flops(nets, batch_size, steps)
    table.add_row(name, f"{batch_size:,}", f"{steps:,}", f"{total:.3e}", f"{published:.1e}")
  return table


def step_costs(config: ConfigDict) -> tuple[dict[str, float], dict[str, float]]:
  """Returns the FLOPs of a step by part: by the paper's accounting, and in matrix products."""
  validate.check_fields(config)
  spec = spec_without_data(config)
  B, L = config.train.batch_size, config.data.seq_length
  products = flops.generator_flops(spec, L) | flops.main_flops(spec, L)
  counted = paper.sequence_flops(spec, L)
  return {k: B * v for k, v in counted.items()}, {k: B * v for k, v in products.items()}


def config_table(config: ConfigDict) -> Table:
  """Returns a table of the FLOPs of a step and of a whole run."""
  steps, objective = config.train.steps, config.objective.name
  columns = map(_number, ("per step", f"total, {steps:,} steps"))
  title = f"{objective}, {config.train.batch_size:,} x {config.data.seq_length} tokens"
  table = Table("FLOPs", *columns, title=title)
  counts = zip(("by the paper's accounting", "matrix products"), step_costs(config), strict=True)
  for title, parts in counts:
    for name, value in {**parts, title: sum(parts.values())}.items():
      last = name == title
      style = "bold" if last else ""
      table.add_row(name, f"{value:.4g}", f"{value * steps:.4g}", style=style, end_section=last)
  return table


def matching_steps(config: ConfigDict, other: ConfigDict) -> dict[str, int]:
  """Returns the steps of `config` that cost as much as a whole run of `other`, by accounting."""
  mine, theirs = ([sum(x.values()) for x in step_costs(c)] for c in (config, other))
  found = zip(("by the paper's accounting", "in matrix products"), mine, theirs, strict=True)
  return {title: round(other.train.steps * b / a) for title, a, b in found}
