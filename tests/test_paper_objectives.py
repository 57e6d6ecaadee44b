"""The paper's other objectives: by hand, by exact gradients, and what each must not touch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_objectives import RATES, SPEC, D, evaluate, fresh, keys_of, learns, make_batch

from electra_jax.core import generators, masking, networks, objectives, schedules
from electra_jax.core.batch import Batch
from electra_jax.core.networks import generator_size


def make(name, **changes):
  spec = dataclasses.replace(SPEC, objective=name, **changes)
  return spec, fresh(spec)


@functools.partial(jax.jit, static_argnums=0)
def corruption(spec, weights, batch):
  """What the objective's own keys corrupt the batch to."""
  keys = generators.split_streams(keys_of(batch), training=False)
  return generators.corrupt(spec, weights, batch, keys, None)


def sigmoid(x):
  return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


@functools.partial(jax.jit, static_argnums=(0, 4))
def main(spec, weights, ids, batch, head):
  states = networks.main_states(spec, weights, ids, batch, None)
  return networks.token_logits(spec.discriminator, weights["discriminator"], head, states)


def vocabulary(spec, weights, ids, batch):
  """The discriminator's probabilities [B, L, V] at every position, in float64."""

  @jax.jit
  def logits(weights):
    states = networks.main_states(spec, weights, ids, batch, None)
    network = networks.weights_of(spec, weights, "discriminator")
    return networks.vocabulary_logits(spec.discriminator, network, states)

  z = np.exp(np.asarray(logits(weights), np.float64))
  return z / z.sum(-1, keepdims=True)


def nll_of(p, tokens):
  return -np.log(np.take_along_axis(p, tokens[..., None], -1)[..., 0])


def assert_sum(term, values):
  """Checks that a term is the sum of these values and counts them."""
  assert float(term.total) == pytest.approx(values.sum(), rel=1e-5)
  assert float(term.count) == len(values)


@pytest.mark.slow
def test_electra_15_learns_from_the_slots_only():
  spec, weights = make("electra_15")
  batch = make_batch()
  c = corruption(spec, weights, batch)
  chosen = np.asarray(masking.is_masked(c.masked, 16))
  p = sigmoid(main(spec, weights, c.ids, batch, "rtd_head"))
  bce = -np.log(np.where(c.is_replaced, p, 1 - p))
  assert_sum(evaluate(spec, weights, batch)["rtd_loss"], bce[chosen])
  assert chosen.sum() < batch.padding_mask.sum()


def test_electra_15_gives_unmasked_logits_exactly_zero_gradient(monkeypatch):
  spec, weights = make("electra_15")
  batch = make_batch()
  chosen = np.asarray(masking.is_masked(corruption(spec, weights, batch).masked, 16))
  original = networks.token_logits

  def loss(nudge):
    # The real logits, each with a number added that is 0.
    monkeypatch.setattr(networks, "token_logits", lambda *args: original(*args) + nudge)
    return objectives.make(spec)(weights, batch, keys_of(batch), None)["rtd_loss"].total

  gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros((4, 16))))
  assert not gradient[~chosen].any()
  assert gradient[chosen].all()


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", long_except(2, of=["replace_mlm", "all_tokens_mlm", "electra", "electric", "electra_mlm"])
)
def test_no_mask_token_enters_the_main_network(name, monkeypatch):
  kind = "two_tower" if name == "electric" else "transformer"
  spec, weights = make(name, generator_kind=kind)
  # To the generator [MASK] is the likeliest token of all, by far.
  weights["generator"]["mlm_head"]["bias"] += 50.0 * (jnp.arange(60) == RATES.mask_id)
  batch = make_batch()
  original = networks.main_states

  @jax.jit
  def inputs(weights):
    seen = []

    def spy(spec, weights, ids, *rest):
      seen.append(ids)
      return original(spec, weights, ids, *rest)

    monkeypatch.setattr(networks, "main_states", spy)
    objectives.make(spec)(weights, batch, keys_of(batch), None)
    return seen

  (seen,) = inputs(weights)
  c = corruption(spec, weights, batch)
  np.testing.assert_array_equal(seen, c.ids)
  assert not (seen == RATES.mask_id).any()
  shown = masking.mask(batch.ids, c.masked, RATES, keys_of(batch)[:, 0])
  assert (np.asarray(shown) == RATES.mask_id).sum() > 5  # the generator sees some


