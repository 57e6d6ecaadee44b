"""An entry of a dict is all that a new kind needs: added here, used by who looks it up."""

import ast
import dataclasses
import functools
import io
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from test_objectives import SPEC, D, keys_of, make_batch

import electra_jax
from electra_jax.core import (
  attention,
  encoder,
  generators,
  heads,
  layers,
  learning_rates,
  networks,
  objectives,
  optimizer,
  task_network,
  terms,
  transformer_config,
)
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.evaluate import scorers
from electra_jax.export import writer
from electra_jax.finetune import labels, prepare, tasks
from electra_jax.finetune import metrics as task_metrics
from electra_jax.finetune import text_task as glue
from electra_jax.finetune.labels import TextTask
from electra_jax.interop import electra, huggingface, sources
from electra_jax.interop.sources import ExchangeError, Source
from electra_jax.monitor import baselines

PACKAGE = Path(electra_jax.__file__).parent


@pytest.mark.parametrize(
  ("own", "main", "words"),
  [
    (("mine_head",), "mine_head", None),
    (("mine_head", "mlm_head"), "mlm_head", None),
    (("mine_head", "mlm_head", "rtd_head"), "rtd_head", "mlm_head"),
    ((), None, None),
  ],
)
def test_an_objective_with_a_head_of_its_own_keeps_its_encoder(
  own, main, words, monkeypatch, tmp_path
):
  mine = heads.HeadDef(heads.RtdHead, heads.HEADS["rtd_head"].flops)
  monkeypatch.setitem(heads.HEADS, "mine_head", mine)
  definition = objectives.ObjectiveDef(objectives.electra, heads=own)
  monkeypatch.setitem(objectives.OBJECTIVES, "mine", definition)
  spec = dataclasses.replace(SPEC, objective="mine")
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  weights = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), shapes)
  found = sources.main_networks(spec, weights)
  assert found["discriminator"].head == main
  assert (found[sources.MASKED_LM].head if sources.MASKED_LM in found else None) == words

  sources.save_orbax(tmp_path / "orbax", Source(found, None, {}))
  read = sources.open_source(tmp_path / "orbax").networks
  assert read.keys() == found.keys()
  for role, network in found.items():
    assert read[role].head == network.head
    jax.tree.map(np.testing.assert_array_equal, read[role].weights, dict(network.weights))
  source = Source({"discriminator": found["discriminator"]}, None, {})
  out = io.StringIO()
  writer.export_hf(source, tmp_path / "hf", Console(file=out, soft_wrap=True))
  read = sources.open_source(tmp_path / "hf").networks["discriminator"]
  # Hugging Face has no class for this head: the encoder goes out without it.
  assert read.head == (None if main == "mine_head" else main)
  assert ("not exported: the discriminator's mine_head" in out.getvalue()) == (main == "mine_head")
  ours, theirs = weights["discriminator"]["encoder"], read.weights["encoder"]
  jax.tree.map(np.testing.assert_array_equal, theirs, ours)


def test_a_head_without_a_scorer_is_refused_and_with_one_is_scored(monkeypatch):
  with pytest.raises(
    ExchangeError, match="scoring sentences needs a network with rtd_head or mlm_head"
  ):
    scorers.default("electra", ("mine_head",))
  definition = dataclasses.replace(scorers.SCORERS["rtd"], head="mine_head")
  monkeypatch.setitem(scorers.SCORERS, "mine", definition)
  assert scorers.default("electra", ("mine_head",)) == "mine"


def test_a_network_is_written_as_the_family_that_holds_it(monkeypatch):
  mine = dataclasses.replace(
    electra.ELECTRA,
    model_type="mine",
    to_json=lambda cfg, head: electra.ELECTRA.to_json(D, head),
    holds=lambda cfg: cfg.block == "parallel",
  )
  monkeypatch.setitem(huggingface.FAMILIES, "mine", mine)
  own = dataclasses.replace(D, block="parallel")
  for cfg, model_type in ((own, "mine"), (D, "electra")):
    assert huggingface.config_json(cfg, None, pad_id=0)["model_type"] == model_type


