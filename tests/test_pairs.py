"""Text embeddings: the loss and its gradient by NumPy, what is read, trained, measured and used."""

import csv
import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest
from conftest import long_except
from scipy import stats
from sklearn.metrics import ndcg_score
from test_finetune import CFG, WORDS, both, make_config, refused, run, source  # noqa: F401

from electra_jax.core import embedding_head, step, task_network
from electra_jax.core.batch import Batch
from electra_jax.core.params import AXIS
from electra_jax.core.task_network import HeadSpec
from electra_jax.data import tokenizer
from electra_jax.finetune import batches, metrics, model, prepare, sentence_pairs
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.task_data import TaskInfo
from electra_jax.interop import sources
from electra_jax.runtime import parallel

LOW, HIGH = 0.05, 1.0  # temperatures
ARGUMENTS = {"pooling": "mean", "temperature": LOW, "texts": 3}


def ranking_loss(texts: list[list[int]], vectors, temperature: float) -> float:
  """The mean loss of rows of texts, float64: by its formula, a row and a candidate at a time.

  Args:
    texts: for each row the numbers of its anchor, its positive and its negatives.
    vectors: the vector of each text in each row.
  """
  units = [[v / np.sqrt((v * v).sum()) for v in np.asarray(row, np.float64)] for row in vectors]
  losses = []
  for row, (anchor, positive, *_) in zip(texts, units, strict=True):
    right = np.exp(anchor @ positive / temperature)
    wrong = [
      np.exp(anchor @ vector / temperature)
      for other, theirs in zip(texts, units, strict=True)
      for text, vector in zip(other[1:], theirs[1:], strict=True)
      if text not in row[:2]
    ]
    losses.append(-np.log(right / (right + sum(wrong))))
  return float(np.mean(losses))


# On two devices: a row without a negative, two rows with one positive, an anchor that is another
# row's negative.
TEXTS = [[1, 2, 3], [4, 5], [6, 2, 1]]


@pytest.mark.parametrize("pooling", embedding_head.POOLINGS)
def test_the_loss_and_its_gradient_are_those_of_numpy(pooling):
  rng, L, D = np.random.default_rng(0), 12, 5
  head = embedding_head.make_head(pooling, HIGH, 3)
  states = rng.normal(size=(4, L, D))
  documents, numbers = np.zeros((2, 4, L), np.int32)
  for i, row in enumerate(TEXTS):
    at = np.repeat(np.arange(len(row)), rng.integers(1, 4, len(row)))
    documents[i, : len(at)], numbers[i, : len(at)] = at + 1, np.array(row)[at]
  documents, numbers, rows = documents[[0, 1, 3, 2]], numbers[[0, 1, 3, 2]], [0, 1, 3]

  def by_hand(states):
    pooled = [
      [states[i][documents[i] == 1 + k] for k in range(len(row))]
      for i, row in zip(rows, TEXTS, strict=True)
    ]
    of_text = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0]}[pooling]
    return ranking_loss(TEXTS, [[of_text(x) for x in row] for row in pooled], HIGH)

  def on_devices(states):
    def of_device(states, documents, numbers):
      batch = Batch(None, None, documents > 0, None, documents, {"text": numbers})
      term = head.loss(None, {}, states, batch, None)["loss"]
      return term.total, term.count

    parts = (x.reshape(2, 2, *x.shape[1:]) for x in (states, documents, numbers))
    totals, counts = jax.vmap(of_device, axis_name=AXIS)(*parts)
    return totals.sum() / counts.sum()

  loss, gradient = jax.value_and_grad(on_devices)(states.astype(np.float32))
  np.testing.assert_allclose(loss, by_hand(states), rtol=1e-6)  # float32 has 7 digits
  for seed in (1, 2, 3):
    move = 1e-5 * np.random.default_rng(seed).normal(size=states.shape)
    slope = (by_hand(states + move) - by_hand(states - move)) / 2
    np.testing.assert_allclose((np.asarray(gradient, np.float64) * move).sum(), slope, rtol=1e-4)
  assert not np.asarray(gradient)[documents == 0].any()


