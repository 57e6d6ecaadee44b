"""The code of docs/guides/research.md is run as it stands there, and trains."""

import dataclasses
import functools
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except, make_tiny_config
from test_finetune import make_config, run, source  # noqa: F401 (a fixture)
from test_objectives import RATES, SPEC, D, fresh, keys_of, make_batch
from test_train import lines

import electra_jax
from electra_jax.core import masking, objectives
from electra_jax.finetune import metrics as task_metrics
from electra_jax.pretrain import train

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "research.md"


@functools.cache
def sections() -> dict[str, list[str]]:
  """Returns {heading: its blocks of Python}."""
  found = {}
  for part in re.split(r"^## ", GUIDE.read_text(), flags=re.M)[1:]:
    found[part.partition("\n")[0]] = re.findall(r"^```python\n(.*?)^```", part, re.M | re.S)
  return found


def execute(code: str) -> dict:
  names = {"__name__": "guide"}
  exec(compile(code, str(GUIDE), "exec"), names)
  return names


SHUFFLED = dataclasses.replace(SPEC, objective="shuffled", options=(("shuffle_distance", 1),))
SPECS = {
  "An objective": lambda: SHUFFLED,
  "A generator": lambda: dataclasses.replace(SPEC, generator_kind="similar"),
  "An encoder block": lambda: dataclasses.replace(
    SPEC, discriminator=dataclasses.replace(D, block="parallel")
  ),
}
LOSSES = dict(zip(SPECS, ("shuffled_loss", "rtd_loss", "mlm_loss"), strict=True))


def test_every_block_of_the_guide_is_run_here():
  expected = {"An objective": 2, "A generator": 2, "An encoder block": 2, "A task": 1}
  expected |= {"From Python": 1, "An experiment": 1}
  assert {heading: len(blocks) for heading, blocks in sections().items()} == expected


def test_the_guides_training_from_python_keeps_its_losses(tiny_shards, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # Doctests import the module of that name, which then hides the function.
  monkeypatch.delitem(vars(electra_jax), "train", raising=False)
  (code,) = sections()["From Python"]
  code = re.sub(r"^config = .*?build[^\n]*\n", "", code, flags=re.M | re.S)
  assert "load_config" not in code
  names = {"__name__": "guide", "config": make_tiny_config(tiny_shards)}
  exec(compile(code, str(GUIDE), "exec"), names)
  heldout = [loss for _, split, loss in names["losses"] if split == "heldout"]
  assert heldout == [line["mlm_loss"] for line in names["trained"].history("heldout")]
  assert len(heldout) == 3 and len(names["encoder"].embed("w1 w2")) == 16


def test_the_guides_experiment_is_one():
  (code,) = sections()["An experiment"]
  experiment = execute(code)["get_experiment"]()
  assert experiment.control in experiment.arms and len(experiment.arms) == 4


@pytest.mark.parametrize("heading", long_except(1, of=SPECS))
def test_steps_lower_the_loss_of_what_the_guide_adds(heading, tables):
  execute(sections()[heading][0])
  spec, batch = SPECS[heading](), make_batch()
  objective, params, keys = objectives.make(spec), fresh(spec), keys_of(batch)

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    terms = objective(params, batch, keys, jnp.int32(0)).values()
    return sum(t.weight * t.total / t.count for t in terms if t.in_loss)

  losses = []
  for _ in range(8):
    value, gradient = loss(params)
    losses.append(float(value))
    params = jax.tree.map(lambda p, g: p - 0.02 * g, params, gradient)
  assert losses[-1] < 0.95 * losses[0]


@pytest.mark.long
@pytest.mark.parametrize(("heading", "loss"), LOSSES.items())
def test_what_the_guide_adds_trains(heading, loss, tables, tiny_shards, tmp_path):
  code, config_file = sections()[heading]
  execute(code)
  config, small = execute(config_file)["get_config"](), make_tiny_config(tiny_shards)
  for group in ("data", "eval", "checkpoint", "log"):
    config[group] = small[group]
  config.model.update(hidden_size=16, num_layers=2, num_heads=2, ffn_size=32, embedding_size=16)
  config.model.unroll = 1
  config.generator.width_multiplier = 0.5
  config.optimizer.update(learning_rate=1e-2, warmup_steps=2)
  config.eval.every_steps = 0
  config.train.update(batch_size=8, steps=12)
  assert train.train(config, tmp_path).step == 12
  history = [line[loss] for line in lines(tmp_path) if line["split"] == "heldout"]
  assert len(history) == 2 and history[1] < history[0]


def test_the_guides_objective_moves_tokens_inside_their_sequence(tables):
  execute(sections()["An objective"][0])
  seen, corrupt = [], masking.corrupt
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(masking, "corrupt", lambda *args: seen.append(corrupt(*args)) or seen[-1])
    batch = make_batch()
    objective = objectives.make(SHUFFLED)
    terms = jax.jit(lambda p, b, k: objective(p, b, k, None) | {"seen": seen[0]})(
      fresh(SPEC), batch, keys_of(batch)
    )
  ids, has_moved = map(np.asarray, terms["seen"])
  assert (np.sort(ids) == np.sort(batch.ids)).all() and has_moved.any(-1).all()
  assert not has_moved[np.isin(batch.ids, RATES.special_ids)].any()
  assert float(terms["shuffled_loss"].count) == batch.padding_mask.sum()


def test_the_guides_task_is_measured_by_its_metric(tables, source, tmp_path):  # noqa: F811
  execute(sections()["A task"][0])
  rng = random.Random(0)
  (tmp_path / "docstrings").mkdir()
  for split, n in (("train", 64), ("dev", 24)):
    # Three of four are functions: whoever always says so has an accuracy of 75 %, balanced 50 %.
    rows = [("class", "w0") if i % 4 == 0 else ("function", "w1") for i in range(n)]
    text = [f"{label}\t{word} w{rng.randint(2, 29)}" for label, word in rows]
    (tmp_path / "docstrings" / f"{split}.tsv").write_text("\n".join(["label\ttext", *text]) + "\n")
  config = make_config("glue", "docstrings", source, data__dir=str(tmp_path), train__epochs=4.0)
  results = run(config, tmp_path / "results")
  for row in results:
    assert list(row["metrics"]) == ["balanced", "accuracy"]
    assert row["metrics"]["balanced"] > 60
  rows = np.array([[0.0, 0], [0, 1], [1, 1], [1, 1]])
  assert task_metrics.METRICS["balanced"].compute(rows, 2) == 0.75
