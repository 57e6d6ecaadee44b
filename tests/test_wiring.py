"""What parts hand on to each other: order, seeds, signs. Each line here was once wrong unseen."""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from test_build import make_config

from electra_jax.commands import cli
from electra_jax.config import compare, files, specs, validate
from electra_jax.core.params import named
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.cost import paper
from electra_jax.data import build, chunks, examples, pretrain_batches, shards, sources
from electra_jax.data.sources import SourceStats, TextChunk
from electra_jax.experiments import definition, jobs
from electra_jax.export import card
from electra_jax.finetune import statistics
from electra_jax.interop import huggingface, initial, modernbert
from electra_jax.interop import sources as sources_of_weights
from electra_jax.monitor import display, journal, log
from electra_jax.monitor.goodput import Goodput
from electra_jax.pretrain import loop
from electra_jax.pretrain.run import make_train_fns
from electra_jax.report import saved_run, verdict
from electra_jax.runtime import workdir

GOLDEN = Path(__file__).parent / "golden" / "version_0_1"


def test_a_warning_is_in_the_journal_from_which_the_report_judges(tmp_path):
  shown = display.Display(Console(quiet=True), display.Activity)
  lines = log.Log(tmp_path, shown, start_step=0, resumed=False)
  lines.warn(["the discriminator does not learn"])
  lines.close()
  (event,) = journal.read(tmp_path)
  assert (event["event"], event["text"]) == ("warning", "the discriminator does not learn")


@pytest.mark.parametrize(("loss", "word"), [(0.5, verdict.GOOD), (1.01, verdict.BAD)])
def test_a_loss_of_words_slightly_above_its_baseline_is_no_healthy_run(tmp_path, loss, word):
  shutil.copytree(GOLDEN / "run", tmp_path / "run")
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  config["data"]["dir"] = str(GOLDEN / "data")
  config["health"] = {"after_step": 0}
  (tmp_path / "run" / "config.json").write_text(json.dumps(config))
  run = saved_run.read(tmp_path / "run", "run")
  line = run.last("heldout") | {"mlm_loss": loss * run.baselines.entropy, "rtd_auc": 0.9}
  assert verdict.judge(dataclasses.replace(run, history=[line])).word == word


def test_no_two_chunks_of_a_build_draw_the_same_numbers(monkeypatch):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
  texts = [TextChunk(bytes([i]), True, 0, f"text {i}", 6) for i in range(4)]
  found = [chunk.index for part in (0, 1, 2) for chunk in chunks.chunks(texts, 0.0, part)]
  assert len(found) == 15 and len(set(found)) == 15


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
  """Shards of 50 records, whose first ids count the documents of 60 files in three parts."""
  folder = tmp_path_factory.mktemp("order")
  (folder / "many").mkdir()
  words = ["".join(pair) for pair in zip("abcdefghij" * 6, "klmnopqrst" * 6, strict=True)]
  for i in range(60):
    (folder / "many" / f"{i:02}.txt").write_text(f"{i:02} {words[i]} " * 20 + "\n")
  config = make_config(folder, holdout_frac=0.0, examples_per_shard=50)
  vocab = folder / "vocab.txt"
  vocab.write_text(vocab.read_text() + "\n".join(f"{i:02}" for i in range(60)) + "\n")
  config.data.update(sources=f"text:{folder}/many/*.txt", parts=3, examples="packed")
  build.build(config)
  return Path(config.data.dir)


def test_the_records_of_a_build_are_in_the_order_of_its_files(built):
  manifest = shards.read_manifest(built)
  first = (built / "vocab.txt").read_text().splitlines().index("00")
  files = [shard["file"] for shard in manifest["splits"]["train"]["shards"]]
  records = np.concatenate([np.fromfile(built / x, shards.layout(manifest)) for x in files])
  numbers = records["ids"][records["ids"] >= first]
  assert len(files) > 3 and len(np.unique(numbers)) == 60
  assert (np.diff(numbers.astype(int)) >= 0).all()


def test_examples_are_read_in_the_order_of_the_manifest(built):
  data = pretrain_batches.Shards.open(built)
  files = [shard["file"] for shard in data.manifest["splits"]["train"]["shards"]]
  whole = np.concatenate([np.fromfile(built / x, shards.layout(data.manifest)) for x in files])
  index = np.array(random.Random(0).sample(range(data.num_examples), 40))
  np.testing.assert_array_equal(data.read(index).ids, whole["ids"][index])