def test_replace_mlm_predicts_originals_from_the_corrupted_text():
  spec, weights = make("replace_mlm")
  batch = make_batch()
  c = corruption(spec, weights, batch)
  p = vocabulary(spec, weights, c.ids, batch)
  chosen = np.asarray(masking.is_masked(c.masked, 16))
  terms = evaluate(spec, weights, batch)
  assert_sum(terms["replace_mlm_loss"], nll_of(p, batch.ids)[chosen])
  assert terms["mlm_loss"].in_loss  # the generator still learns


@pytest.mark.slow
def test_clm_predicts_each_token_from_those_to_its_left():
  spec, weights = make("clm")
  batch = make_batch()
  cfg, network = spec.discriminator, networks.weights_of(spec, weights, "discriminator")
  causal = dataclasses.replace(cfg, direction="ltr")
  states = networks.encode(causal, network, batch.ids, batch, None)
  z = networks.vocabulary_logits(cfg, network, states, "clm_head")
  z = np.exp(np.asarray(z, np.float64))
  p = z / z.sum(-1, keepdims=True)
  expected = nll_of(p[:, :-1], batch.ids[:, 1:])
  counted = np.asarray(masking.maskable(batch, RATES))
  assert counted.sum() == batch.padding_mask.sum() - 4  # all but [CLS]
  terms = evaluate(spec, weights, batch)
  assert_sum(terms["clm_loss"], expected[counted[:, 1:]])

  scores = jax.jit(functools.partial(objectives.token_scores, spec), static_argnums=2)
  before = np.asarray(scores(weights, batch, None))
  np.testing.assert_allclose(before[:, 1:], np.where(counted[:, 1:], -expected, 0.0), rtol=1e-5)
  ids = np.where(np.arange(16) == 4, 5 + (batch.ids + 7) % 50, batch.ids)
  after = np.asarray(scores(weights, batch._replace(ids=ids), None))
  assert (after != before).any(axis=0).tolist() == [
    t >= 4 and batch.padding_mask[:, t].any() for t in range(16)
  ]


@pytest.mark.slow
def test_electra_mlm_detects_and_predicts_originals_in_one_pass():
  weight = schedules.Schedule(3.0, schedules.parse("0=50,10=1", 10))
  spec, weights = make("electra_mlm", discriminator_weight=5.0, replace_mlm_weight=weight)
  batch = make_batch()
  c = corruption(spec, weights, batch)
  replaced, chosen = np.asarray(c.is_replaced), np.asarray(masking.is_masked(c.masked, 16))
  p = sigmoid(main(spec, weights, c.ids, batch, "rtd_head"))
  bce = -np.log(np.where(replaced, p, 1 - p))[batch.padding_mask]
  words = vocabulary(spec, weights, c.ids, batch)
  terms = evaluate(spec, weights, batch)
  assert_sum(terms["rtd_loss"], bce)
  assert_sum(terms["replace_mlm_loss"], nll_of(words, batch.ids)[chosen])
  assert [terms[n].weight for n in ("mlm_loss", "rtd_loss", "replace_mlm_loss")] == [1.0, 5.0, 3.0]
  at_5 = jax.eval_shape(lambda: objectives.make(spec)(weights, batch, keys_of(batch), 5))
  assert at_5.keys() == terms.keys()
  assert float(spec.replace_mlm_weight.at(5)) == pytest.approx(25.5)


