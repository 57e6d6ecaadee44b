"""Bands: healthy seeds stay inside, runs that are broken in four ways leave early and for a reason.

The runs are those of benchmarks/bands.py: the two configurations that have a band, and their
first steps broken.
"""

import json
import re
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, no_warnings

from electra_jax.commands import cli
from electra_jax.config import files, specs
from electra_jax.monitor import bands
from electra_jax.monitor.health import Health
from electra_jax.runtime import workdir

JSON = {"quickstart": "bands.json", "modern_short": "bands_modern_short.json"}
# {configuration: {(fault, seed): lines}}; "" is no fault
RUNS = {
  name: {
    (row["fault"], row["seed"]): row["lines"]
    for row in json.loads((ROOT / "benchmarks" / "results" / file).read_text())["judged"]
  }
  for name, file in JSON.items()
}
HEALTHY = [(name, seed) for name, runs in RUNS.items() for fault, seed in runs if not fault]
# {fault: (words of its cause, {configuration: the last step by which it must be seen})}
FAULTS = {
  "doubled learning rate": ("a higher learning rate", {"quickstart": 100, "modern_short": 25}),
  "frozen generator": ("a generator that does not learn", {"quickstart": 200, "modern_short": 25}),
  "shuffled targets": ("targets that do not match", {"quickstart": 100, "modern_short": 25}),
  "broken tokenizer": ("a broken tokenizer", {"quickstart": 100, "modern_short": 100}),
}


def band(name: str, without: int) -> bands.Band:
  others = [x for (fault, seed), x in RUNS[name].items() if not fault and seed != without]
  assert len(others) >= 3
  return bands.make(others, files.load(f"{name}.py").log.every_steps, {})


def warned(reference: bands.Band, lines, *differing) -> list[tuple[int, str]]:
  follow = bands.BandMonitor(reference, "ref.json", differing)
  texts = [(x["step"], text) for x in lines for text in follow.check(x["split"], x["step"], x)]
  assert not any("\n" in text for _, text in texts)
  return texts


@pytest.mark.parametrize(("name", "seed"), HEALTHY)
def test_a_seed_stays_in_the_band_of_the_others(name, seed):
  assert warned(band(name, without=seed), RUNS[name]["", seed]) == []


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_run_leaves_early_and_its_cause_is_among_the_three(fault, name):
  cause, by = FAULTS[fault]
  for reference in (band(name, without=0), bands.read(ROOT / "configs" / "bands" / f"{name}.json")):
    ((step, text),) = warned(reference, RUNS[name][fault, 0])  # it speaks once
    assert step <= by[name] and "left the reference ref.json: " in text
    causes = text.partition("Likely causes: ")[2]
    assert cause in causes and "(3)" in causes and "(4)" not in causes


def test_the_causes_do_not_need_the_logged_learning_rate():
  lines = RUNS["quickstart"]["doubled learning rate", 0]
  hidden = [{k: v for k, v in x.items() if k != "learning_rate"} for x in lines]
  ((step, text),) = warned(band("quickstart", without=0), hidden)
  assert step == 100 and "a higher learning rate" in text


def test_false_alarms_are_rare_where_the_assumption_holds():
  # Seeds with independent normal noise of another size on each of three metrics, 40 lines each.
  rng, alarms, trials = np.random.default_rng(0), 0, 100

  def run():
    noise = rng.normal(size=(40, 3)) * [0.5, 2.0, 0.3]
    return [
      {"step": i, "split": "train", **{f"m{k}": float(10.0 + x) for k, x in enumerate(row)}}
      for i, row in enumerate(noise)
    ]

  for _ in range(trials):
    alarms += bool(warned(bands.make([run() for _ in range(3)], 1, {}), run()))
  # 120 numbers a run at a chance of 1e-4 each.
  assert alarms <= 0.02 * trials