def test_the_documents_that_a_fraction_keeps_are_held_out_as_often_as_all(tmp_path):
  (tmp_path / "a.txt").write_text("\n\n".join(f"document {i}" for i in range(1000)))
  (source,) = sources.parse(f"text:{tmp_path}/a.txt@0.5")
  kept = list(sources.documents(source, SourceStats(source)))
  held_out = sum(chunks.is_held_out(text.key, 0.5) for text in kept)
  # Half of 500: six standard deviations of 11 are 67. All or none, if both draws were one.
  assert 400 < len(kept) < 600 and abs(held_out - len(kept) / 2) < 67


def test_the_log_is_on_the_disk_before_a_checkpoint_of_its_step_begins(tmp_path):
  happened = []
  saver = SimpleNamespace(
    run=SimpleNamespace(
      config=SimpleNamespace(train=SimpleNamespace(batch_size=8), seed=0),
      shards=SimpleNamespace(num_examples=20),
      record={},
      workdir=tmp_path,
    ),
    goodput=Goodput(),
    skipped=(),
    window=SimpleNamespace(state_dict=dict),
    clock=SimpleNamespace(state_dict=lambda: None),
    log=SimpleNamespace(sync=lambda: happened.append("lines")),
    checkpoints=SimpleNamespace(save=lambda step, state, meta: happened.append((step, meta))),
    state=None,
  )
  with workdir.claim(tmp_path):
    loop.Loop._save(saver, 5, final=False, now=False)
  first, (step, meta) = happened
  assert first == "lines" and step == 5
  assert meta["position"] == {"sequences": 40, "epoch": 2}


def test_the_exported_tokenizer_marks_the_second_of_two_texts(words, tmp_path):
  from tokenizers import Tokenizer

  assert huggingface.save_tokenizer(tmp_path, words, 16)
  exported, vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), words.vocab
  pair = exported.encode("the", "a b")
  ids = [vocab.cls, *words.encode_batch(["the"])[0], vocab.sep]
  ids += [*words.encode_batch(["a b"])[0], vocab.sep]
  assert pair.ids == ids and pair.type_ids == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
  ("fields", "read"),
  [
    ({"generator.sampling_dropout": False}, lambda spec: spec.sampling_dropout is False),
    ({"eval.fixed_noise": False}, lambda spec: spec.fixed_noise is False),
    ({"generator.kind": "two_tower"}, lambda spec: spec.generator_kind == "two_tower"),
    ({"generator.tie": "gdes"}, lambda spec: spec.tying == "gdes"),
    (
      {"generator.tie": "none", "generator.embedding_size": 96},
      lambda spec: spec.generator.embedding_size == 96,
    ),
    ({"model.unroll": 3, "model.remat": True}, lambda spec: spec.discriminator.compute.unroll == 3),
    ({"model.remat": True}, lambda spec: spec.generator.compute.remat),
    ({"objective.disallow_correct": True}, lambda spec: spec.masking.disallow_correct),
    ({"objective.mlm_weight": 3.0}, lambda spec: spec.mlm_weight == 3.0),
    ({"objective.temperature": 0.7}, lambda spec: spec.masking.temperature.constant == 0.7),
  ],
)
def test_a_field_of_the_configuration_reaches_the_networks(fields, read):
  config, vocab = (
    files.load("small.py"),
    SimpleNamespace(size=100, mask=4, special_ids=(0, 2, 3, 4)),
  )
  assert not read(specs.make_spec(config, vocab))
  config.update_from_flattened_dict(fields)
  assert read(specs.make_spec(config, vocab))


def test_a_change_that_is_allowed_allows_no_field_whose_name_it_begins():
  assert compare.allows("objective.mask_prob", "objective.mask_prob")
  assert not compare.allows("objective.mask_prob", "objective.mask_prob_schedule")


def test_a_run_from_before_a_field_has_the_value_that_it_then_had():
  fields = compare.upgrade({"objective.mask_prob": 0.2})
  assert fields["objective.mask_prob"] == 0.2
  assert fields["data.parts"] == 1 != files.load("base.py").data.parts


