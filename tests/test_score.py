"""Likelihoods: by NumPy, by masking one at a time, and from the command line."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import long_except, without_activities
from rich.console import Console
from test_earlier_versions import VERSIONS
from test_objectives import RATES, SPEC, fresh, make_batch

from electra_jax.core import generators, networks, objectives, schedules
from electra_jax.evaluate import likelihoods
from electra_jax.export import writer
from electra_jax.interop import huggingface, sources
from electra_jax.pretrain import train
from electra_jax.runtime.workdir import read_config


def make(objective, kind="transformer", **changes):
  spec = dataclasses.replace(SPEC, objective=objective, generator_kind=kind, **changes)
  return spec, fresh(spec)


def log_softmax(logits):
  z = np.asarray(logits, np.float64)
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def detector(spec, weights, batch):
  states = networks.main_states(spec, weights, batch.ids, batch, None)
  head = weights["discriminator"]
  return np.asarray(networks.token_logits(spec.discriminator, head, "rtd_head", states), np.float64)


def assert_scores(spec, weights, batch, expected, rtol=1e-4):
  """Checks the scores of tokens that may be masked, in float32; those of others are 0."""
  found = jax.jit(lambda w, b: objectives.token_scores(spec, w, b, None))(weights, batch)
  maskable = batch.padding_mask & ~np.isin(batch.ids, RATES.special_ids)
  expected = np.where(maskable, expected, 0)
  np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol / 10)


def original(spec, weights, batch):
  """The discriminator's probability of "original"."""
  return 1 / (1 + np.exp(detector(spec, weights, batch)))


def combined(real, q):
  """p = D q / (a (1 - D) + q), with D the probability of "original" and a = 0.75 / 0.25."""
  return real * q / (3 * (1 - real) + q)


def test_electric_scores_a_sentence_by_its_energies_in_one_pass():
  spec, weights = make("electric", "two_tower")
  batch = make_batch()
  assert_scores(spec, weights, batch, -detector(spec, weights, batch), 1e-5)


@pytest.mark.parametrize("objective", long_except(1, of=["bert", "electra"]))
def test_a_masked_language_model_is_asked_for_one_token_at_a_time(objective):
  spec, weights = make(objective)
  batch, role = make_batch(), "discriminator" if objective == "bert" else "generator"
  cfg, network = getattr(spec, role), networks.weights_of(spec, weights, role)
  log_q = np.zeros((4, 16))

  @jax.jit
  def predict(ids):
    states = networks.encode(cfg, network, ids, batch, None)
    return networks.vocabulary_logits(cfg, network, states)

  for t in range(16):
    masked_ids = batch.ids.copy()
    masked_ids[:, t] = RATES.mask_id
    logits = np.array(predict(masked_ids))
    if objective == "electra":  # never samples [MASK]
      logits[..., RATES.mask_id] = -np.inf
    log_q[:, t] = log_softmax(logits)[np.arange(4), t, batch.ids[:, t]]
  if objective == "electra":
    log_q = np.log(combined(original(spec, weights, batch), np.exp(log_q)))
  assert_scores(spec, weights, batch, log_q)


@pytest.mark.parametrize("kind", ["transformer", "uniform"])
def test_electra_15s_discriminator_is_the_likelihood_itself(kind):
  spec, weights = make("electra_15", kind)
  batch = make_batch()
  assert_scores(spec, weights, batch, np.log(original(spec, weights, batch)), 1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"unigram_share": 0.1}, "unigram_share 0"),
    ({"temperature": 2.0}, "scoring needs a run with temperature 1"),
    ({"disallow_correct": True}, "scoring needs a run with temperature 1"),
  ],
)
def test_samples_that_are_not_the_generators_own_give_no_likelihood(changes, message):
  spec, weights = make("electra", masking=dataclasses.replace(RATES, **changes))
  with pytest.raises(ValueError, match=message):
    objectives.token_scores(spec, weights, make_batch(), None)