def test_a_task_of_a_new_type_of_label_has_its_behaviour_and_its_metrics(monkeypatch):
  classes = labels.LABEL_TYPES["classification"]
  ordinal = classes._replace(head="ordinal", default_metrics=("distance",))
  monkeypatch.setitem(labels.LABEL_TYPES, "ordinal", ordinal)
  distance = task_metrics.Metric(lambda rows, classes: np.abs(np.diff(rows)).mean(), ("ordinal",))
  monkeypatch.setitem(task_metrics.METRICS, "distance", distance)
  task = tasks.own("stars", text="a", label="b", kind="ordinal")
  assert task.label_type is ordinal and task.metrics == ("distance",)
  assert TextTask(**dataclasses.asdict(task)).label_type is ordinal  # as saved with the results
  assert glue.compute_metrics(task, np.array([[0.0, 1.0], [2.0, 2.0]])) == {"distance": 50.0}
  with pytest.raises(labels.TaskError, match="'accuracy' is not a metric of a ordinal; avail"):
    tasks.own("stars", text="a", label="b", kind="ordinal", metrics=("accuracy",))


@pytest.mark.parametrize(("gated", "expected"), [(False, 4 * 16), (True, 24)])
def test_the_width_of_a_generators_feed_forward_depends_on_its_gate(gated, expected, monkeypatch):
  kind = layers.FeedForward(jax.nn.relu, gated)
  monkeypatch.setitem(layers.FEED_FORWARDS, "mine", kind)
  cfg = TransformerConfig(60, 32, 32, 2, 2, 48, 16, feed_forward="mine")
  assert networks.generator_size(cfg, 0.5, 1.0).ffn_size == expected


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_every_loss_of_an_objective_has_a_trivial_baseline(name, monkeypatch):
  made = set()

  def recorded(stem, *args):
    made.add(stem)
    return terms.token_terms(stem, *args)

  for module in (objectives, generators):
    monkeypatch.setattr(module, "token_terms", recorded)
  accepts = objectives.OBJECTIVES[name].accepts
  kinds = [kind for kind, definition in generators.GENERATORS.items() if accepts(definition)]
  spec = dataclasses.replace(SPEC, objective=name, generator_kind=kinds[0])
  batch = make_batch(B=spec.contrast_group)
  evaluate = functools.partial(objectives.make(spec), step=None)
  found = jax.eval_shape(evaluate, objectives.param_shapes(spec), batch, keys_of(batch))
  line = dict.fromkeys(found, 0.5)
  assert set(baselines.words(line)) - {"all_tokens"} == made
  chance = baselines.Baselines(entropy=6.0, most_frequent=0.1, choices=15)
  # REINFORCE's own measures; the first is a loss of nothing that the text could tell.
  known = {"baseline_loss", "slot_rtd_loss"}
  for loss in {name for name in line if name.endswith("_loss")} - known:
    assert chance.level(loss, line), loss


def test_positions_that_need_neither_a_table_nor_rotations_are_an_entry_alone(monkeypatch):
  monkeypatch.setitem(transformer_config.POSITIONS, "none", transformer_config.PositionsDef())
  cfg = dataclasses.replace(D, positions="none", num_heads=D.hidden_size)  # heads of width 1
  tables = jax.eval_shape(lambda: networks.init_embeddings(cfg, jax.random.key(0)))
  assert "position" not in tables


def test_comparisons_with_names_of_entries_are_those_that_are_listed():
  dicts = (
    *(attention.ATTENTION, encoder.BLOCKS, generators.GENERATORS, heads.HEADS, layers.NORMS),
    *(layers.FEED_FORWARDS, networks.TIES, objectives.OBJECTIVES, optimizer.OPTIMIZERS),
    *(learning_rates.SCHEDULES, scorers.SCORERS, labels.LABEL_TYPES, task_metrics.METRICS),
    *(prepare.TASK_KINDS, tasks.TASKS, task_network.HEAD_KINDS, transformer_config.POSITIONS),
  )
  # Also a scope in TF1, fields of the parameters, a format of files, a measure.
  other = {"electra", "embedding", "embeddings", "text", "pairs"}
  names = {name for entries in dicts for name in entries} - other
  found = set()
  for path in PACKAGE.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Compare):
        words = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)} & names
        found |= {(path.relative_to(PACKAGE).with_suffix("").as_posix(), x) for x in words}
  listed = set()
  for row in (PACKAGE.parent / "docs" / "entries.md").read_text().splitlines():
    if re.fullmatch(r"\| `\w+/[^|]* \| `\w+` \| [^|`]*(`\w+`[^|]*)?\|", row):
      where, name = row.split("|")[1:3]
      modules = re.findall(r"`(\w+/\w+)", where)
      listed |= {(module, name.strip(" `")) for module in modules}
  assert found == listed