def test_the_steps_of_a_decay_are_those_that_are_set_and_fit_beside_the_warm_up():
  config = files.load("small.py")
  p, config.train.steps = config.optimizer, 1000
  p.schedule, p.decay_steps, p.warmup_steps = "wsd", 600, 400
  assert specs.make_optimizer_config(config).decay_steps == 600
  validate.check_end(config)
  p.warmup_steps = 401
  with pytest.raises(ValueError, match="must fit into train.steps=1,000 with 401 warmup_steps"):
    validate.check_end(config)


def test_a_window_may_cover_the_text_where_no_layer_has_one():
  config = files.load("small.py")
  config.data.seq_length = config.model.window // 2
  validate.check_fields(config)
  config.model.global_every = 2
  with pytest.raises(ValueError, match="window=128 covers all of"):
    validate.check_fields(config)


def test_special_tokens_have_no_frequency(built):
  data = pretrain_batches.Shards.open(built)
  assert not data.frequencies[list(data.vocab.special_ids)].any()
  assert data.frequencies.sum() == data.manifest["splits"]["train"]["tokens"]


def test_the_tables_of_gdes_are_the_generators_and_a_difference():
  mine, theirs = ({"word": np.full((3, 2), x)} for x in (5.0, 2.0))
  params = {"embeddings": mine, "discriminator": {}, "generator": {}}
  initial._share(params, theirs, "gdes")
  np.testing.assert_array_equal(params["embeddings"]["word"], 2.0)
  np.testing.assert_array_equal(params["discriminator"]["embedding_delta"]["word"], 3.0)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", False), ("cls", True)])
def test_a_sentence_transformer_pools_as_asked(tmp_path, pooling, normalize):
  huggingface.save_sentence_transformer(tmp_path, 16, pooling, normalize)
  modes = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
  assert modes["word_embedding_dimension"] == 16
  assert modes["pooling_mode_cls_token"] == (pooling == "cls")
  assert modes["pooling_mode_mean_tokens"] == (pooling == "mean")
  kinds = [
    x["type"].rpartition(".")[2] for x in json.loads((tmp_path / "modules.json").read_text())
  ]
  assert kinds == ["Transformer", "Pooling", *["Normalize"] * normalize]


def test_every_third_layer_of_an_export_attends_to_all_tokens():
  cfg = TransformerConfig(60, 16, 16, 5, 2, 24, 16, **modernbert.LAYERS, global_every=3)
  kinds = huggingface.config_json(cfg, "rtd_head", 0)["layer_types"]
  assert [kind == "full_attention" for kind in kinds] == [True, False, False, True, False]


def test_a_model_card_says_the_stage_and_the_class_for_a_new_head():
  cfg = TransformerConfig(60, 8, 16, 2, 2, 24, 16)
  network = sources_of_weights.Network(cfg, {"encoder": np.zeros(3)}, "rtd_head")
  for steps, stage in ((0, "Initial"), (9, "Pretrained")):
    source = sources_of_weights.Source({"discriminator": network}, None, {"steps": steps})
    text = card.model_card("discriminator", network, source, False)
    assert f"\n{stage} ELECTRA, exported" in text
    assert (
      'AutoModelForSequenceClassification.from_pretrained("discriminator", num_labels=2)' in text
    )


def test_a_generator_that_is_frozen_has_no_moments():
  config, vocab = (
    files.load("small.py"),
    SimpleNamespace(size=100, mask=4, special_ids=(0, 2, 3, 4)),
  )
  config.update_from_flattened_dict({"generator.kind": "frozen", "generator.tie": "none"})
  cfg = TransformerConfig(100, 8, 16, 1, 2, 24, 512)
  spec = specs.make_spec(config, vocab, frozen=cfg)
  fns = make_train_fns(spec, specs.make_optimizer_config(config), 10, 0, 1)
  moments = named(fns.shapes.opt_state)
  assert any("discriminator" in name for name in moments)
  assert not any("generator" in name for name in moments)


def test_a_network_to_fine_tune_is_named_once():
  given = ["--config=finetune/own.py", "--workdir=x", "--model=run", "--config.init=another"]
  with pytest.raises(cli.UsageError, match="give only one"):
    cli.call("finetune", given)


def test_a_short_document_that_fits_fills_the_end_of_a_record():
  spec = examples.ExampleSpec(32, "packed", False, 0.0, 0, 0.0, 0.0, 101, 102, 0)
  dtype = examples.record_dtype(32, 999, starts=True)
  stream = examples.stream([[[7] * 22], [[8] * 4]], spec, dtype)  # with its marks it has 6 of 8
  (record,), _ = examples.pack(stream, spec, dtype, last=True)
  assert record["length"] == 24 + 6


