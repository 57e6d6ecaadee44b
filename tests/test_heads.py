"""Heads of fine-tuning against NumPy, and the step, the seeds and the devices around them."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import long_except
from scipy import special

from electra_jax.core import optimizer, task_heads, task_network
from electra_jax.core.batch import Batch
from electra_jax.core.params import map_named
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.finetune import batches as data
from electra_jax.finetune import loop
from electra_jax.finetune.batches import Feature, Plan
from electra_jax.runtime import parallel

CFG = TransformerConfig(30, 8, 16, 2, 2, 32, 32, dropout=0.0, attention_dropout=0.0)
OPTIMIZER = optimizer.OptimizerConfig("adamw", 1e-2, "product", 0, 1.0, 0.0, 0.9, 0.999, 1e-6, 1.0)
LINEAR = task_heads.classification(2, "linear")
SETTINGS = loop.Settings((0,), OPTIMIZER, 0.1, 0.8, False, 8, 1, 1.0, 8, 1, 5, 0, 32)


def states_and_batch(target: dict, B=3, L=5):
  rng = np.random.default_rng(0)
  states = rng.normal(size=(B, L, 16)).astype(np.float32)
  mask = np.ones((B, L), bool)
  mask[0, 3:] = False
  mask[-1] = False  # a row of padding
  ids = np.zeros((B, L), np.int32)
  return states, Batch(ids, ids, mask, np.arange(B, dtype=np.int32), target=target)


def weights_of(head, seed=1):
  weights = head.init(CFG, jax.random.key(seed))
  return jax.tree.map(lambda x: x + 0.1, weights)  # biases that are not 0


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def gelu(x):
  return x * 0.5 * (1 + special.erf(x / 2**0.5))


def dense(w, x):
  return x @ np.array(w["kernel"]) + np.array(w["bias"])


def test_classification_is_cross_entropy_of_the_first_state():
  head = task_heads.classification(3, "linear")
  states, batch = states_and_batch({"label": np.array([2, 0, 1], np.int32)})
  w = weights_of(head)
  terms = head.loss(CFG, w, states, batch, None)
  logits = dense(w["classifier"], states[:, 0])
  nll = -log_softmax(logits)[[0, 1], [2, 0]]
  assert terms["loss"].count == 2
  np.testing.assert_allclose(terms["loss"].total, nll.sum(), rtol=1e-5)  # float32 sums
  hits = (logits[:2].argmax(-1) == [2, 0]).sum()
  assert (terms["accuracy"].total, terms["accuracy"].count) == (hits, 2)
  # Sums of 16 products of about 1 in float32, in another order.
  np.testing.assert_allclose(head.predict(CFG, w, states, batch)["logits"], logits, atol=2e-6)


def test_two_layers_are_dense_gelu_and_a_product():
  head = task_heads.classification(2, "two_layers")
  states, batch = states_and_batch({"label": np.zeros(3, np.int32)})
  w = weights_of(head)
  logits = dense(w["out_proj"], gelu(dense(w["dense"], states[:, 0])))
  np.testing.assert_allclose(head.predict(CFG, w, states, batch)["logits"], logits, atol=4e-6)


@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_the_layers_of_modernbert_are_dense_gelu_norm_and_dense(kind):
  head = task_network.HeadSpec(kind, {"outputs": 2, "layers": "modernbert"}).make()
  states, batch = states_and_batch({})
  w = jax.tree.map(np.asarray, weights_of(head))
  x = gelu(states @ w["dense"]["kernel"])
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + CFG.layer_norm_eps)
  logits = dense(w["classifier"], x * w["layer_norm"]["scale"])
  logits = logits if kind == "tagging" else logits[:, 0]
  # Sums of 16 products of about 1 in float32, in another order, divided by a deviation of about 1.
  np.testing.assert_allclose(head.predict(CFG, w, states, batch)["logits"], logits, atol=4e-6)


@pytest.mark.parametrize("layers", ["mean", "modernbert_mean"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_head_on_the_mean_has_the_logits_of_the_mean_of_the_text_without_padding(kind, layers):
  arguments = {"outputs": 2} if kind == "classification" else {}
  head, first = (
    task_network.HeadSpec(kind, {**arguments, "layers": name}).make()
    for name in (layers, {"mean": "linear"}.get(layers, "modernbert"))
  )
  states, batch = states_and_batch({})
  w, lengths = weights_of(head), batch.padding_mask.sum(-1)
  means = np.stack([x[:n].mean(0) if n else x[0] * 0 for x, n in zip(states, lengths, strict=True)])
  (expected,) = first.predict(CFG, w, means[:, None], batch).values()
  (found,) = head.predict(CFG, w, states, batch).values()
  # Sums of 16 products of about 1 in float32, in another order, divided by a deviation of about 1.
  np.testing.assert_allclose(found, expected, atol=4e-6)


def test_a_head_on_the_mean_is_for_texts():
  with pytest.raises(ValueError, match="model.head=mean pools a text: choose another"):
    task_heads.tagging(3, "mean")


def test_regression_is_the_squared_error():
  head = task_heads.regression("linear")
  states, batch = states_and_batch({"label": np.array([0.2, 0.9, 7.0], np.float32)})
  w = weights_of(head)
  errors = dense(w["classifier"], states[:, 0])[:2, 0] - [0.2, 0.9]
  terms = head.loss(CFG, w, states, batch, None)
  np.testing.assert_allclose(terms["loss"].total, (errors**2).sum(), rtol=1e-5)
  assert terms["loss"].count == 2


def test_tagging_counts_labelled_tokens_of_the_text_alone():
  head = task_heads.tagging(4)
  tag = np.array([[-1, 2, -1, 3, 3], [0, -1, -1, -1, 1], [2, 2, 2, 2, 2]], np.int32)
  states, batch = states_and_batch({"tag": tag})
  w = weights_of(head)
  logp = log_softmax(dense(w["classifier"], states))
  expected = -(logp[0, 1, 2] + logp[1, 0, 0] + logp[1, 4, 1])  # the rest is padding or not labelled
  terms = head.loss(CFG, w, states, batch, None)
  assert terms["loss"].count == 3
  np.testing.assert_allclose(terms["loss"].total, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("kind", "arguments", "output"),
  [
    ("classification", {"outputs": 3, "layers": "two_layers"}, "logits"),
    ("regression", {"layers": "two_layers"}, "score"),
    ("tagging", {"outputs": 4}, "logits"),
    ("classification", {"outputs": 3, "layers": "modernbert"}, "logits"),
    ("tagging", {"outputs": 4, "layers": "modernbert"}, "logits"),
    ("classification", {"outputs": 3, "layers": "modernbert_mean"}, "logits"),
  ],
)
def test_the_logits_that_are_compared_at_export_are_those_that_the_head_predicts(
  kind, arguments, output
):
  head = task_network.HeadSpec(kind, arguments).make()
  states, batch = states_and_batch({})
  weights = weights_of(head)
  form = task_network.EXPORT_FORMS[head.export]
  logits = np.asarray(form.logits(CFG, weights, states, batch.padding_mask))
  predicted = head.predict(CFG, weights, states, batch)[output]
  np.testing.assert_array_equal(logits.reshape(predicted.shape), predicted)


def test_layer_rates_are_the_papers_and_as_a_switch_the_originals():
  # Original, n = 12, d = 0.8: head 1, top layer 0.64, lowest layer 0.055, embeddings 0.044.
  cfg = dataclasses.replace(CFG, num_layers=12, block="pre_norm")  # which has a norm at its end
  shapes = task_network.shapes(cfg, LINEAR)
  for skip, top, low, bottom in ((True, 0.64, 0.055, 0.044), (False, 0.8, 0.0687, 0.055)):
    rates = optimizer.layer_rates(shapes, 12, 0.8, skip)
    assert set(jax.tree.leaves(rates["head"])) == {1.0}
    kernel = np.array(rates["encoder"]["layers"]["ffn_in"]["kernel"])
    assert kernel.shape == (12, 1, 1)
    np.testing.assert_allclose(kernel[[11, 0], 0, 0], [top, low], atol=5e-4)  # as printed there
    np.testing.assert_allclose(rates["embeddings"]["word"], bottom, atol=5e-4)
    np.testing.assert_allclose(rates["encoder"]["project"]["kernel"], bottom, atol=5e-4)
    assert rates["encoder"]["final_norm"]["scale"] == pytest.approx(kernel[11].item())


def test_updates_are_scaled_layer_by_layer():
  params = {"head": np.ones(2), "encoder": {"layers": np.ones((2, 3))}, "embeddings": np.ones(1)}
  tx = optimizer.scale_each(optimizer.layer_rates(params, 2, 0.5))
  scaled, _ = tx.update(params, tx.init(params))
  np.testing.assert_allclose(scaled["encoder"]["layers"], [[0.25] * 3, [0.5] * 3])
  np.testing.assert_allclose(scaled["embeddings"], [0.125])


# Rows a network can learn: whether token 5 occurs.


def features(n=40, seed=0) -> list[Feature]:
  rng = np.random.default_rng(seed)
  made = []
  for i in range(n):
    ids = rng.integers(6, 30, rng.integers(4, 24)).astype(np.int32)
    if i % 2:
      ids[rng.integers(1, len(ids))] = 5
    made.append(Feature(ids, len(ids), {"label": np.int32(i % 2)}))
  return made


def leaves(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_a_batch_padded_further_gives_the_same_loss_and_predictions():
  params = jax.tree.map(lambda x: x[0], loop.init_params(CFG, LINEAR, None, (0,)))
  rows = Plan(np.arange(7), 24)
  objective = jax.jit(task_network.make_objective(dataclasses.replace(CFG, dropout=0.1), LINEAR))
  predict = jax.jit(task_network.make_predict(CFG, LINEAR))
  keys = jax.random.split(jax.random.key(2), (8, 2))
  short, long = (data.collate(features(), rows._replace(length=n), 8, 0) for n in (24, 32))
  a, b = (objective(params, batch, keys, 0)["loss"].total for batch in (short, long))
  np.testing.assert_allclose(a, b, rtol=1e-5)  # softmax and sums over more zeros, in float32
  a, b = (predict(params, batch)["logits"] for batch in (short, long))
  np.testing.assert_allclose(a[:7], b[:7], atol=1e-6)


def test_texts_as_long_as_an_odd_number_of_positions_are_predicted():
  cfg = dataclasses.replace(CFG, max_positions=21)
  rows = [Feature(np.full(n, 7, np.int32), n, {}) for n in (21, 9, 21)]
  params = loop.init_params(cfg, LINEAR, None, (0,))
  [found] = loop.make_predictor(cfg, LINEAR, batch_size=8, buckets=1, pad=0)(params, rows)
  assert found["logits"].shape == (3, 2)
  np.testing.assert_array_equal(found["logits"][0], found["logits"][2])


@pytest.mark.long
def test_seeds_learn_together_and_each_ends_where_it_ends_alone():
  lines = []
  one = dataclasses.replace(SETTINGS, epochs=40.0, log_every=100)
  both = dataclasses.replace(one, seeds=(3, 4))
  rows = features()
  together = loop.train(CFG, LINEAR, None, rows, both, lambda *line: lines.append(line))
  assert [line[:2] for line in lines] == [(100, 200), (200, 200)]
  assert all(len(line[2]) == 2 for line in lines)
  assert max(lines[1][2]) < 0.1 < min(lines[0][2])
  outputs = loop.make_predictor(CFG, LINEAR, batch_size=8, buckets=1, pad=0)(together, rows)
  labels = [int(f.target["label"]) for f in rows]
  assert all((one["logits"].argmax(-1) == labels).all() for one in outputs)

  # Alone it is another program: the first epoch only, before rounding has grown.
  brief = [dataclasses.replace(one, epochs=1.0, seeds=seeds) for seeds in ((3, 4), (4,))]
  pair, alone = (loop.train(CFG, LINEAR, None, rows, settings) for settings in brief)
  for x, y in zip(leaves(pair), leaves(alone), strict=True):
    np.testing.assert_allclose(x[1], y[0], atol=1e-5)
  assert any(np.abs(x[0] - x[1]).max() > 1e-3 for x in leaves(pair))


def test_at_most_three_steps_are_in_flight(monkeypatch):
  # Eight CPU devices deadlocked in 6 of 80 trainings on two loaded cores, with a hundred.
  map_train_step, handed, unfinished = parallel.map_train_step, [], []

  def watched(step):
    mapped = map_train_step(step)

    def run(state, batch):
      state, packed = mapped(state, batch)
      handed.append(packed.flat)
      unfinished.append(sum(not flat.is_ready() for flat in handed))
      return state, packed

    return run

  monkeypatch.setattr(parallel, "map_train_step", watched)
  settings = dataclasses.replace(SETTINGS, epochs=8.0, log_every=100)
  loop.train(CFG, LINEAR, None, features(), settings)
  assert len(unfinished) == 40 and max(unfinished) <= 3


def test_microbatches_give_the_update_of_the_whole_batch():
  # One step, and an eps beside which the root is nothing: the change is the gradient's.
  linear = dataclasses.replace(OPTIMIZER, name="electra_adam", eps=1e6, learning_rate=1e6)
  one = dataclasses.replace(SETTINGS, batch_size=40, optimizer=linear)
  backbone = jax.jit(lambda: task_network.init_backbone(CFG, jax.random.key(5)))()
  whole = loop.train(CFG, LINEAR, backbone, features(), one)
  parts = loop.train(CFG, LINEAR, backbone, features(), dataclasses.replace(one, accumulation=5))
  for x, y in zip(leaves(whole), leaves(parts), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6)


RATES = [
  # (1 - t / 4) min(1, t / 2)
  ({"warmup_frac": 0.5}, "product", (0, 0.75 / 2, 0.5, 0.25)),
  # min(1, t), and 1 - sqrt((t - 2) / 2) in the last two
  ({"warmup_frac": 0.25, "decay_frac": 0.5}, "wsd", (0, 1, 1, 1 - 0.5**0.5)),
]


@pytest.mark.parametrize(("fields", "schedule", "rates"), long_except(0, of=RATES))
def test_a_step_is_the_gradient_of_the_summed_loss_times_the_rates_of_its_number_and_layer(
  fields, schedule, rates
):
  # Without a memory, and with an eps beside which the root is nothing, Adam's update is linear.
  adam = dict(name="electra_adam", b1=0.0, eps=1e6, learning_rate=1e5, clip_norm=np.inf)
  linear = dataclasses.replace(OPTIMIZER, schedule=schedule, **adam)
  settings = dataclasses.replace(
    SETTINGS, seeds=(3, 4), optimizer=linear, layer_decay=0.5, batch_size=40, **fields
  )
  rows, num_steps = features(), 4
  batch = data.collate(rows, Plan(np.arange(40), 24), 40, 0)
  predict = task_network.make_predict(CFG, LINEAR)

  @jax.jit
  def gradient(params):
    def summed_loss(params):
      logp = jax.nn.log_softmax(predict(params, batch)["logits"])
      return -logp[np.arange(40), batch.target["label"]].sum()

    return jax.vmap(jax.grad(summed_loss))(params)

  def rate_of(names, x):  # [N, 1, ...] of stacked layers
    if names[:2] == ["encoder", "layers"]:
      return np.array([0.25, 0.5]).reshape(2, *[1] * (x.ndim - 2))
    return 1.0 if names[0] == "head" else 0.125

  state, step = loop.start(CFG, LINEAR, None, settings, num_steps)
  both = parallel.shard(jax.tree.map(lambda x: np.stack([x, x], 1), batch))
  for t, rate in enumerate(rates):
    before = jax.device_get(state.train.params)
    expected = map_named(lambda names, g: -0.1 * rate * rate_of(names, g) * g, gradient(before))  # noqa: B023
    state, packed = step(state, both)
    reported = packed.unpack(packed.read())["learning_rate"]
    np.testing.assert_allclose(reported, 1e5 * rate, rtol=1e-6, err_msg=f"step {t}")
    for old, new, delta in zip(*map(leaves, (before, state.train.params, expected)), strict=True):
      # The sum of 40 gradients has the rounding of another order; weights near 1 have 6e-8.
      np.testing.assert_allclose(new - old, delta, rtol=1e-3, atol=1e-6, err_msg=f"step {t}")


def test_each_seed_starts_from_a_head_of_its_own_and_the_same_as_alone():
  backbone = jax.jit(lambda: task_network.init_backbone(CFG, jax.random.key(5)))()
  pair = loop.init_params(CFG, LINEAR, backbone, (0, 4))
  kernel = pair["head"]["classifier"]["kernel"]
  assert np.abs(kernel[0] - kernel[1]).max() > 0.1
  for place, seed in enumerate((0, 4)):
    alone = loop.init_params(CFG, LINEAR, backbone, (seed,))
    for x, y in zip(leaves(pair), leaves(alone), strict=True):
      np.testing.assert_array_equal(x[place], y[0])


def test_predictions_come_in_the_order_of_the_features_once_each():
  head = task_heads.tagging(3)
  params = loop.init_params(CFG, head, None, (0, 1))
  rows = features(19)
  outputs = loop.make_predictor(CFG, head, batch_size=8, buckets=3, pad=0)(params, rows)
  assert len(outputs) == 2
  predict = jax.jit(task_network.make_predict(CFG, head))
  for seed in (0, 1):
    mine = jax.tree.map(lambda x, s=seed: x[s], params)
    for i, feature in enumerate(rows):
      alone = predict(mine, data.collate(rows, Plan(np.array([i]), 24), 1, 0))["logits"][0]
      n = len(feature.ids)
      np.testing.assert_allclose(outputs[seed]["logits"][i], alone[:n], atol=1e-5)
      assert outputs[seed]["logits"][i].shape == (n, 3)


def test_outputs_that_are_not_finite_are_no_predictions():
  head = task_heads.tagging(3)
  params = loop.init_params(CFG, head, None, (0, 1))
  word = params["embeddings"]["word"]
  params["embeddings"]["word"] = word.at[1, 5].set(np.nan)  # of every second row, for one seed
  predict = loop.make_predictor(CFG, head, batch_size=8, buckets=1, pad=0)
  with pytest.raises(ArithmeticError, match="non-finite logits in 9 of 19 rows: train"):
    predict(params, features(19))


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_seed():
  wild = dataclasses.replace(OPTIMIZER, learning_rate=1e30, name="adamw")
  settings = dataclasses.replace(SETTINGS, optimizer=wild, seeds=(7,), epochs=3.0)
  with pytest.raises(ArithmeticError, match="seed 7: the loss is nan"):
    loop.train(CFG, LINEAR, None, features(), settings)


def test_nothing_to_train_on_and_batches_that_do_not_divide_are_refused():
  with pytest.raises(ValueError, match="give no training step"):
    loop.train(CFG, LINEAR, None, features(), dataclasses.replace(SETTINGS, epochs=0.05))
  with pytest.raises(ValueError, match="12 is not divisible by 8 devices"):
    loop.train(CFG, LINEAR, None, features(), dataclasses.replace(SETTINGS, batch_size=12))


def test_seeds_together_and_one_by_one_give_the_same_arrays(monkeypatch):
  def function(seed, shared, x):
    return {"y": seed * x + shared}

  args = np.arange(3.0), np.float32(2), np.ones((3, 4))
  own = (True, False, True)
  one_by_one = parallel.over_seeds(function, own)(*args)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  together = parallel.over_seeds(function, own)(*args)
  np.testing.assert_array_equal(one_by_one["y"], together["y"])
  np.testing.assert_array_equal(together["y"][2], [4.0] * 4)
