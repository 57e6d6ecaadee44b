"""Masking and sampling, against plain NumPy loops over the same random draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.core import masking
from electra_jax.core.batch import Batch

PAD, UNK, CLS, SEP, MASK = 0, 1, 2, 3, 4
RATES = masking.Masking(0.15, 0.85, 1.0, MASK, (PAD, CLS, SEP, MASK))

choose = jax.jit(masking.choose, static_argnums=1)
mask = jax.jit(masking.mask, static_argnums=2)
sample = jax.jit(masking.sample, static_argnums=1)


def make_batch(B=64, L=128, seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(3, L + 1, B)
  lengths[0], lengths[1] = L, 3
  ids = rng.integers(1, 60, (B, L))  # now and then [UNK] or a special token inside the text
  ids[:, 0] = CLS
  ids[np.arange(B), lengths - 1] = SEP
  real = np.arange(L) < lengths[:, None]
  ids = np.where(real, ids, PAD).astype(np.int32)
  return Batch(ids, np.zeros_like(ids), real, np.arange(B, dtype=np.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def keys(B, seed=0):
  return jax.random.split(jax.random.key(seed), B)


@pytest.mark.parametrize("L", [128, 32])  # 15 % of 32 tokens are 5, but there are 4 slots
def test_chosen_positions_equal_a_numpy_loop(L):
  batch, k = make_batch(L=L), keys(64)
  masked = jax.tree.map(np.asarray, choose(batch, RATES, k))
  draws = np.stack([jax.random.uniform(key, (L,)) for key in k])
  slots = int(0.155 * L)
  for i, draw in enumerate(draws):
    ids, length = batch.ids[i], int(batch.padding_mask[i].sum())
    candidates = [t for t in range(length) if ids[t] not in (PAD, CLS, SEP, MASK)]
    wanted = max(1, min(slots, round(0.15 * length)))  # Python rounds half to even
    best = sorted(candidates, key=lambda t: -draw[t])[:wanted]
    assert masked.positions[i][masked.weights[i] > 0].tolist() == best
    assert len(set(masked.positions[i].tolist())) == slots
    assert (masked.labels[i] == batch.ids[i][masked.positions[i]]).all()
  assert (masked.labels[masked.weights > 0] == UNK).any()


def test_a_row_of_padding_has_no_slot_that_counts():
  ids = np.zeros((2, 16), np.int32)
  batch = Batch(ids, ids, np.zeros_like(ids, bool), np.arange(2))
  masked = choose(batch, RATES, keys(2))
  assert masked.weights.sum() == 0
  np.testing.assert_array_equal(mask(ids, masked, RATES, keys(2)), ids)


def test_masking_writes_mask_or_nothing_and_only_at_slots_that_count():
  batch, k = make_batch(), keys(64)
  masked = choose(batch, RATES, k)
  masked_text = np.asarray(mask(batch.ids, masked, RATES, keys(64, seed=5)))
  at_slot = np.zeros_like(batch.padding_mask)
  for i in range(64):
    at_slot[i, np.asarray(masked.positions)[i][np.asarray(masked.weights)[i] > 0]] = True
  assert (masked_text == batch.ids)[~at_slot].all()
  changed = masked_text != batch.ids
  assert (masked_text[changed] == MASK).all()
  share, n = changed[at_slot].mean(), at_slot.sum()
  assert abs(share - 0.85) < 4 * np.sqrt(0.85 * 0.15 / n)  # four standard deviations


# Sampling.


@pytest.mark.parametrize("V", [3, 256, 257, 1000, 30522])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_equal_a_numpy_inversion_of_the_distribution(V, temperature):
  B, K = 3, 7
  logits = np.random.default_rng(V).normal(size=(B, K, V)).astype(np.float32) * 3
  k = keys(B, seed=V)
  got, nll = (np.asarray(x) for x in sample(jnp.asarray(logits), temperature, k))
  for b in range(B):
    bits = np.asarray(jax.random.bits(k[b], (K,), jnp.uint32)).astype(np.float64)
    u = (np.floor(bits / 256) + 0.5) / 2**24
    z = logits[b].astype(np.float64) / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    cdf = np.cumsum(p / p.sum(-1, keepdims=True), -1)
    for j in range(K):
      low = cdf[j, got[b, j] - 1] if got[b, j] else 0.0
      # Inside the token's own interval, but for float32's rounding of the cumulative sums.
      assert low - 1e-5 <= u[j] <= cdf[j, got[b, j]] + 1e-5
      log_p = np.log(p[j, got[b, j]] / p[j].sum())
      # Float32's rounding of a sum of V terms in two levels, and of logits of up to 30.
      assert nll[b, j] == pytest.approx(-log_p, abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_the_samples_estimate_the_entropy_of_what_they_are_drawn_from(temperature):
  rng = np.random.default_rng(7)
  logits = (rng.normal(size=(6, 700)) * np.array([[0], [0.5], [1], [2], [4], [20]])).astype("f4")
  z = logits.astype(np.float64) / temperature
  p = np.exp(z - z.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  surprise = -np.log(p, where=p > 0, out=np.zeros_like(p))
  exact = (p * surprise).sum(-1)
  n = 4_000
  _, nll = sample(jnp.broadcast_to(logits, (n, 6, 700)), temperature, keys(n))
  mean = np.asarray(nll, np.float64).mean(0)
  # Five standard deviations of a mean of n; 2e-5 for the rounding of one (as above).
  sigma = np.sqrt(np.maximum((p * surprise**2).sum(-1) - exact**2, 0) / n)
  assert exact[0] == pytest.approx(np.log(700)) and exact[-1] < 0.5  # from uniform to nearly sure
  assert (np.abs(mean - exact) < 5 * sigma + 2e-5).all(), (mean, exact, sigma)


def test_a_token_without_probability_is_never_sampled():
  # All mass on the last token of the vocabulary, then on one at each edge of a block.
  for V, at in ((300, 299), (512, 255), (512, 256), (700, 0)):
    logits = jnp.full((50, 4, V), -jnp.inf).at[..., at].set(0.0)
    drawn, nll = sample(logits, 1.0, keys(50))
    assert (drawn == at).all()
    assert (nll == 0).all()


def test_sampling_carries_no_gradient():
  logits = jnp.ones((2, 3, 40))
  grad = jax.grad(lambda z: sum((x * 1.0).sum() for x in sample(z, 1.0, keys(2))) + z.sum())(logits)
  np.testing.assert_array_equal(grad, jnp.ones_like(logits))


def test_a_sample_that_equals_the_original_is_not_replaced():
  ids = np.array([[CLS, 10, 11, 12, 13, SEP]], np.int32)
  masked = masking.MaskedPositions(*map(jnp.array, ([[1, 3, 4]], [[10, 12, 13]], [[1.0, 1, 0]])))
  corrupted, is_replaced = masking.corrupt(ids, masked, jnp.array([[10, 99, 98]]))
  assert corrupted.tolist() == [[CLS, 10, 11, 99, 13, SEP]]
  assert is_replaced.tolist() == [[False, False, False, True, False, False]]


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5])
def test_a_mask_rate_outside_0_and_1_is_refused(rate):
  with pytest.raises(ValueError, match=f"mask_prob must be between 0 and 1, got {rate}"):
    masking.Masking(rate, 0.85, 1.0, MASK, ())


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_the_ends_of_the_random_numbers_meet_only_tokens_with_a_probability(monkeypatch, bits):
  shape = (64, 32, 1000)
  rng = np.random.default_rng(0)
  # In each of the four blocks tokens at both ends have none, in the last and some others all.
  has = (np.arange(1000) % 256 > 5) & (np.arange(1000) % 256 < 200) & (np.arange(1000) < 768)
  has = has & ((rng.random((*shape[:2], 1)) < 0.5) | (np.arange(1000) < 256))
  logits = jnp.float32(np.where(has, rng.normal(size=shape) * 3, -np.inf))
  monkeypatch.setattr(jax.random, "bits", lambda key, s, dtype: jnp.full(s, bits, dtype))
  run = jax.jit(lambda logits: masking.sample(logits, 1.0, keys(64)))
  drawn, nll = (np.asarray(x) for x in run(logits))
  assert np.take_along_axis(has, drawn[..., None], -1).all()
  assert np.isfinite(nll).all()


def test_a_token_that_is_disallowed_has_no_probability_whatever_the_logits():
  logits = jnp.array([[[1e3, -50.0, -60.0]]])
  left = jax.nn.softmax(masking.disallow(logits, jnp.array([[0]])))
  # What is left of the others: 1 / (1 + e^-10).
  np.testing.assert_allclose(left[0, 0], [0, 0.9999546, 4.54e-5], rtol=1e-4)
  assert left[0, 0, 0] == 0
