"""Minimal pairs, fixed-noise detection and probes, against NumPy, other paths and other formats."""

import csv
import dataclasses
import gzip
import json
import lzma
import random
import shutil
import signal

import jax
import numpy as np
import pytest
from conftest import make_tiny_config
from rich.console import Console

from electra_jax.commands import cli
from electra_jax.core import networks, objectives
from electra_jax.core.batch import from_rows
from electra_jax.data.pretrain_batches import Shards
from electra_jax.evaluate import likelihoods, measures, pairs, probe, scorers
from electra_jax.evaluate.pairs import Pair
from electra_jax.export import writer
from electra_jax.finetune import tagging
from electra_jax.finetune.batches import subset
from electra_jax.interop import huggingface, sources
from electra_jax.monitor import journal, metrics
from electra_jax.pretrain import train
from electra_jax.pretrain.run import prepare
from electra_jax.runtime import processes

RNG = random.Random(3)


def sentence(words: int, rng=RNG) -> str:
  return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(1, 4))) for _ in range(words))


SENTENCES = [sentence(1 + i % 4) for i in range(23)]


def write_pairs(path, found):
  lines = ({"sentence_good": p.good, "sentence_bad": p.bad, "UID": p.paradigm} for p in found)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("pairs")
  found = [Pair(a, b, f"p{i % 2}", "all") for i, (a, b) in enumerate(zip(SENTENCES, SENTENCES[1:]))]  # noqa: B905
  return write_pairs(folder / "pairs.jsonl", found), found


def two_steps(shards: str, path):
  """A run of two steps that scores nine pairs."""
  config = make_tiny_config(shards)
  config.train.steps, config.eval.every_steps = 2, 2
  config.eval.pairs, config.eval.max_pairs = str(path), 9
  return config


@pytest.fixture(scope="module")
def electra(tiny_shards, tmp_path_factory, files):
  workdir = tmp_path_factory.mktemp("electra")
  train.train(two_steps(tiny_shards, files[0]), workdir)
  return workdir


@pytest.fixture(scope="module")
def bert(electra, tmp_path_factory):
  """A masked language model: the generator of that run, alone."""
  folder = tmp_path_factory.mktemp("bert") / "hf"
  writer.export_hf(sources.open_source(electra), folder, Console(quiet=True))
  return folder / "generator"


def scores_of(source, scorer, sentences=SENTENCES):
  network = scorers.network_for(scorer, source.networks, "x")
  made = scorers.SentenceScorer(scorer, network.cfg, source.tokenizer)
  return made(network.weights, sentences)


def test_pseudo_log_likelihoods_are_those_of_the_scoring_program(bert):
  expected = [log_p for log_p, _ in likelihoods.Scorer(bert)(SENTENCES)]
  # Sums of a dozen float32 terms in batches of other shapes.
  np.testing.assert_allclose(scores_of(sources.open_source(bert), "mlm"), expected, rtol=1e-5)


def logits_of(source, network, text):
  """Returns the ids of a sentence alone and the logits at its tokens."""
  tokens = source.tokenizer
  (ids,) = tokens.encode_batch([text])
  row = np.array([[tokens.vocab.cls, *ids, tokens.vocab.sep]], np.int32)
  batch = scorers.Batch(row, np.zeros_like(row), np.ones(row.shape, bool), np.zeros(1, np.int32))
  return ids, np.float64(writer.logits(source.networks[network], batch))[0, 1:-1]


def test_an_unmasked_score_is_the_sum_of_log_softmax_at_each_token_itself(electra):
  source = sources.open_source(electra)
  few = SENTENCES[:4]
  for text, score_ in zip(few, scores_of(source, "mlm_unmasked", few), strict=True):
    ids, logits = logits_of(source, "generator", text)
    own = logits[np.arange(len(ids)), ids] - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(score_, own.sum(), rtol=1e-5)


def test_a_discriminators_score_is_the_sum_of_log_sigmoids_of_each_sentence_alone(electra):
  source = sources.open_source(electra)
  few = SENTENCES[:4]  # each is another shape, which compiles
  scores, energies = (scores_of(source, name, few) for name in ("rtd", "energy"))
  for text, real, energy in zip(few, scores, energies, strict=True):
    logits = logits_of(source, "discriminator", text)[1]
    np.testing.assert_allclose(real, -np.log1p(np.exp(logits)).sum(), rtol=1e-5)
    np.testing.assert_allclose(energy, -logits.sum(), rtol=1e-4, atol=1e-5)