@pytest.mark.parametrize("seeds", [1, 2])
def test_wide_texts_in_a_row_are_pooled_as_by_numpy_for_any_number_of_seeds(seeds):
  """64 rows of 512: XLA compiled wrong code for a mapped masked sum of this size."""
  states = np.random.default_rng(0).normal(2, 1, (seeds, 64, 10, 512)).astype(np.float32)
  masks = np.tile(np.repeat(np.eye(2, dtype=bool), 5, 1), (64, 1, 1))
  expected = states.astype(np.float64).reshape(seeds, 64, 2, 5, 512).mean(3)

  def of_seed(states):
    pooled = embedding_head.POOLINGS["mean"](states, masks)
    return pooled, pooled[:, 0] @ pooled[:, 1].T

  for mapped in (jax.vmap(of_seed), lambda x: jax.lax.map(of_seed, x)):
    # Means of five numbers near 2 in float32.
    np.testing.assert_allclose(jax.jit(mapped)(states)[0], expected, atol=5e-6)


MODERN = dataclasses.replace(
  CFG, block="pre_norm", norm="layer_norm", feed_forward="geglu", positions="rope",
  token_types=False, global_every=2, window=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def words(source):  # noqa: F811
  return tokenizer.load(source / "vocab.txt")


def pairs_of(rows: list[list[str]]) -> sentence_pairs.Pairs:
  """Returns rows of distinct texts."""
  texts = [text for row in rows for text in row]
  place = {text: i for i, text in enumerate(texts)}
  return sentence_pairs.Pairs(texts, [[place[text] for text in row] for row in rows], None, [])


def some_rows(n: int) -> list[list[str]]:
  rng = np.random.default_rng(0)
  texts = [" ".join(rng.choice(WORDS, rng.integers(3, 20))) for _ in range(3 * n)]
  assert len(set(texts)) == len(texts)
  return [texts[3 * i : 3 * i + 2 + i % 2] for i in range(n)]


@pytest.mark.parametrize("cfg", long_except(1, of=[CFG, MODERN]), ids=["electra", "modern"])
def test_a_step_is_the_same_on_one_and_eight_devices_and_ranks_what_is_predicted(cfg, words):
  """Rows of three documents, longer than the network's positions, embed as each text alone does."""
  info = TaskInfo("pairs", "x", HeadSpec("embedding", ARGUMENTS), 32)
  rows = some_rows(14)
  features = sentence_pairs._train_rows(info, pairs_of(rows), words)
  (length,) = batches.bucket_lengths(np.array([len(f.ids) for f in features]), 1, 32)
  assert length > cfg.max_positions == 32
  batch = batches.collate(features, batches.Plan(np.arange(14), length), 16, words.vocab.pad)
  head = info.head.make()
  params = jax.jit(lambda: task_network.init_backbone(cfg, jax.random.key(0)))() | {"head": {}}
  found = {}
  for rate in (0.0, 0.1):
    own = dataclasses.replace(cfg, dropout=rate, attention_dropout=rate)
    one = step.make_train_step(
      task_network.make_objective(own, head), optax.sgd(0.1), lambda step: 0.1, seed=0
    )
    for devices in (1, 8):
      mapped = parallel.map_train_step(one, devices=jax.devices()[:devices])
      state = step.init_state(jax.tree.map(np.asarray, params), optax.sgd(0.1))
      parts = jax.tree.map(lambda x, d=devices: x.reshape(d, -1, *x.shape[1:]), batch)
      state, packed = mapped(state, parts)
      found[rate, devices] = packed.unpack(packed.read())["loss"], jax.device_get(state.params)
    # Sums in another order; a row's dropout is a function of its place in the global batch.
    np.testing.assert_allclose(found[rate, 1][0], found[rate, 8][0], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(found[rate, d][1]) for d in (1, 8)), strict=True):
      np.testing.assert_allclose(a, b, atol=2e-5)
  assert found[0.0, 1][0] != pytest.approx(found[0.1, 1][0], rel=1e-3)

  weights = jax.tree.map(lambda x: np.asarray(x)[None], params)
  vectors = model.Model(info, cfg, words, weights)([text for row in rows for text in row])
  by_row = np.split(vectors, np.cumsum([len(row) for row in rows])[:-1])
  expected = ranking_loss(pairs_of(rows).rows, by_row, LOW)
  np.testing.assert_allclose(found[0.0, 8][0], expected, rtol=1e-4)  # cosines / 0.05 in float32


