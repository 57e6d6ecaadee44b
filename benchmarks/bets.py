"""Bets against `bert` at equal FLOPs: detection in the decay, causal words first, masks.

  electra-jax experiment benchmarks/bets.py:DATA --out=DIR --only=ARM[,ARM...]
      --rows=benchmarks/results/bets_rows.jsonl [--at-once=2]
  python benchmarks/bets.py [--rows FILE]      # the declared mean of each arm against its control

Data:     DATA as for benchmarks/positions.py, and cloze.jsonl of benchmarks/cloze.py.
Hardware: two CPU cores; at 2e13 a run and its measures take about a quarter of an hour on one.

Questions, each against its control, seed by seed, with generator and heads in the FLOPs:
1. `decay-detect`: does detection in the decay alone, with half of the chosen tokens left as [MASK],
   beat the masked LM's own decay (`decay-bert`) from the same trunk? Its generator is the trunk
   itself, frozen. `decay-share0` keeps no [MASK], `decay-weight0` does not detect: if either does
   as well, detection or [MASK] is not what helps.
2. `clm-electra_mlm`: do causal words for two fifths of the FLOPs help the family? `clm-bert` is its
   control, `clm` alone and `bert` are those of `clm-bert`.
3. `NAME-words`: do whole words help `bert` and `electra_mlm`?
4. `NAME-rates`: does a mask rate that falls from 0.4 to 0.15 help them?
Rule, decided before the rows: an arm counts if the mean of its paired differences from its control,
in the mean of the measures that LOG.md declares before the rows, is beyond two standard errors over
three seeds at two budgets.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import machine
from evidence import scorers_of
from positions import BODY, SIZES, tasks_of

from electra_jax.experiments import jobs, plan, summary
from electra_jax.experiments.definition import Arm, Budget, Experiment, Pairs, number

ROWS = Path(__file__).resolve().parent / "results" / "bets_rows.jsonl"
# The measures of the declared mean, and what one unit of it is: the spread between arms of
# positions.py at 5e12 FLOPs (LOG.md, 2026-11-29).
UNITS = {"cloze": 5.5, "probe_pos": 2.7, "chunk": 2.2, "effect": 0.038}
BUDGETS, RATES = (2e13, 8e13), (3.2e-3, 6.4e-3)
CONFIGS = {"bert": "bert:quickstart", "electra_mlm": "electra_mlm:quickstart"}
# arm -> the arm that it is compared with; bert for the others
CONTROLS = {
  **dict.fromkeys(("decay-detect", "decay-share0", "decay-weight0"), "decay-bert"),
  "clm-electra_mlm": "clm-bert",
  "electra_mlm-words": "electra_mlm",
  "electra_mlm-rates": "electra_mlm",
}
TRUNK, CAUSAL = 0.75, 0.4  # of the FLOPs
# Constant after the warm-up; then a decay over all steps of another run.
CONSTANT = {"optimizer.schedule": "wsd"}
DECAY = {
  **CONSTANT,
  "optimizer.decay_frac": 0.999,
  "optimizer.warmup_steps": 0,
  "init_optimizer": True,
}
DETECT = {
  "objective.keep_mask_share": 0.5,
  "generator.kind": "frozen",
  "generator.tie": "none",
  "optimizer.separate_optimizers": False,
  "optimizer.generator_learning_rate": None,
}
FALLING = {"objective.mask_prob": 0.15, "objective.mask_prob_schedule": "0%=0.4,100%=0.15"}


def tag_parts(folder: Path) -> dict[str, tuple[str, str]]:
  """Returns the files of a probe of parts of speech and of one of chunks, by measure."""
  for name in ("fitting", "test"):
    part, whole = folder / f"{name}-pos.txt", folder / f"{name}.txt"
    if whole.exists() and not part.exists():
      lines = whole.read_text("utf-8").splitlines()
      part.write_text("".join(f"{' '.join(line.split()[:2])}\n" for line in lines), "utf-8")
  files = {"probe_pos": "-pos", "probe_chunk": ""}
  return {
    measure: tuple(str(folder / f"{name}{end}.txt") for name in ("fitting", "test"))
    for measure, end in files.items()
  }


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  arms = {name: Arm(config, rates=RATES) for name, config in CONFIGS.items()}
  arms["trunk"] = Arm(CONFIGS["bert"], CONSTANT, rate_of="bert")
  arms["clm"] = Arm("clm:quickstart", rate_of="bert")

  def branch(config: str, fields: dict, *start: str) -> Arm:
    return Arm(
      config, DECAY | fields, rate_of="bert", after="trunk", share=TRUNK,
      start_fields=("init_from", *start),
    )  # fmt: skip

  arms["decay-bert"] = branch(CONFIGS["bert"], {})
  for name, own in (
    ("detect", {}),
    ("share0", {"objective.keep_mask_share": 0.0}),
    ("weight0", {"objective.discriminator_weight": 0.0}),
  ):
    fields = DETECT | own
    arms[f"decay-{name}"] = branch(CONFIGS["electra_mlm"], fields, "generator.init_from")
  for name, config in CONFIGS.items():
    arms[f"clm-{name}"] = Arm(config, rate_of=name, after="clm", share=CAUSAL)
    arms[f"{name}-words"] = Arm(config, {"objective.whole_words": True}, rate_of=name)
    arms[f"{name}-rates"] = Arm(config, FALLING, rate_of=name)
  tasks = tasks_of(data)
  return Experiment(
    arms=arms,
    budgets=(BUDGETS[0], Budget(BUDGETS[1], factors=(1.0,))),
    control="bert",
    fields=BODY | {"data.dir": str(data / "shards"), "data.sources": f"text:{data / 'text.txt'}"},
    choose="chunk_choices",
    heldout=("mlm_loss", "replace_mlm_loss", "rtd_auc", "unigram_auc"),
    pairs=Pairs(str(data / "pairs.jsonl"), 6_700, scorers_of),
    cloze=(str(data / "cloze.jsonl"), 6_000),
    probe=tag_parts(data / "chunk"),
    probe_words=20_000,
    tasks=tasks,
  )


def declared(rows: Sequence[Mapping]) -> dict[tuple[str, float, int], float]:
  """Returns the declared mean of each (arm, budget, seed), in units.

  Gaps and pairs count by the scorer of `scorers_of` whose mean over an arm's rows is highest.
  """
  found = {}
  for arm in {row["arm"] for row in rows}:
    mine = [row for row in rows if row["arm"] == arm]

    def best(start: str, end: str, mine=mine) -> str:
      names = [name for name in mine[0] if name.startswith(start) and name.endswith(end)]
      return max(names, key=lambda name: statistics.fmean(row[name] for row in mine))

    cloze, effect = best("cloze", ""), best("pairs", "_effect")
    for row in mine:
      values = {
        "cloze": row[cloze],
        "probe_pos": row["probe_pos"],
        "chunk": statistics.fmean(number(row[f"chunk_{size}"]) for size in SIZES),
        "effect": row[effect],
      }
      units = [values[name] / unit for name, unit in UNITS.items()]
      found[arm, row["budget"], row["seed"]] = statistics.fmean(units)
  return found


def table(rows: Sequence[Mapping]) -> list[str]:
  """Returns a markdown table of the declared mean: paired differences ± standard errors."""
  found = declared(rows)
  lines = [f"| arm | control | {' | '.join(f'{x:.0e}' for x in BUDGETS)} |", "|---" * 4 + "|"]
  for arm in dict.fromkeys(row["arm"] for row in rows):
    control, cells = CONTROLS.get(arm, "bert"), []
    for budget in BUDGETS:
      mine, theirs = (
        {seed: x for (a, b, seed), x in found.items() if (a, b) == (name, budget)}
        for name in (arm, control)
      )
      gain = summary.paired(mine, theirs) if arm != control else None
      cells.append(f"{gain[0]:+.3f} ± {gain[1]:.3f}" if gain else "")
    lines.append(f"| {arm} | {control} | {' | '.join(cells)} |")
  return lines


def main(rows: Path = ROWS) -> None:
  """
  --rows  the rows of the experiment
  """
  print("\n".join(table(plan.reported(get_experiment(), jobs.Rows(rows).read()))))


if __name__ == "__main__":
  machine.start(main)