def test_a_score_does_not_depend_on_the_other_sentences(electra):
  source = sources.open_source(electra)
  words = source.networks["generator"]
  weights = {**words.weights, "clm_head": words.weights["mlm_head"]}
  causal = dataclasses.replace(words, weights=weights, head="clm_head")
  source = dataclasses.replace(source, networks=source.networks | {"causal": causal})
  for scorer in scorers.SCORERS:
    together = scores_of(source, scorer)
    alone = np.concatenate([scores_of(source, scorer, [s]) for s in SENTENCES[:3]])
    np.testing.assert_allclose(together[:3], alone, rtol=1e-5)


def test_the_later_pieces_of_a_word_are_masked_with_a_token():
  ids, continues = [1, 10, 11, 12, 13, 2], [False, False, True, True, False, False]
  of = scorers.SCORERS["mlm_words"].rows
  assert list(of(ids, continues, 99)) == [
    ([1, 99, 99, 99, 13, 2], 1, 10),
    ([1, 10, 99, 99, 13, 2], 2, 11),
    ([1, 10, 11, 99, 13, 2], 3, 12),
    ([1, 10, 11, 12, 99, 2], 4, 13),
  ]
  assert [row[0].count(99) for row in scorers.SCORERS["mlm"].rows(ids, continues, 99)] == [1] * 4


def test_words_are_those_of_berts_tokenizer(words):
  texts = ["The café, in Berlin! cafe中国 (e1a2) fe-fe", "...", "é e"]
  for text, (ids, spans) in zip(texts, words.encode_offsets(texts), strict=True):
    pieces = [words.decode([i]) for i in ids]
    assert scorers.continues_word(text, spans) == [p.startswith("##") for p in pieces]


def test_training_reports_what_the_program_finds(electra, files, tmp_path, capsys):
  last = metrics.read_history(electra / "metrics.jsonl")[-1]
  source, few = sources.open_source(electra), subset(files[1], 9)
  scores = scores_of(source, "rtd", [p.good for p in few] + [p.bad for p in few])
  assert last["pairs_accuracy"] == (scores[:9] > scores[9:]).mean()
  assert journal.read(electra)[0]["pairs"] == 9
  path, out = write_pairs(tmp_path / "few.jsonl", few), tmp_path / "new" / "out"
  cli.call("evaluate", ["pairs", f"--model={electra}", f"--data={path}", f"--out={out}"])
  assert f"9 pairs, rtd: {100 * last['pairs_accuracy']:.2f} %" in capsys.readouterr().out
  found = json.loads((out / "pairs.json").read_text())
  assert found["all"]["accuracy"] == last["pairs_accuracy"]
  assert sum(a["pairs"] for a in found["paradigms"].values()) == 9
  assert (out / "pairs.png").stat().st_size > 10_000


def pair_of(good: str, bad: str) -> Pair:
  return Pair(good, bad, "p", "all")


def test_pairs_that_are_too_long_are_left_out_and_equal_ones_are_named(electra):
  source = sources.open_source(electra)
  network = source.networks["discriminator"]
  scorer = scorers.SentenceScorer("rtd", network.cfg, source.tokenizer)
  long, same = pair_of(sentence(40), "a"), pair_of("A b", "a B")
  empty = pair_of("\u200b", "a")  # its zero tokens would have the highest score
  kept, warnings = pairs.fitting(scorer, [long, pair_of("a b", "b"), same, empty])
  assert [pair.good for pair in kept] == ["a b", "A b"]
  assert warnings == [
    "2 pairs with a sentence with 0 or more than 14 tokens are skipped",
    "1 pairs have two equal token sequences, which counts as wrong",
  ]
  with pytest.raises(ValueError, match="all pairs have a sentence with 0 or more than 14 tokens"):
    pairs.fitting(scorer, [long])