def test_retrieval_is_measured_as_scikit_learn_does():
  rng = np.random.default_rng(0)
  for n, m in [(3, 1), (30, 1), (30, 4), (200, 15), (12, 12)]:
    scores, is_relevant = rng.normal(size=n), np.zeros(n, bool)
    is_relevant[rng.choice(n, m, replace=False)] = True
    ndcg, mrr, accuracy = metrics.retrieval(scores, is_relevant)
    np.testing.assert_allclose(ndcg, ndcg_score([is_relevant], [scores], k=10))
    first = 1 + int(np.flatnonzero(is_relevant[np.argsort(-scores)])[0])
    assert (mrr, accuracy) == (1 / first if first <= 10 else 0, first == 1)
  assert metrics.retrieval(np.zeros(30), np.arange(30) == 0) == (0, 0, 0)


def write_csv(path, *rows) -> str:
  with open(path, "w", encoding="utf-8", newline="") as file:
    csv.writer(file).writerows(rows)
  return str(path)


def test_columns_are_those_that_are_named_or_all_in_order(tmp_path):
  path = write_csv(tmp_path / "a.csv", "qpnm", ("q1", "p, 1", "n1", ""), ("q2", "p, 1", "", "m2"))
  read = functools.partial(sentence_pairs.read, path)
  found = read("train")
  assert found.texts == ["q1", "p, 1", "n1", "q2", "m2"]
  assert found.rows == [[0, 1, 2], [3, 1, 4]] and found.notes == ["2 rows of q, p, n, m"]
  assert read("train", "p, q").texts == ["p, 1", "q1", "q2"]
  assert read("train", None, 1).notes == ["1 of 2 rows of q, p, n, m"]
  assert read("dev", "q,p").gold is None
  lines = [{"sentence1": "a", "sentence2": "b", "score": x} for x in (1, "2.5")]
  (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
  found = sentence_pairs.read(str(tmp_path / "b.jsonl"), "dev")
  assert found.gold == [1, 2.5] and found.rows == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
  ("role", "named", "rows", "why"),
  [
    ("train", None, [], "a.csv: the file is empty"),
    ("train", None, ["ab"], "a.csv: the file has no rows"),
    ("train", "a,x", ["ab", "cd"], r"a.csv:1 has no column 'x' \(columns: a, b\)"),
    ("train", None, ["a", "c"], "name an anchor, its positive .* with config.pairs.train_columns"),
    ("train", None, [("a", "b", "score"), "cd1"], "the columns a, b, score: name an anchor"),
    ("dev", None, ["abcd", "efgh"], "name two texts and.* with config.pairs.dev_columns"),
    (
      "dev",
      None,
      ["abc", "de1", ("d", "e", "f")],
      r"a.csv:3: column 'c', the score, is not a number \(1 of 2 rows",
    ),
    ("train", None, ["ab", "cd", ("", "x")], r"a.csv:3: 'a' is empty \(1 of 2 rows are bad"),
    ("train", None, ["ab", "cde"], "a.csv:2: 3 columns instead of 2"),
  ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(tmp_path, role, named, rows, why):
  with pytest.raises(TaskError, match=why) as error:
    sentence_pairs.read(write_csv(tmp_path / "a.csv", *rows), role, named)
  assert "\n" not in str(error.value)


def test_one_bad_row_in_a_hundred_is_left_out_and_named(tmp_path):
  path = write_csv(tmp_path / "a.csv", "ab", *["cd"] * 99, ("x", " "))
  found = sentence_pairs.read(path, "train")
  assert len(found.rows) == 99 and "1 rows left out: " in found.notes[1]
  assert found.notes[1].endswith("a.csv:101: 'b' is empty")


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):  # noqa: F811
  """Folders of files and of results: an answer repeats the word that its query begins with."""
  folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)

  def texts(word):
    return [" ".join([word, *rng.choice(WORDS[20:], 3)]) for _ in range(2)]

  rows = [texts(WORDS[i % 20]) for i in range(320)]
  write_csv(folder / "train.csv", ("anchor", "positive"), *rows)
  write_csv(folder / "dev.csv", ("query", "answer"), *map(texts, WORDS[:20]))
  first = [texts(word)[0] for word in WORDS[:20]]
  scored = [(a, b, float(i == j)) for i, a in enumerate(first) for j, b in enumerate(first)]
  write_csv(folder / "test.csv", ("sentence1", "sentence2", "score"), *scored[:200])
  config = make_config("pairs", "words", source, **both(folder, "csv"), train__batch_size=16)
  config.data.test = str(folder / "test.csv")
  return config, folder, run(config, folder / "results")


