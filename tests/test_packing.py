"""Packed rows: several documents a row, none of which sees another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_build import LETTERS, SPECIAL, all_records, make_config
from test_objectives import SPEC, evaluate, fresh, keys_of, make_batch

from electra_jax.core import attention, generators, networks, objectives
from electra_jax.core.attention import Inputs
from electra_jax.core.batch import Batch
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import build, chunks, examples, sources
from electra_jax.data.examples import ExampleSpec

BERT = TransformerConfig(50, 16, 16, 3, 2, 24, 24, init_stddev=0.3)
MODERN = dataclasses.replace(
  BERT, block="pre_norm", norm="layer_norm_no_bias", feed_forward="geglu", positions="rope",
  rope_theta=100.0, local_rope_theta=10.0, global_every=3, window=6, biases=False,
  token_types=False, first_norm=False,
)  # fmt: skip
CONFIGS = {
  "bert": BERT,
  "modern, windows in blocks": MODERN,
  "modern, windows by a mask": dataclasses.replace(MODERN, window=20),
}
LENGTHS = ((5, 9, 3, 4), (20,))  # of the documents of two rows of 24 tokens


def packed_batch(lengths=LENGTHS, L=24):
  rng = np.random.default_rng(0)
  documents = np.zeros((len(lengths), L), np.int32)
  for row, sizes in enumerate(lengths):
    documents[row, : sum(sizes)] = np.repeat(np.arange(len(sizes)) + 1, sizes)
  ids = np.where(documents > 0, rng.integers(5, 50, documents.shape), 0).astype(np.int32)
  row = np.arange(len(lengths), dtype=np.int32)
  return Batch(ids, np.zeros_like(ids), documents > 0, row, documents)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_states_of_a_packed_row_are_those_of_its_documents_alone(cfg):
  tables = networks.init_embeddings(cfg, jax.random.key(0))
  network = {"embeddings": tables, "encoder": networks.init_encoder(cfg, jax.random.key(1))}
  encode = jax.jit(lambda batch: networks.encode(cfg, network, batch.ids, batch, None))
  batch = packed_batch()
  together = np.asarray(encode(batch))
  for row, sizes in enumerate(LENGTHS):
    for number, size in enumerate(sizes, 1):
      at = batch.document_ids[row] == number
      alone = np.zeros((2, 24), np.int32)  # the same shapes compile once
      alone[0, :size] = batch.ids[row, at]
      mask = np.arange(24) < np.array([[size], [0]])
      expected = encode(Batch(alone, 0 * alone, mask, batch.row))[0, :size]
      # float32, numbers of about 1, sums of at most 24 terms
      np.testing.assert_allclose(together[row, at], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_no_gradient_crosses_from_one_document_to_another(cfg):
  weights = networks.init_encoder(cfg, jax.random.key(1))
  batch = packed_batch()
  x = jax.random.normal(jax.random.key(2), (2, 24, 16))

  def of_second(x):
    args = {"params": weights}, x, batch.padding_mask, None, batch.document_ids
    states = networks.encoder.Encoder(cfg).apply(*args)
    return (states * (batch.document_ids == 2)[..., None]).sum()

  gradient = np.asarray(jax.jit(jax.grad(of_second))(x))
  reached = (gradient != 0).any(-1)
  np.testing.assert_array_equal(reached, batch.document_ids == 2)


@pytest.mark.parametrize(
  "kind", long_except(1, of=[k for k, d in generators.GENERATORS.items() if not d.pretrained])
)
def test_what_a_generator_writes_in_a_document_depends_on_that_document_alone(kind):
  spec = dataclasses.replace(SPEC, generator_kind=kind, frequencies=(1.0,) * 60)
  batch = make_batch(B=4, seed=3)._replace(padding_mask=np.ones((4, 16), bool))
  documents = np.repeat([[1] * 7 + [2] * 9], 4, 0).astype(np.int32)
  batch = batch._replace(document_ids=documents, ids=np.clip(batch.ids, 5, None))
  batch.ids[:, [0, 7]], batch.ids[:, [6, 15]] = 2, 3  # [CLS], [SEP]
  ordinary = (documents == 2) & (batch.ids >= 5)
  changed = batch._replace(ids=np.where(ordinary, 5 + (batch.ids + 11) % 50, batch.ids))
  weights = fresh(spec)
  keys = generators.split_streams(keys_of(batch), training=True)

  @jax.jit
  def corrupt(batch):
    found = generators.corrupt(spec, weights, batch, keys, jnp.int32(0))
    return found.ids, found.output.nll

  (first, nll), (second, other_nll) = map(corrupt, (batch, changed))
  assert (first[:, :7] != batch.ids[:, :7]).any()
  np.testing.assert_array_equal(first[:, :7], second[:, :7])
  if nll is not None:  # of special tokens too, which stand beside the other document
    np.testing.assert_array_equal(nll[:, :7], other_nll[:, :7])


@pytest.mark.parametrize(
  "name", long_except(0, of=[n for n, o in objectives.OBJECTIVES.items() if not o.second_pass])
)
def test_every_objective_passes_the_documents_to_its_network(name):
  """Its losses differ from those of the same rows as one document each."""
  accepts = objectives.OBJECTIVES[name].accepts
  kind = next(k for k, d in generators.GENERATORS.items() if not d.pretrained and accepts(d))
  spec = dataclasses.replace(SPEC, objective=name, generator_kind=kind)
  batch = make_batch()
  documents = np.where(batch.padding_mask, 1 + (np.arange(16) > 6), 0).astype(np.int32)
  weights = jax.tree.map(lambda x: 5 * x, fresh(spec))
  whole, parts = (
    {k: float(t.total) for k, t in evaluate(spec, weights, b).items() if "loss" in k}
    for b in (batch, batch._replace(document_ids=documents))
  )
  assert whole.keys() and all(abs(whole[k] - parts[k]) > 1e-3 for k in whole), (whole, parts)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("length", long_except(1, of=[128, 200]))
def test_splash_attention_equals_the_mask(local, length):
  cfg = dataclasses.replace(BERT, hidden_size=64, num_heads=2, window=64)
  documents = packed_batch(((50, 3, 60), (length,)), length).document_ids
  q, k, v, g = jax.random.normal(jax.random.key(0), (4, 2, length, 2, 32))
  real = (documents > 0)[..., None, None]

  def result(attend, q, k, v):
    inputs = Inputs(q, k, v, documents > 0, jnp.asarray(documents), None)
    y = attend(inputs) * real
    return (y * g).sum(), y

  def both(attend):
    (_, y), grads = jax.jit(
      jax.value_and_grad(lambda *x: result(attend, *x), argnums=(0, 1, 2), has_aux=True)
    )(q, k, v)
    return y, *grads

  splash = both(lambda inputs: attention._splash(cfg, inputs, local, interpret=True))
  mask = both(lambda inputs: attention.attend(cfg, inputs, local))
  for ours, theirs in zip(splash, mask, strict=True):
    np.testing.assert_allclose(ours * real, theirs * real, rtol=0, atol=5e-6)  # float32 sums


def test_cudnn_gets_the_start_and_length_of_each_document():
  documents = packed_batch(((5, 9, 3), (20,), (24,)), 24).document_ids
  lengths, starts = attention.packed_layout(jnp.asarray(documents))
  # the padding, 7, 4 and 0 tokens, is the last document
  assert lengths.tolist() == [[5, 9, 3, 7], [20, 4, -1, -1], [24, -1, -1, -1]]
  assert starts.tolist() == [[0, 5, 14, 17, -1], [0, 20, -1, -1, -1], [0, -1, -1, -1, -1]]


def test_documents_are_masked_where_cudnn_cannot_pack_them(monkeypatch):
  from jax._src.cudnn import fused_attention_stablehlo as fused

  monkeypatch.setattr(fused, "check_compute_capability", lambda wanted: False)  # an A100
  batch = packed_batch()
  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 24, 2, 8))
  inputs = Inputs(q, k, v, batch.padding_mask, jnp.asarray(batch.document_ids), None)
  with pytest.warns(UserWarning, match="only on Hopper GPUs and later: masking them"):
    found = attention.attend(BERT.computed(attention="cudnn"), inputs)
  np.testing.assert_array_equal(found, attention.attend(BERT, inputs))


# Records.

PACKED = ExampleSpec(
  seq_length=32, examples="packed", split_lines=False, short_prob=0, short_min_tokens=5,
  single_segment_prob=0, boundary_prob=0, cls=101, sep=102, pad=0,
)  # fmt: skip
DTYPE = examples.record_dtype(32, 30522, starts=True)


def pack(documents, spec=PACKED, streams=1):
  """Packs documents that arrive in `streams` parts."""
  records, rest = [], np.zeros(0, np.uint16)
  for part in np.array_split(np.arange(len(documents)), streams):
    stream = examples.stream([[documents[i]] for i in part], spec, DTYPE)
    made, rest = examples.pack(np.concatenate([rest, stream]), spec, DTYPE)
    records.append(made)
  records.append(examples.pack(rest, spec, DTYPE, last=True)[0])
  return np.concatenate(records)


def documents_of(records):
  """Returns the ids of each packed document, by the ids that a batch holds."""
  for record, numbers in zip(records, examples.document_ids(records), strict=True):
    for number in range(1, numbers.max() + 1):
      yield record["ids"][numbers == number].tolist()


def test_packed_records_of_a_hand_worked_example():
  records = pack([[1] * 10, [2] * 10, [3] * 40])
  # 12 + 12 tokens leave 8 - 2 of the first record, too few to cut the third document for
  assert records["length"].tolist() == [24, 32, 12]
  expected = [[1] * 10, [2] * 10, [3] * 30, [3] * 10]
  assert list(documents_of(records)) == [[101, *document, 102] for document in expected]
  assert records["ids"][0, 24:].tolist() == [0] * 8


@pytest.mark.parametrize("streams", [1, 3, 50])
def test_packing_keeps_every_token_in_order_however_it_arrives(streams):
  rng = np.random.default_rng(1)
  documents = [rng.integers(200, 900, n).tolist() for n in rng.integers(1, 70, 100)]
  records = pack(documents, streams=streams)
  assert records.tobytes() == pack(documents).tobytes()
  found = list(documents_of(records))
  assert all(d[0] == 101 and d[-1] == 102 and len(d) > 2 for d in found)
  tokens = [token for document in found for token in document[1:-1]]
  assert tokens == [token for document in documents for token in document]
  assert records["length"][:-1].mean() > 28
  # a document is cut only where it fills its record
  whole = {tuple(d) for d in documents}
  for record, numbers in zip(records, examples.document_ids(records), strict=True):
    for number in range(1, numbers.max() + 1):
      part = tuple(record["ids"][numbers == number][1:-1].tolist())
      is_last_of_full = number == numbers.max() and record["length"] == 32
      assert part in whole or is_last_of_full or number == 1


def test_the_shortest_records_are_packed_too():
  spec = dataclasses.replace(PACKED, seq_length=8)
  dtype = examples.record_dtype(8, 30522, starts=True)
  stream = examples.stream([[[1] * 9], [[2] * 2]], spec, dtype)
  records, _ = examples.pack(stream, spec, dtype, last=True)
  assert records["ids"].tolist() == [
    [101, 1, 1, 1, 1, 1, 1, 102],
    [101, 1, 1, 1, 102, 0, 0, 0],
    [101, 2, 2, 102, 0, 0, 0, 0],
  ]


def test_a_record_holds_a_limited_number_of_documents():
  numbers = examples.document_ids(pack([[7]] * 30))
  assert numbers.max(-1).tolist() == [4] * 7 + [2]  # 32 / 8, though 10 would fit


def test_packing_keeps_every_token_in_order(tmp_path, monkeypatch):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1500)
  config = make_config(tmp_path, examples="packed", holdout_frac=0.0)
  manifest = build.build(config)
  records = all_records(config.data.dir, "train")
  facts = manifest["splits"]["train"]
  assert facts["discarded"] == 0 and facts["padded"] == (16 - records["length"]).sum()
  assert facts["padded"] < 0.2 * records["ids"].size  # 2 to 10 of 16 tokens where it does not cut
  vocab = (SPECIAL + LETTERS + [".", "1", "2"]).index
  used = np.arange(16) < records["length"][:, None]
  special = np.isin(records["ids"], [vocab("[CLS]"), vocab("[SEP]")])
  expected = []
  for document in (tmp_path / "text.txt").read_text().split("\n\n"):
    for word in document.replace(".", " .").split():
      expected += [vocab(word[0])] + [vocab(f"##{char}") for char in word[1:]]
  assert records["ids"][used & ~special].tolist() == expected


def test_a_document_longer_than_a_chunk_is_used_whole(tmp_path, monkeypatch):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
  monkeypatch.setattr(sources, "PIECE_BYTES", 700)
  monkeypatch.setattr(sources, "LINE_BYTES", 300)
  make_config(tmp_path)
  (tmp_path / "text.txt").write_text("ab cd ef " * 20_000)
  config = make_config(tmp_path, examples="packed", holdout_frac=0.0)
  assert build.build(config)["splits"]["train"]["kept"] == 6 * 20_000