def test_a_stop_while_pairs_are_scored_ends_the_run_and_they_are_scored_where_it_goes_on(
  electra, tiny_shards, files, tmp_path, monkeypatch
):
  def start(*args):
    nonlocal batches
    batches += 1
    if batches == 2:
      signal.raise_signal(signal.SIGTERM)
    return real(*args)

  config = two_steps(tiny_shards, files[0])
  monkeypatch.setattr(processes, "initialize", lambda *args: None)  # JAX has been started here
  batches, real, before = 0, scorers.from_rows, signal.getsignal(signal.SIGUSR2)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(scorers, "from_rows", start)
    try:
      assert train.run(config, tmp_path) == 143
      assert batches == 2  # of more
      assert train.run(config, tmp_path) == 0
    finally:
      signal.signal(signal.SIGUSR2, before)
  ends = [metrics.read_history(folder / "metrics.jsonl")[-1] for folder in (electra, tmp_path)]
  assert ends[0] == ends[1]
  assert ends[0]["pairs_accuracy"] > 0


def test_a_run_says_which_of_its_pairs_it_leaves_out(tiny_config, tmp_path):
  long = pair_of("a " * 15, "b")
  path = write_pairs(tmp_path / "pairs.jsonl", [long, pair_of("a b", "b")])
  tiny_config.eval.pairs = str(path)
  with pytest.warns(UserWarning, match="^config.eval.pairs: 1 pairs with a sentence"):
    run = prepare(tiny_config, tmp_path / "run", verify=False)
  assert len(run.pairs.pairs) == 1
  write_pairs(path, [long])
  with pytest.raises(ValueError, match=f"^config.eval.pairs={path}: all pairs have"):
    prepare(tiny_config, tmp_path / "run", verify=False)


def test_pairs_without_held_out_documents_are_refused(tiny_config, electra, files, tmp_path):
  folder = tmp_path / "shards"
  shutil.copytree(tiny_config.data.dir, folder)
  manifest = json.loads((folder / "manifest.json").read_text())
  manifest["splits"]["heldout"]["examples"] = 0  # as of data.holdout_frac=0
  (folder / "manifest.json").write_text(json.dumps(manifest))
  tiny_config.data.dir, tiny_config.eval.pairs = str(folder), str(files[0])
  with pytest.raises(
    ValueError, match=f"^eval.pairs needs evaluations, but {folder} has no held-out"
  ):
    prepare(tiny_config, tmp_path / "run", verify=False)
  assert prepare(tiny_config, electra, verify=False).heldout is None  # a run that began before
  tiny_config.eval.pairs = None
  assert prepare(tiny_config, tmp_path / "run", verify=False).heldout is None


def test_a_pair_of_equal_scores_is_wrong_and_one_of_nan_is_refused():
  found = [pair_of("a", "b")] * 3
  scores = [2.0, 1.0, 1.0, 1.0, 1.0, 2.0]  # of the acceptable sentences, then of the others
  margins = pairs.margins(lambda *_: np.array(scores), {}, found)
  assert margins.tolist() == [1.0, 0.0, -1.0]
  assert pairs.Suite(lambda *_: np.array(scores), found).accuracy({}, lambda: None) == 1 / 3
  with pytest.raises(metrics.NotFiniteError, match="scores of 1 of 2 sentences are not finite"):
    pairs.margins(lambda *_: np.array([0.0, np.nan]), {}, found[:1])


def test_an_interval_is_wilsons():
  from scipy.stats import binomtest

  for hits, n in ((0, 5), (3, 4), (517, 1000), (7, 7)):
    found = pairs.accuracy(np.arange(n) < hits)
    expected = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose((found.low, found.high), expected, atol=1e-6)