def test_what_is_trained_is_found_and_measured_as_it_was_written(trained):
  _, folder, rows = trained
  dev, test = ([r["metrics"] for r in rows if r["split"] == split] for split in ("dev", "test"))
  assert all(list(found) == list(metrics.RETRIEVAL) for found in dev)
  assert min(found["ndcg@10"] for found in dev) > 70  # by chance 23: 10 of 20 ranks count
  lines = (folder / "results" / "words" / "predictions" / "test.tsv").read_text().splitlines()
  cosines = [float(line.split("\t")[1]) for line in lines[1:]]
  gold = [float(row["score"]) for row in csv.DictReader((folder / "test.csv").open())]
  expected = 100 * stats.spearmanr(gold, cosines).statistic
  # Cosines are written with six digits.
  assert any(found["spearman"] == pytest.approx(expected, abs=0.1) for found in test)


def test_a_kept_network_embeds_and_says_how(trained):
  _, folder, _ = trained
  embed = model.load(folder / "results")
  vectors = embed(["w1 w22 w23", "w1", "w1 w22 w23 " * 50])
  assert vectors.dtype == np.float32 and vectors.shape == (3, CFG.hidden_size)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
  np.testing.assert_allclose(embed("w1"), vectors[1:2], atol=1e-6)  # other padding
  info = sources.open_source(folder / "results" / "words" / "model").finetuned.info
  assert info["head"]["arguments"]["pooling"] == "mean" and info["max_length"] == 32
  with pytest.raises(ValueError, match=r"words embeds single texts, got \('a', 'b'\)"):
    embed([("a", "b")])


def test_a_column_of_a_file_is_embedded(trained, tmp_path):
  _, folder, _ = trained
  embed, file = model.load(folder / "results"), folder / "dev.csv"
  for columns, name in (((), "query"), (["answer"], "answer")):
    assert embed.predict_file(file, tmp_path / f"{name}.npy", columns) == 20
    texts = [row[name] for row in csv.DictReader(file.open())]
    np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), embed(texts))
  for out, columns, why in (
    ("x.tsv", (), "file of embeddings must end in .npy"),
    ("x.npy", ("query", "answer"), "--columns must be one column to embed, got query,answer"),
    ("x.npy", ("text",), "dev.csv:1 has no column 'text'"),
  ):
    with pytest.raises(ValueError, match=why):
      embed.predict_file(file, tmp_path / out, columns)
  assert len(list(tmp_path.iterdir())) == 2


def test_a_finished_task_is_kept_also_by_a_version_without_its_fields(trained):
  config, folder, rows = trained
  path = folder / "results" / "words" / "config.json"
  saved = json.loads(path.read_text())
  del saved["config"]["pairs"]
  path.write_text(json.dumps(saved))
  assert run(config, folder / "results") == rows
  config.pairs.pooling = "cls"
  with pytest.raises(ValueError, match="pairs.pooling was 'mean', is 'cls'"):
    run(config, folder / "results")


def test_microbatches_are_refused_because_they_would_not_see_each_other(source, tmp_path):  # noqa: F811
  config = make_config("pairs", None, source, train__accumulation=2, train__batch_size=16)
  refused(config, tmp_path / "results", "config.train.accumulation must be 1 for pairs, got 2")


def test_a_head_that_embeddings_do_not_read_is_named():
  config = make_config("pairs", None, "x")
  with pytest.warns(UserWarning, match="kind=pairs does not read model.head"):
    prepare.warn_of_unread_overrides(config, ["model.head", "pairs.pooling"])