@pytest.mark.slow
def test_all_tokens_mlm_is_a_mixture_of_copying_and_predicting():
  spec, weights = make("all_tokens_mlm")
  batch = make_batch()
  one = jax.tree.map(lambda x: np.asarray(x)[:1, :4] if x.ndim == 2 else x[:1], batch)
  c = corruption(spec, weights, one)
  p = vocabulary(spec, weights, c.ids, one)[0]
  gate = sigmoid(main(spec, weights, c.ids, one, "copy_head"))[0]
  losses = []
  for t in range(4):  # 1 x 4
    original, shown = one.ids[0, t], int(c.ids[0, t])
    losses.append(-np.log(gate[t] * (original == shown) + (1 - gate[t]) * p[t, original]))
  terms = evaluate(spec, weights, one)
  assert_sum(terms["all_tokens_loss"], np.array(losses))
  assert_sum(terms["copied"], gate)


@pytest.mark.parametrize("gate", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("nll", [1e-6, 3.0, 200.0])
@pytest.mark.parametrize("same", [True, False])
def test_the_copy_gate_is_stable_when_it_closes_and_opens(gate, nll, same):
  loss = jax.value_and_grad(objectives.copy_nll, (0, 1))
  value, gradient = loss(jnp.float32(gate), jnp.float32(nll), same)
  assert np.isfinite(value) and np.isfinite(gradient).all()
  # In float64 and by the limits: log D = min(gate, 0) and log(1 - D) = min(-gate, 0) out here.
  expected = -np.logaddexp(min(gate, 0), min(-gate, 0) - nll) if same else nll - min(-gate, 0)
  assert float(value) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_bert_is_plain_masked_language_modelling():
  spec, weights = make("bert")
  assert "generator" not in weights and set(weights["discriminator"]) == {"encoder", "mlm_head"}
  batch = make_batch()
  k = jax.vmap(lambda key: jax.random.split(key, 5))(keys_of(batch)[:, 0])
  masked = jax.jit(masking.choose, static_argnums=1)(batch, RATES, k[:, 0])
  shown = jax.jit(masking.mask, static_argnums=2)(batch.ids, masked, RATES, k[:, 1])
  p = vocabulary(spec, weights, shown, batch)
  chosen = np.asarray(masking.is_masked(masked, 16))
  terms = evaluate(spec, weights, batch)
  assert set(terms) == {"mlm_loss", "mlm_accuracy"}
  assert_sum(terms["mlm_loss"], nll_of(p, batch.ids)[chosen])


@pytest.mark.slow
def test_electric_is_noise_contrastive_estimation_with_every_noised_position_as_noise(monkeypatch):
  """And q is the density sampled from, which has no [MASK], at the other positions too."""
  spec, weights = make("electric", generator_kind="two_tower")
  weights["generator"]["mlm_head"]["bias"] += 3.0 * (jnp.arange(60) == RATES.mask_id)  # a quarter
  batch = make_batch()
  c = corruption(spec, weights, batch)

  @jax.jit
  def predict(weights):
    states = generators.two_tower_states(spec, weights, batch, (None, None))
    network = networks.weights_of(spec, weights, "generator")
    return networks.vocabulary_logits(spec.generator, network, states)

  q = np.exp(np.asarray(predict(weights), np.float64))
  q[..., RATES.mask_id] = 0
  log_q = -nll_of(q / q.sum(-1, keepdims=True), np.asarray(c.ids))
  noised = np.asarray(masking.is_masked(c.masked, 16))
  energy = np.asarray(main(spec, weights, c.ids, batch, "rtd_head"), np.float64)
  noise = sigmoid(energy + log_q + np.log(0.25 / 0.75))
  bce = -np.log(np.where(noised, noise, 1 - noise))
  original = networks.token_logits

  def loss(nudge):  # the real energies, each with a number added that is 0
    monkeypatch.setattr(networks, "token_logits", lambda *args: original(*args) + nudge)
    terms = objectives.make(spec)(weights, batch, keys_of(batch), None)
    return terms["nce_loss"].total, terms

  gradient, terms = jax.jit(jax.grad(loss, has_aux=True))(jnp.zeros((4, 16)))
  np.testing.assert_allclose(gradient, (noise - noised) * batch.padding_mask, atol=1e-6)
  assert_sum(terms["nce_loss"], bce[batch.padding_mask])
  assert float(terms["nce_recall"].count) == noised.sum() >= c.is_replaced.sum()
  assert terms["cloze_loss"].in_loss and terms["nce_loss"].in_loss


@pytest.mark.parametrize(
  ("name", "kind", "loss", "heads"),
  [
    ("electra", "two_tower", "rtd_loss", {"rtd_head"}),
    ("electra_15", "transformer", "rtd_loss", {"rtd_head"}),
    ("replace_mlm", "transformer", "replace_mlm_loss", {"mlm_head"}),
    ("all_tokens_mlm", "transformer", "all_tokens_loss", {"mlm_head", "copy_head"}),
    ("electric", "two_tower", "nce_loss", {"rtd_head"}),
    ("clm", "transformer", "clm_loss", {"clm_head"}),
    ("adversarial", "transformer", "rtd_loss", {"rtd_head"}),
  ],
)
def test_the_main_loss_trains_the_discriminator_and_its_heads_alone(name, kind, loss, heads):
  found = learns(dataclasses.replace(SPEC, objective=name, generator_kind=kind), loss)
  networks_of = {x for x in found if not x.startswith("embeddings/")}
  assert networks_of == {f"discriminator/{x}" for x in {"encoder", *heads}}
  assert "embeddings/word" in found


# REINFORCE. One slot a sequence, so that the assumption (a slot's reward depends on its own token
# and on unchanged ones) is exact; five words, so that every outcome can be tried.
TINY_D = dataclasses.replace(D, vocab_size=9)
TINY = networks.PretrainSpec(
  generator_size(TINY_D, 0.5, 1.0),
  TINY_D,
  masking.Masking(0.25, 1.0, 1.0, 3, (0, 1, 2, 3)),
  objective="adversarial",
  mlm_weight=0.0,
)


def reinforce_gradients(weights, batch, keys):
  """Returns the surrogate's gradient by the vocabulary bias [9] of each of n keys."""

  def of_bias(bias, key):
    head = {**weights["generator"]["mlm_head"], "bias": bias}
    changed = {**weights, "generator": {**weights["generator"], "mlm_head": head}}
    terms = objectives.make(TINY)(changed, batch, key[None], None)
    return terms["reinforce"].total

  bias = weights["generator"]["mlm_head"]["bias"]
  return jax.jit(jax.vmap(jax.grad(of_bias), (None, 0)))(bias, keys)


@pytest.mark.slow
def test_reinforce_agrees_with_the_exact_gradient():
  weights = jax.jit(lambda: objectives.init_params(TINY, jax.random.key(3)))()
  weights = jax.tree.map(lambda x: 6 * x, weights)  # rewards that differ
  # A baseline near the rewards, for less noise: it does not change the mean.
  weights["generator"]["baseline_head"]["logit"] = {
    "kernel": jnp.zeros((TINY.generator.hidden_size, 1)),
    "bias": jnp.array([-2.0]),
  }
  # Token ids 4 to 8 are words; a bias keeps the generator from special tokens.
  bias = jnp.where(jnp.arange(9) < 4, -1e4, 0.0)
  weights["generator"]["mlm_head"]["bias"] = bias
  ids = np.array([[1, 5, 7, 2]], np.int32)
  batch = Batch(ids, np.zeros_like(ids), np.ones_like(ids, bool), np.zeros(1, np.int32))
  keys = jax.random.split(jax.random.key(7), 20_000)

  # Which of the two words is masked is random too, so the exact gradient is the mean over both.
  @jax.jit
  def predict(weights, ids):
    network = networks.weights_of(TINY, weights, "generator")
    states = networks.encode(TINY.generator, network, ids, batch, None)
    return jax.nn.softmax(networks.vocabulary_logits(TINY.generator, network, states))

  exact = np.zeros(9)
  for at in (1, 2):
    masked_ids = ids.copy()
    masked_ids[0, at] = 3
    q = np.asarray(predict(weights, masked_ids)[0, at], np.float64)
    reward = np.zeros(9)
    for word in range(4, 9):
      text = ids.copy()
      text[0, at] = word
      replaced = sigmoid(main(TINY, weights, text, batch, "rtd_head"))[0, at]
      reward[word] = -np.log(replaced if word != ids[0, at] else 1 - replaced)
    # d/d bias of -sum q R, the generator climbing what the discriminator descends.
    exact += -0.5 * q * (reward - (q * reward).sum())

  samples = np.asarray(reinforce_gradients(weights, batch, keys), np.float64)
  error = samples.std(0) / np.sqrt(len(samples))
  words = slice(4, 9)
  assert np.abs(exact[words]).max() > 20 * error[words].max()  # a test that could fail
  # Five numbers: 4 standard errors are left once in 3,000 times, and the keys are fixed.
  assert (np.abs(samples.mean(0) - exact)[words] < 4 * error[words]).all()


def test_the_baseline_learns_from_its_cross_entropy_alone_and_the_generator_only_from_reinforce():
  spec = dataclasses.replace(SPEC, objective="adversarial", mlm_weight=0.0)
  assert learns(spec, "baseline_loss") == {"generator/baseline_head"}
  reached = learns(spec, "reinforce")
  assert "generator/mlm_head" in reached and "generator/encoder" in reached
  assert not any("baseline" in name or name.startswith("discriminator") for name in reached)


def test_adversarial_terms_equal_a_hand_worked_example(monkeypatch):
  # Two slots count, one does not. The first is replaced, and detected with probability 4/5; the
  # second is not, and is taken for original with 1/3. The baseline is -log(3/4) everywhere.
  spec = dataclasses.replace(SPEC, objective="adversarial")
  batch = jax.tree.map(lambda x: x[:1, :4], make_batch()._replace(row=np.zeros((1, 4), np.int32)))
  masked = masking.MaskedPositions(*map(jnp.array, ([[1, 2, 3]], [[3, 0, 1]], [[1.0, 1, 0]])))
  logits = jnp.log(jnp.array([[[1.0, 1, 1, 1], [3, 1, 1, 1], [9, 1, 1, 1]]]))
  output = generators.GeneratorOutput(logits, {}, states=jnp.zeros((1, 3, 8)))
  replaced = jnp.array([[False, True, False, True]])
  sampled = jnp.array([[2, 0, 0]])
  made = generators.Corruption(
    masked, output, sampled, jnp.array(batch.ids), replaced, jnp.array(batch.padding_mask), {}
  )
  monkeypatch.setattr(objectives, "_detect", lambda *args: jnp.log(jnp.array([[1.0, 4, 2, 1]])))
  monkeypatch.setattr(networks, "token_logits", lambda *args: jnp.full((1, 3), np.log(3.0)))
  keys = generators.split_streams(jax.random.split(jax.random.key(0), 1), training=False)
  inputs = objectives.ObjectiveInputs(batch, keys, None, made)
  terms = objectives.adversarial(spec, {"generator": {}}, inputs)
  expected = {
    "slot_rtd_loss": np.log(5 / 4) + np.log(3),
    # Minus the advantage, reward - baseline, times log p of the sample: 1/4 and 1/2.
    "reinforce": np.log(5 / 4 * 3 / 4) * np.log(4) + np.log(3 * 3 / 4) * np.log(2),
    # Towards the probability of the right answer.
    "baseline_loss": (4 / 5 + 1 / 3) * np.log(4 / 3) + (1 / 5 + 2 / 3) * np.log(4),
  }
  for name, total in expected.items():
    assert float(terms[name].total) == pytest.approx(total, rel=1e-6), name
    assert float(terms[name].count) == 2.0, name