def test_a_file_of_pairs_is_read_compressed_or_plain(tmp_path, files):
  path, found = files
  (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b"\n" + path.read_bytes()))
  assert pairs.read(tmp_path / "p.jsonl.gz") == pairs.read(path) == found
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  columns = list(rows[0])
  with open(tmp_path / "p.csv", "w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([columns, *([row.get(c) for c in columns] for row in rows)])
  assert pairs.read(tmp_path / "p.csv") == found
  assert [p.good for p in subset(found, 2)] == [found[0].good, found[11].good]


LINE = b'{"sentence_good": "a", "sentence_bad": "b"}\n' + random.Random(0).randbytes(9999)


@pytest.mark.parametrize(
  ("content", "why"),
  [
    ("\n{}\n", ":2 has no column 'sentence_good'"),
    ('{"sentence_good": "a", "sentence_bad": 3}', ":1: .* must be non-empty texts"),
    ('{"sentence_good": "a", "sentence_bad": "b", "UID": [1]}', ":1: UID and .* texts or numbers"),
    ('{"sentence_good": " ", "sentence_bad": "a"}', ":1: .* must be non-empty texts"),
    ("[1]", ":1: not a JSON object"),
    ("{", ":1: not a JSON object"),
    ('{"sentence_good": "\\ud800", "sentence_bad": "a"}', ":1: not UTF-8"),
    (gzip.compress(LINE, mtime=0)[:-4999], "p.jsonl.gz: cannot be read"),
    (lzma.compress(LINE)[:-4999], "p.jsonl.xz: cannot be read"),
  ],
)
def test_a_wrong_file_of_pairs_is_refused_in_a_line(tmp_path, content, why):
  path = tmp_path / (why.partition(":")[0] or "p.jsonl")
  path.write_bytes(content.encode() if isinstance(content, str) else content)
  with pytest.raises(ValueError, match=why) as error:
    pairs.read(path)
  assert "\n" not in str(error.value)


def test_a_scorer_is_chosen_by_objective_and_heads_and_needs_its_head(bert):
  with pytest.raises(ValueError, match="has no rtd_head, which the scorer rtd needs"):
    scores_of(sources.open_source(bert), "rtd")
  assert scorers.default("bert", {"mlm_head"}) == "mlm"
  assert scorers.default("electric", {"rtd_head"}) == "energy"
  assert scorers.default(None, {"rtd_head", "mlm_head"}) == "rtd"
  # Words learned from replacements are scored without masks.
  for objective in ("replace_mlm", "all_tokens_mlm", "electra_mlm", "metro", "coco_lm"):
    assert scorers.default(objective, {"mlm_head"}) == "mlm_unmasked"
  for objective in ("electra_mlm", "metro", "coco_lm"):
    assert scorers.default(objective, {"rtd_head", "mlm_head"}) == "rtd"
  # An exported generator is a masked language model, whatever it served.
  assert sources.open_source(bert).training is None
  assert sources.open_source(bert.parent).training["objective"] == "electra"
  for definition in objectives.OBJECTIVES.values():
    assert {scorers.SCORERS[name].head for name in definition.scorers} <= set(definition.heads)


def test_fixed_noise_is_detected_as_in_the_runs_evaluation(electra, tiny_shards):
  last = metrics.read_history(electra / "metrics.jsonl")[-1]
  heldout, training = (Shards.open(tiny_shards, split) for split in ("heldout", "train"))
  network = sources.open_source(electra).networks["discriminator"]
  config = make_tiny_config(tiny_shards)
  found = measures.detection_auc(
    network, heldout, training.frequencies, 8, config.eval.max_examples
  )
  assert found == pytest.approx(last["unigram_auc"], abs=1e-6)
  with pytest.raises(ValueError, match="batch size 7 is not divisible by 8 devices"):
    measures.detection_auc(network, heldout, training.frequencies, 7, 8)


def test_networks_are_evaluated_in_full_precision(electra, tiny_shards, monkeypatch):
  # On a CPU a product is the same with any; on accelerators one of float32 is not.
  used, real = [], networks.encode

  def encode(*args):
    used.append(jax.config.jax_default_matmul_precision)
    return real(*args)

  monkeypatch.setattr(networks, "encode", encode)
  source = sources.open_source(electra)
  network, tags = source.networks["discriminator"], [tagging.Sentence(("ab", "c"), ("X", "Y"), "x")]
  heldout = Shards.open(tiny_shards, "heldout")
  for evaluation in (
    lambda: likelihoods.Scorer(electra)(SENTENCES[:2]),
    lambda: scores_of(source, "rtd", SENTENCES[:2]),
    lambda: measures.detection_auc(network, heldout, heldout.frequencies, 8, 8),
    lambda: probe.run(network, source.tokenizer, tags, tags, 9),
  ):
    used.clear()
    evaluation()
    assert set(used) == {"highest"}


def test_ids_that_a_network_does_not_have_are_not_detected(electra, tiny_shards, tmp_path):
  network = sources.open_source(electra).networks["discriminator"]
  tables = network.weights["embeddings"]
  few = {**network.weights, "embeddings": {**tables, "word": tables["word"][:40]}}
  cfg = dataclasses.replace(network.cfg, vocab_size=40)
  (tmp_path / "few").mkdir()
  huggingface.save(tmp_path / "few", cfg, few, "rtd_head", 0)
  with pytest.raises(ValueError, match="40"):
    cli.call("evaluate", ["detect", f"--model={tmp_path / 'few'}", f"--data={tiny_shards}"])


def test_an_exported_network_keeps_its_role_under_another_name(electra, tmp_path):
  network = sources.open_source(electra).networks["generator"]
  for objective, role in (("bert", "discriminator"), ("electra", "generator")):
    trained = {huggingface.TRAINING: {"objective": objective}}
    huggingface.save(tmp_path, network.cfg, network.weights, network.head, 0, others=trained)
    assert list(sources.open_source(tmp_path).networks) == [role]


def test_dimensions_of_states_count_directions_of_equal_variance():
  axes = np.concatenate([np.eye(6), -np.eye(6)])  # [12, 6], each direction as wide as the others
  assert probe.effective_dimensions(axes) == pytest.approx(6)
  assert probe.effective_dimensions(axes[:, :2] @ np.ones((2, 6))) == pytest.approx(1)
  assert probe.effective_dimensions(3 * axes[[0, 1, 6, 7]] + 5) == pytest.approx(2)
  wide = axes * [3, 1, 1, 1, 1, 1]  # variances 9 and five of 1, by hand: 14² / (81 + 5)
  assert probe.effective_dimensions(wide) == pytest.approx(196 / 86)


def test_a_probe_finds_tags_that_the_words_tell_and_no_others(electra):
  source = sources.open_source(electra)
  network = source.networks["discriminator"]
  rng = random.Random(1)  # its own, so that no other test changes its words
  words = [sentence(5, rng).split() for _ in range(120)]

  def tagged(tag_of):
    return [tagging.Sentence(tuple(s), tuple(map(tag_of, s)), "x") for s in words]

  told = tagged(lambda word: "X" if word[0] in "abcd" else "Y")
  chance = tagged(lambda word: rng.choice("XY"))
  parts = ((of[:80], of[80:], 1000) for of in (told, chance))
  first, second = (probe.run(network, source.tokenizer, *part) for part in parts)
  assert first.words == 400 and first.labels == 2
  assert 1 < first.dimensions == second.dimensions < 16
  # 200 words: chance is 50 with a standard error of 3.5; a network of width 16 tells most letters.
  assert first.metrics["accuracy"] > 70 and 35 < second.metrics["accuracy"] < 65
  layers = probe.score_layers(network, source.tokenizer, told[:80], 1000)
  held_out = probe.run(network, source.tokenizer, told[:72], told[72:80], 1000)
  assert layers.keys() == {1, 2} and layers[2] == held_out.metrics["accuracy"] and layers[1] > 60
  late = [*tagged(lambda _: "X"), *told]
  for words_, count in ((tagged(lambda _: "X"), 1000), (late, 9), (tagged(lambda _: "S-A"), 1000)):
    with pytest.raises(ValueError, match="all .* training words have the tag (X|S-A)"):
      probe.run(network, source.tokenizer, words_, words_, count)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_layers_do_not_read_those_above(electra, layer):
  network = sources.open_source(electra).networks["discriminator"]
  at, encoder = np.arange(2) == layer, network.weights["encoder"]
  changed = jax.tree.map(lambda x: (x.T + at).T, encoder["layers"])
  weights = {**network.weights, "encoder": {**encoder, "layers": changed}}
  other = dataclasses.replace(network, weights=weights)
  batch = from_rows([[2, 7, 8, 9, 3]], (1, 8), 0)
  for count in (1, 2):
    one, two = (
      np.asarray(networks.encode(x.cfg, x.weights, batch.ids, batch, None))
      for x in (network.first_layers(count), other.first_layers(count))
    )
    assert np.array_equal(one, two) == (layer >= count)
  whole = networks.encode(network.cfg, network.weights, batch.ids, batch, None)
  np.testing.assert_array_equal(whole, one)


def test_lengths_of_batches_hold_their_rows():
  for n in range(1, 513):
    padded = scorers.padded_length(n, 512)
    assert n <= padded <= 512 and padded - n < 64
  lengths = sorted(RNG.choices(range(3, 90), k=500))
  rows = [scorers.Row([0] * n, i) for i, n in enumerate(lengths)]
  seen = list(scorers.plan(iter(rows), 96))
  assert [row for batch, _ in seen for row in batch] == rows
  assert all(len(row.ids) <= length for batch, (_, length) in seen for row in batch)
