"""Cloze ranking against Encoder.fill_mask and Encoder.detect, and files that are refused."""

import json

import jax
import numpy as np
import pytest
from rich.console import Console

import electra_jax
from electra_jax.commands import cli
from electra_jax.core import scoring
from electra_jax.core.batch import from_rows
from electra_jax.evaluate import cloze, measures, scorers
from electra_jax.evaluate.cloze import Cloze
from electra_jax.export import writer
from electra_jax.interop import sources
from electra_jax.runtime import parallel

GAPS = [
  Cloze("a b ", " d e", ["c", "a", "e", "h"]),
  Cloze("", " b a", ["g", "f", "b", "d"]),
  Cloze("a b c d e f g h ", "", ["a", "h", "b", "c"]),
]


def write(path, gaps):
  path.write_text("".join(json.dumps(gap._asdict()) + "\n" for gap in gaps), "utf-8")
  return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  return write(tmp_path_factory.mktemp("cloze") / "gaps.jsonl", GAPS)


def rank(scores) -> int:
  """The rank of the first score."""
  return 1 + int((np.array(scores[1:]) >= scores[0]).sum())


def test_a_masked_language_model_ranks_as_it_fills_the_mask(straight, file, tmp_path):
  writer.export_hf(sources.open_source(straight), tmp_path / "hf", Console(quiet=True))
  model = tmp_path / "hf" / "generator"
  encoder, expected = electra_jax.load(model), []
  for gap in GAPS:
    fills = encoder.fill_mask(f"{gap.left}[MASK]{gap.right}", k=encoder.tokenizer.vocab.size)
    found = {fill.token: fill.probability for fill in fills}
    expected.append(rank([found[word] for word in gap.words]))
  scores = measures.evaluate_cloze(model, file)
  assert scores.scorer == "mlm" and scores.ranks.tolist() == expected
  assert scores.mean_reciprocal_rank == pytest.approx(np.mean([1 / x for x in expected]))
  assert scores.first.accuracy == pytest.approx(np.mean([x == 1 for x in expected]))


def test_a_detector_ranks_as_it_suspects_each_word_in_its_place(straight, file, tmp_path, capsys):
  encoder, expected = electra_jax.load(straight), []
  for gap in GAPS:
    at = len(encoder.tokenizer.encode_batch([gap.left])[0])
    found = encoder.detect([gap.left + word + gap.right for word in gap.words])
    expected.append(rank([-tokens[at].replaced for tokens in found]))
  words = ["cloze", "--model", str(straight), "--data", str(file)]
  cli.call("evaluate", [*words, "--out", str(tmp_path / "cloze.json")])
  content = json.loads((tmp_path / "cloze.json").read_text())
  assert content["scorer"] == "rtd" and content["ranks"] == expected
  printed = capsys.readouterr().out
  assert "rtd: the text's word ranks first of 4 in" in printed and "of 3 gaps" in printed


def test_a_causal_language_model_ranks_by_the_likelihood_of_the_whole_text(straight):
  source = sources.open_source(straight)
  network = source.networks["generator"]
  weights = {**network.weights, "clm_head": network.weights["mlm_head"]}
  scorer = scorers.SentenceScorer("clm", network.cfg, source.tokenizer)
  texts = [[gap.left + word + gap.right for word in gap.words] for gap in GAPS]
  scores = scorer(weights, [text for four in texts for text in four]).reshape(3, 4)
  found = cloze.ranks("clm", network.cfg, weights, source.tokenizer, GAPS)
  assert found.tolist() == list(map(rank, scores))

  # A text's score is the sum of its tokens', none of which reads those to its right.
  begun = scorer(weights, ["a b c", "a b c d", "a b c e"])
  ids = source.tokenizer.encode_batch(["a b c d", "a b c e"])
  vocab = source.tokenizer.vocab
  batch = from_rows([[vocab.cls, *x, vocab.sep] for x in ids], (2, 8), vocab.pad)
  with parallel.full_precision():
    each = np.asarray(scoring.next_token(network.cfg, weights, batch))[:, 1:5]
  np.testing.assert_allclose(each[:, :3].sum(1), begun[:1].repeat(2), rtol=1e-5)
  np.testing.assert_allclose(each.sum(1), begun[1:], rtol=1e-5)


def test_equal_scores_are_ranked_above_the_texts_own_word(straight):
  source = sources.open_source(straight)
  network = source.networks["discriminator"]
  weights = {
    **network.weights,
    "rtd_head": jax.tree.map(np.zeros_like, network.weights["rtd_head"]),
  }
  found = cloze.ranks("rtd", network.cfg, weights, source.tokenizer, GAPS)
  assert found.tolist() == [4, 4, 4]


def test_gaps_of_several_tokens_or_too_long_are_skipped(straight, tmp_path):
  longer = Cloze("a " * 200, "", GAPS[0].words)
  several = Cloze("a ", " b", ["c", "cd efg", "a", "b"])
  same = Cloze("a ", " b", ["c", "C", "a", "b"])  # lower-cased
  data = write(tmp_path / "gaps.jsonl", [longer, GAPS[0], several, same])
  with pytest.warns(UserWarning, match="3 gaps are skipped"):
    found = measures.evaluate_cloze(straight, data)
  assert (found.ranks > 0).tolist() == [False, True, False, False] and found.first.pairs == 1
  with pytest.raises(ValueError, match="all gaps are of texts whose words are not one token each"):
    measures.evaluate_cloze(straight, write(data, [longer, same]))


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ({"left": "a", "right": "b"}, "no column 'words'"),
    ({"left": 1, "right": "b", "words": ["a", "b"]}, ":2: left and right must be texts"),
    ({"left": "a", "right": "b", "words": "ab"}, ":2: words must be a list of texts"),
    ({"left": "a", "right": "b", "words": ["a", ""]}, ":2: words must be a list of texts"),
    ({"left": "a", "right": "b", "words": ["a", "b"]}, ":2: words must differ, and be as many"),
    ({"left": "a", "right": "b", "words": ["a", "b", "a", "c"]}, ":2: words must differ"),
  ],
)
def test_a_wrong_file_is_refused_in_a_line(tmp_path, row, why):
  data = tmp_path / "gaps.jsonl"
  rows = [row] if "words" not in row else [GAPS[0]._asdict(), row]
  data.write_text("".join(json.dumps(x) + "\n" for x in rows), "utf-8")
  with pytest.raises(ValueError, match=why):
    cloze.read(data)