def test_a_line_outside_is_noise_and_two_or_a_far_one_are_a_departure():
  level = bands.Level(mean=2.0, tolerance=0.1)
  reference = bands.Band(1, 3, {}, {"train": {step: {"mlm_loss": level} for step in range(9)}})

  def told(*losses):
    lines = [{"step": i, "split": "train", "mlm_loss": x} for i, x in enumerate(losses)]
    return [step for step, _ in warned(reference, lines)]

  assert told(2.0, 2.15, 2.0, 1.85, 2.15, 1.85) == []
  assert told(2.0, 2.15, 2.15, 2.15) == [2] and told(2.0, 1.79) == [1]
  assert told(None, 2.09, 2.09) == []
  ((_, text),) = warned(reference, [{"step": 0, "split": "train", "mlm_loss": 3.0}], "a=1 (b)")
  assert "mlm_loss 3.0000 nats is above 2.0000 nats ± 0.1000 nats" in text
  assert text.endswith(". Differences from the reference: a=1 (b)")


@pytest.mark.parametrize("name", JSON)
def test_a_band_is_small_reads_back_and_has_the_fields_of_its_configuration(name, tmp_path):
  shipped = ROOT / "configs" / "bands" / f"{name}.json"
  assert shipped.stat().st_size < 50_000
  found = bands.read(shipped)
  bands.write(tmp_path / "again.json", found)
  assert bands.read(tmp_path / "again.json") == found
  config = files.load(f"{name}.py")
  assert max(found.levels["train"]) == max(found.levels["heldout"]) == config.train.steps
  config.health.reference = f"configs/bands/{name}.json"
  assert specs.reference(config) == (found, config.health.reference, [])


def test_a_reference_names_what_differs_and_fits_the_lines(tmp_path):
  config = files.load("modern_short.py")
  config.health.reference = "configs/bands/modern_short.json"
  vocab = types.SimpleNamespace(hash="0f" * 32)
  (text,) = specs.reference(config, vocab)[2]
  assert re.fullmatch(r"data.vocab_hash=0f0f0f0f... \(reference: [0-9a-f]{8}...\)", text)
  config.data.seq_length = 32
  assert specs.reference(config)[2] == ["data.seq_length=32 (reference: 128)"]
  config = files.load("quickstart.py")
  config.health.reference = "configs/bands/quickstart.json"
  config.optimizer.learning_rate *= 2
  assert specs.reference(config)[2] == ["optimizer.learning_rate=0.0064 (reference: 0.0032)"]
  config.log.every_steps = 50
  with pytest.raises(ValueError, match="every_steps must be 100 as .*, got 50"):
    specs.reference(config)
  (tmp_path / "no.json").write_text("[]")
  config.health.reference = str(tmp_path / "no.json")
  with pytest.raises(ValueError, match="no.json is not a band"):
    specs.reference(config)


def test_a_tolerance_is_the_prediction_interval_of_one_more_run():
  # Three seeds, two lines: the second line varies more than the two together.
  values = np.array([[1.0, 1.0], [1.2, 3.0], [1.4, 8.0]])
  histories = [
    [{"step": i, "split": "train", "m": x, "loss": x, "mfu": x} for i, x in enumerate(row)]
    for row in values
  ]
  found = bands.make(histories, 1, {}).levels["train"]
  # `loss` follows the schedules of its weights, and MFU is a timing.
  assert found.keys() == {0, 1} and found[0].keys() == {"m"}
  quantile = 15.544101  # Student's t of 4 degrees of freedom at 0.99995, from its closed form
  first, second = (sum((x - x.mean()) ** 2) / 2 for x in values.T)
  for step, variance in ((0, (first + second) / 2), (1, second)):
    expected = quantile * (variance * 4 / 3) ** 0.5
    assert found[step]["m"].mean == pytest.approx(values[:, step].mean())
    assert found[step]["m"].tolerance == pytest.approx(expected, rel=1e-6)


def test_of_each_kind_of_metric_the_farthest_that_is_reported_counts_for_a_cause():
  distances = {"learning_rate": 0.0, "mlm_loss": 1.0, "rtd_auc": -0.2}
  # Scores: mean of 0.5 and 1 without the entropy; mean of 0.5, 1 and 0.3; of 0.5, 1 and 0.2.
  another_text, frozen, shuffled = bands.causes_of(distances, [*distances, "mlm_accuracy"])
  assert another_text.startswith("a different kind of text")
  assert frozen.startswith("a generator that does not learn")
  assert shuffled.startswith("targets that do not match")

  distances = {"learning_rate": 0.1, "mlm_loss": 5.0, "replace_mlm_loss": 0.0, "rtd_auc": -4.0}
  backwards = dict(reversed(distances.items()))
  names = [*distances, "mlm_accuracy", "replace_mlm_accuracy"]
  assert bands.causes_of(distances, names) == bands.causes_of(backwards, names)
  assert bands.causes_of(backwards, names)[0].startswith("targets that do not match")