def test_two_systems_in_the_other_order_differ_with_the_same_p():
  rng = np.random.default_rng(0)
  a, b = (rng.random((1, 60, 1)) + shift for shift in (0.4, 0.0))

  def mean(scores: np.ndarray) -> dict[str, float]:
    return {"mean": float(scores.mean())}

  one, other = (
    statistics.paired_bootstrap(*pair, [mean, mean], "mean", samples=400)
    for pair in ((a, b), (b, a))
  )
  assert 0.0 < one.p == other.p < 0.1 and one.difference == -other.difference > 0


def test_a_searched_rate_keeps_the_ratio_of_the_two_networks_rates():
  names = ("learning_rate", "generator_learning_rate", "separate_optimizers")
  given = {f"optimizer.{x}": y for x, y in zip(names, (1e-3, 2e-3, True), strict=True)}
  found = jobs.at_rate("small", given, rate=4e-3, budget=0.0, steps=100)
  assert found["optimizer.learning_rate"] == 4e-3 and found["train.steps"] == 100
  assert found["optimizer.generator_learning_rate"] == pytest.approx(8e-3)


def test_the_seeds_of_a_budget_count_before_those_of_an_arm():
  arms = {"a": definition.Arm("small", seeds=5), "b": definition.Arm("small")}
  budgets = (definition.Budget(1.0), definition.Budget(2.0, seeds=2))
  found = definition.Experiment(arms, budgets, seeds=3)
  counts = [[found.seeds_of(arm, budget) for arm in arms] for budget in found.budgets]
  assert counts == [[5, 3], [2, 2]]


@pytest.mark.parametrize(
  ("words", "on"), [("--verify=false", False), ("--noverify=false", True), ("--verify", True)]
)
def test_a_switch_may_be_turned_off_by_its_value(words, on):
  assert cli.parser("train").parse([words]).verify is on


@pytest.mark.parametrize("number", ["0", "-1", "x", str(2**31)])
def test_a_batch_has_a_row_and_its_size_fits_in_32_bits(number):
  with pytest.raises(cli.UsageError, match="must be a number above 0 and below 2"):
    cli.parser("score").parse(["--model=x", f"--batch-size={number}"])


@pytest.mark.parametrize(("every", "steps"), [(5, [0, 5, 10, 12]), (0, [0, 12])])
def test_a_run_is_evaluated_at_its_ends_and_every_so_many_steps(every, steps):
  config = SimpleNamespace(eval=SimpleNamespace(every_steps=every))
  run = SimpleNamespace(
    run=SimpleNamespace(config=config), clock=SimpleNamespace(horizon=SimpleNamespace(steps=12))
  )
  assert [step for step in range(13) if loop.Loop._evaluates(run, step)] == steps


def test_a_frozen_generator_counts_forward_only_in_the_papers_flops():
  cfg = TransformerConfig(100, 8, 16, 1, 2, 24, 16)
  config, vocab = (
    files.load("small.py"),
    SimpleNamespace(size=100, mask=4, special_ids=(0, 2, 3, 4)),
  )
  config.update_from_flattened_dict({"generator.kind": "frozen", "generator.tie": "none"})
  config.data.seq_length = 16
  frozen = specs.make_spec(config, vocab, frozen=cfg)
  trained = dataclasses.replace(frozen, generator_kind="transformer")
  found = [paper.sequence_flops(spec, 16)["generator"] for spec in (frozen, trained)]
  assert 2 * found[0] == found[1]


def test_a_run_takes_its_batches_in_the_order_of_its_seed(built):
  config = files.load("base.py")
  config.seed, config.train.batch_size = 3, 8
  run = SimpleNamespace(config=config, shards=pretrain_batches.Shards.open(built))
  found = next(loop.batches_from(run, 2, (1,)))
  expected, other = (
    next(
      pretrain_batches.train_batches(run.shards, seed=s, batch_size=8, start_step=2, skipped=(1,))
    )
    for s in (3, 0)
  )
  rows = np.asarray(found.ids).reshape(8, -1)
  np.testing.assert_array_equal(rows, expected.ids)
  assert (rows != other.ids).any()