def test_shards_of_another_vocabulary_are_refused(electra_run, tmp_path):
  hf, _ = exported(electra_run, tmp_path)
  other = tmp_path / "other"
  shutil.copytree(read_config(electra_run)["data"]["dir"], other)
  words = (other / "vocab.txt").read_text().splitlines()
  (other / "vocab.txt").write_text("\n".join([*words[:-2], *words[:-3:-1]]) + "\n")
  manifest = json.loads((other / "manifest.json").read_text())
  manifest["vocab"]["hash"] = hashlib.sha256((other / "vocab.txt").read_bytes()).hexdigest()
  (other / "manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match="and .* have different vocabularies: "):
    likelihoods.Scorer(hf, other)


def test_a_lone_masked_language_model_is_scored_as_one(tmp_path):
  cfg, words = SPEC.discriminator, "[PAD] [UNK] [CLS] [SEP] [MASK] a b".split()
  words += [f"w{i}" for i in range(cfg.vocab_size - len(words))]
  folder = tmp_path / "masked_lm"  # of an export of electra_mlm, whose other folders were deleted
  folder.mkdir()
  weights = fresh(dataclasses.replace(SPEC, objective="bert"))
  network = {"embeddings": weights["embeddings"], **weights["discriminator"]}
  huggingface.save(folder, cfg, network, "mlm_head", 0)
  (folder / "vocab.txt").write_text("\n".join(words) + "\n")
  assert likelihoods.Scorer(tmp_path)(["a b"]) == likelihoods.Scorer(folder)(["a b"])


def test_electra_with_two_towers_needs_one_pass():
  spec, weights = make("electra", "two_tower")
  batch = make_batch()
  states = generators.two_tower_states(spec, weights, batch, (None, None))
  network = networks.weights_of(spec, weights, "generator")
  logits = np.array(networks.vocabulary_logits(spec.generator, network, states))
  logits[..., RATES.mask_id] = -np.inf  # never sampled
  q = np.exp(np.take_along_axis(log_softmax(logits), batch.ids[..., None], -1)[..., 0])
  assert_scores(spec, weights, batch, np.log(combined(original(spec, weights, batch), q)))


@pytest.mark.parametrize(
  ("objective", "kind"), [("replace_mlm", "transformer"), ("electra", "uniform")]
)
def test_networks_without_likelihoods_are_refused(objective, kind):
  spec, weights = make(objective, kind)
  with pytest.raises(ValueError, match=f"{objective} with a {kind} generator cannot score text"):
    objectives.token_scores(spec, weights, make_batch(), None)


@pytest.fixture(scope="module")
def electra_run(tmp_path_factory):
  """A run of an earlier version."""
  folder = tmp_path_factory.mktemp("electra")
  shutil.copytree(VERSIONS[0], folder, dirs_exist_ok=True)
  path = folder / "run" / "config.json"
  config = json.loads(path.read_text())
  config["data"]["dir"] = str(folder / "data")
  path.write_text(json.dumps(config))
  return folder / "run"


def test_scores_do_not_depend_on_batch_or_order(electra_run):
  sentences = ["abc def", "", "a", "gh ab cd ef gh ab", "abc def"]
  scorer, one_by_one = (likelihoods.Scorer(electra_run, batch_size=n) for n in (32, 1))
  together = scorer(sentences)
  alone = [one_by_one([s])[0] for s in sentences[:2]]
  np.testing.assert_allclose(together[:2], alone, rtol=1e-5)
  assert together[0] == together[4] and together[1] == (0.0, 0)
  assert [n > 0 for _, n in together] == [True, False, True, True, True]
  fits, too_long = scorer(["a", "abcdefgh " * 20])
  assert np.isfinite(fits[0]) and np.isnan(too_long[0])
  with pytest.raises(ValueError, match=rf"line 2 has {too_long[1]} tokens, the limit is 14"):
    scorer.check_lengths([fits, too_long])


def run(workdir, text: str, *args):
  command = [sys.executable, "-m", "electra_jax.score", f"--checkpoint={workdir}", *args]
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
  return subprocess.run(
    command, input=text, capture_output=True, text=True, env=environment, timeout=300
  )


def test_the_command_prints_scores(electra_run):
  done = run(electra_run, "abc def\ngh\n")
  assert done.returncode == 0, done.stderr
  rows = [line.split("\t") for line in done.stdout.splitlines()]
  expected = likelihoods.Scorer(electra_run)(["abc def", "gh"])
  assert [(float(s), int(n)) for s, n, _ in rows] == [(round(s, 4), n) for s, n in expected]
  assert [text for _, _, text in rows] == ["abc def", "gh"]

  for wrong in ("u1 -1 abc", "u1\tnan\tabc", "u1\t-inf\tabc"):
    message = "^line 2 must be ID, TAB, finite score, TAB, hypothesis, got 'u"
    with pytest.raises(ValueError, match=message):
      likelihoods.read_nbest(["u1\t-1\tabc", wrong])


@pytest.mark.long
def test_what_was_scored_is_printed_where_a_line_is_too_long(electra_run):
  long = "abcdefgh " * 20
  done = run(electra_run, f"abc def\n{long}\ngh\n{long}\n")
  assert done.returncode == 1
  assert [line.split("\t")[2] for line in done.stdout.splitlines()] == ["abc def", "gh"]
  error = without_activities(done.stderr)
  assert error.startswith("error: line 2 has ") and error.count("\n") == 1
  assert error.endswith(" tokens, the limit is 14, and 1 more lines have too many\n")
  # The best of n, of those all of whose hypotheses fit.
  nbest = f"u1\t-1.5\tabc def\nu1\t-1\tgh\nu2\t-1\t{long}\nu2\t-3\tab\nu3\t0\ta\n"
  done = run(electra_run, f"\ufeff{nbest}", "--nbest", "--weight=0")
  assert done.stdout.splitlines() == ["u1\t-1.0000\tgh", "u3\t0.0000\ta"]
  error = without_activities(done.stderr)
  assert done.returncode == 1 and error.startswith("error: line 3 has ")


def exported(run, folder):
  """Exports of a run to Hugging Face and orbax."""
  source = sources.open_source(run)
  writer.export_hf(source, folder / "hf", Console(quiet=True))
  (folder / "orbax").mkdir()
  sources.save_orbax(folder / "orbax", source)
  return folder / "hf", folder / "orbax"


SENTENCES = ["abc def", "", "gh ab cd ef gh ab"]


@pytest.mark.long
def test_an_export_of_electric_scores_as_its_run_in_both_forms(tiny_config, tmp_path):
  tiny_config.objective.name, tiny_config.generator.kind = "electric", "two_tower"
  tiny_config.train.steps, electric_run = 2, tmp_path / "run"
  assert train.train(tiny_config, electric_run).step == 2
  expected = likelihoods.Scorer(electric_run)(SENTENCES)
  for path in exported(electric_run, tmp_path):
    np.testing.assert_allclose(likelihoods.Scorer(path)(SENTENCES), expected, rtol=1e-5)


def test_an_export_scores_as_its_run(electra_run, tmp_path):
  hf, _ = exported(electra_run, tmp_path)
  expected = likelihoods.Scorer(electra_run)(SENTENCES)
  np.testing.assert_allclose(likelihoods.Scorer(hf)(SENTENCES), expected, rtol=1e-4)
  # Also where the run computes in bfloat16, as on accelerators by default.
  path = shutil.copytree(electra_run, tmp_path / "run") / "config.json"
  config = json.loads(path.read_text())
  config["model"]["dtype"] = "bfloat16"
  path.write_text(json.dumps(config))
  np.testing.assert_allclose(likelihoods.Scorer(path.parent)(SENTENCES), expected, rtol=1e-6)


def test_a_line_that_is_no_utf_8_is_named():
  command = [sys.executable, "-m", "electra_jax.score", "--checkpoint=x"]
  for data in (b"one\ntwo\xff\n", b"\xef\xbb\xbfa\n\xff\n"):
    done = subprocess.run(command, input=data, capture_output=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr == b"error: line 2 is not UTF-8 text (invalid start byte)\n"


@pytest.mark.long
def test_both_networks_score_as_their_run_and_one_alone_where_it_can(tiny_config, tmp_path):
  tiny_config.objective.mask_prob_schedule = "0=0.5,2=0.25"
  tiny_config.train.steps, scheduled_run = 2, tmp_path / "run"
  assert train.train(tiny_config, scheduled_run).step == 2
  expected = likelihoods.Scorer(scheduled_run)(SENTENCES)
  hf, orbax = exported(scheduled_run, tmp_path)
  np.testing.assert_allclose(likelihoods.Scorer(hf)(SENTENCES), expected, rtol=1e-4)
  for alone in (orbax, hf / "discriminator"):
    with pytest.raises(ValueError, match="has no generator, which likelihoods need"):
      likelihoods.Scorer(alone)
  # The generator alone: a masked language model's pseudo-log-likelihood.
  found = likelihoods.Scorer(hf / "generator")(SENTENCES)
  assert [n for _, n in found] == [n for _, n in expected] and found != expected


def test_an_unknown_mask_rate_is_assumed_with_a_warning(electra_run, tmp_path):
  hf, _ = exported(electra_run, tmp_path)
  path = hf / "discriminator" / "config.json"
  config = json.loads(path.read_text())
  assert config.pop("electra_jax")["mask_prob"] == 0.25
  path.write_text(json.dumps(config))
  # A generator is a masked language model, in whatever folder.
  assert "electra_jax" not in json.loads((hf / "generator" / "config.json").read_text())
  with pytest.warns(UserWarning, match="does not say its mask rate: assuming 0.15"):
    scorer = likelihoods.Scorer(hf)
  assert scorer.spec.masking.mask_prob.at(None) == 0.15
  from test_exchange import save_tf1

  source = sources.open_source(electra_run)
  heads = source.networks["discriminator"].cfg.num_heads
  prefix = save_tf1(tmp_path / "tf1" / "model.ckpt-2", source)
  prefix.with_name("config.json").write_text(json.dumps({"num_attention_heads": heads}))
  with pytest.warns(UserWarning, match="assuming 0.15"):
    found = likelihoods.Scorer(prefix)(SENTENCES)
  np.testing.assert_allclose(found, scorer(SENTENCES), rtol=1e-4)
  prefix.with_name("vocab.txt").unlink()
  with pytest.warns(UserWarning), pytest.raises(ValueError, match="has no vocabulary: add its"):
    likelihoods.Scorer(prefix)
  data = read_config(electra_run)["data"]["dir"]
  with pytest.warns(UserWarning):
    assert likelihoods.Scorer(prefix, data)(SENTENCES) == found


def test_likelihoods_take_the_mask_rate_of_the_checkpoints_step():
  falling = schedules.Schedule(0.9, schedules.parse("0=0.5,10=0.25", 10))
  spec, weights = make("electra", masking=dataclasses.replace(RATES, mask_prob=falling))
  batch = make_batch()
  at_10 = np.asarray(objectives.token_scores(spec, weights, batch, 10))
  fixed, _ = make("electra", masking=dataclasses.replace(RATES, mask_prob=0.25))
  np.testing.assert_array_equal(at_10, objectives.token_scores(fixed, weights, batch, 10))
  assert (at_10 != np.asarray(objectives.token_scores(spec, weights, batch, 0))).any()


def test_samples_at_another_temperature_by_schedule_give_no_likelihood():
  falling = schedules.Schedule(1.0, schedules.parse("0=2,10=1", 10))
  spec, weights = make("electra", masking=dataclasses.replace(RATES, temperature=falling))
  with pytest.raises(ValueError, match="scoring needs a run with temperature 1"):
    objectives.token_scores(spec, weights, make_batch(), 5)
  assert np.isfinite(objectives.token_scores(spec, weights, make_batch(), 10)).all()