def test_an_evaluation_is_compared_with_the_evaluations_of_the_reference():
  level = {"mlm_loss": bands.Level(mean=2.0, tolerance=0.1)}
  other = {"mlm_loss": bands.Level(mean=5.0, tolerance=0.1)}
  reference = bands.Band(1, 3, {}, {"train": {8: level}, "heldout": {8: other}})
  limits = specs.make_limits(files.load("base.py"))

  def warnings(value: float) -> list[str]:
    health = Health(limits, (), bands.BandMonitor(reference, "ref.json"))
    return health.check(8, {"mlm_loss": value}, "heldout")

  assert warnings(5.0) == []
  (text,) = warnings(2.0)
  assert "mlm_loss (heldout) 2.0000 nats is below 5.0000 nats" in text


def test_a_resumed_run_does_not_repeat_its_departure():
  limits = specs.make_limits(files.load("quickstart.py"))
  lines = RUNS["quickstart"]["shuffled targets", 0]
  health = Health(limits, lines, bands.BandMonitor(band("quickstart", without=0), "ref.json"))
  assert health.check(700, lines[-1]) == []


def save_run(folder: Path, config, seed: int, lines) -> Path:
  folder.mkdir()
  config.seed = seed
  workdir.write_config(folder, config.to_dict())
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return folder


def test_a_band_that_begins_after_a_runs_last_step_is_a_warning(tmp_path):
  config = files.load("quickstart.py")
  levels = {"train": {100: {"mlm_loss": bands.Level(1.0, 0.1)}}}
  bands.write(tmp_path / "band.json", bands.Band(config.log.every_steps, 3, {}, levels))
  config.health.reference = str(tmp_path / "band.json")
  with no_warnings():
    specs.reference(config)
  config.train.steps = 99
  with pytest.warns(UserWarning, match="checks no line .* begins after config.train.steps=99"):
    specs.reference(config)


def test_the_command_makes_a_band_of_seeds_of_one_recipe(tmp_path, capsys):
  config, out = files.load("quickstart.py"), tmp_path / "band.json"
  runs = [save_run(tmp_path / f"{s}", config, s, RUNS["quickstart"]["", s]) for s in (0, 1, 2)]

  def command(*folders):
    cli.call("report", ["--make-band", *map(str, folders), f"--out={out}"])

  command(*runs)
  assert capsys.readouterr().out == f"band: {out}, 3 runs, steps 0 to 2,000\n"
  found = bands.read(out)
  assert found.fields["optimizer.learning_rate"] == 3.2e-3 and "seed" not in found.fields
  lines = [x for s in (0, 1, 2) for x in RUNS["quickstart"]["", s] if x["step"] == 600]
  expected = np.mean([x["mlm_loss"] for x in lines])
  assert found.levels["train"][600]["mlm_loss"].mean == pytest.approx(expected, rel=1e-4)
  with pytest.raises(ValueError, match="at least 3 runs, got 2"):
    command(*runs[:2])
  with pytest.raises(ValueError, match="same seed"):
    command(runs[0], runs[0], runs[1])
  for name, value in (("manifest", "b"), ("vocab_hash", "b"), ("seq_length", 32)):
    saved = json.loads((runs[2] / "config.json").read_text())
    saved["data"] |= {name: value}  # the hashes are those that a run saves
    place = shutil.copytree(runs[2], tmp_path / name)
    (place / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=f"{place} is another recipe: data.{name} is {value!r}"):
      command(*runs[:2], place)
  config.optimizer.learning_rate = 1e-3
  other = save_run(tmp_path / "other", config, 3, RUNS["quickstart"]["", 3])
  with pytest.raises(ValueError, match="optimizer.learning_rate is 0.001, in .* 0.0032"):
    command(*runs, other)
