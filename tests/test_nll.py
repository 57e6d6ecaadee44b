"""The loss of the vocabulary and its gradient, against NumPy in float64 and against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.core import heads, masking, networks
from electra_jax.core.transformer_config import Compute, TransformerConfig

MASK = 4
# Float32: a logit less the maximum of 20 is rounded by up to 2^-20, which is relative in exp.
ROUNDING = 1e-6


@pytest.fixture(autouse=True, params=["cpu", "accelerator"])
def platform(request, monkeypatch):
  """Runs each test with the form of a CPU and with that of accelerators."""
  if request.param == "accelerator":
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
  jax.clear_caches()
  yield request.param
  jax.clear_caches()


def make(V, spread=4.0, seed=0):
  """Returns logits [2, 3, V], tokens [2, 3] that are not MASK, and weights of their losses."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(scale=spread, size=(2, 3, V)).astype(np.float32)
  tokens = rng.integers(MASK + 1, V, (2, 3)).astype(np.int32)
  tokens[0, 0] = logits[0, 0, MASK + 1 :].argmax() + MASK + 1
  return jnp.asarray(logits), jnp.asarray(tokens), rng.normal(size=(2, 3)).astype(np.float32)


def by_hand(logits, tokens, weights):
  """Returns losses, hits and the gradient of the weighted losses, in float64."""
  x = np.asarray(logits, np.float64)
  p = np.exp(x - x.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  one_hot = np.arange(x.shape[-1]) == np.asarray(tokens)[..., None]
  loss = -np.log(p[one_hot]).reshape(tokens.shape)
  return loss, x[one_hot].reshape(tokens.shape) == x.max(-1), weights[..., None] * (p - one_hot)


@pytest.mark.parametrize("apart", [None, MASK])
@pytest.mark.parametrize(("V", "of_mask"), [(7, 0.0), (256, 0.0), (700, 0.0), (700, -1e30)])
@pytest.mark.parametrize("far", [0.0, 200.0])
def test_the_loss_and_its_gradient_are_those_of_float64(V, of_mask, far, apart):
  logits, tokens, weights = make(V)
  logits = logits.at[..., MASK].add(of_mask + far)  # 200 nats above all others: exp overflows

  def total(logits):
    loss, hit = networks.nll(logits, tokens, apart)
    return (loss * weights).sum(), (loss, hit)

  gradient, (loss, hit) = jax.jit(jax.grad(total, has_aux=True))(logits)
  expected = by_hand(logits, tokens, weights)
  np.testing.assert_allclose(loss, expected[0], rtol=ROUNDING, atol=ROUNDING)
  np.testing.assert_array_equal(hit, expected[1])
  assert hit[0, 0] == (far == 0 or of_mask < 0)
  worst = np.abs(gradient - expected[2]) / np.abs(weights[..., None])
  assert worst.max() < ROUNDING


def test_logits_that_other_terms_read_too_get_the_sum_of_the_gradients():
  logits, tokens, weights = make(700)
  sampled = jnp.flip(tokens)

  def total(nll):
    def of(logits):
      without = masking.disallow(logits, jnp.int32(MASK))
      reinforce = nll(without / 0.7, sampled) * weights
      return (nll(logits, tokens, MASK) + reinforce).sum() + jnp.square(logits).sum()

    return jax.jit(jax.grad(of))(logits)

  def plain(logits, tokens, apart=None):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0]

  found, expected = total(lambda *args: networks.nll(*args)[0]), total(plain)
  np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING * np.abs(weights).max())


def test_on_accelerators_loss_and_sampler_share_their_pass_over_the_logits(platform):
  logits, tokens, _ = make(3000)
  keys = jax.random.split(jax.random.key(0), 2)

  def loss(logits, apart):
    return networks.nll(logits, tokens, apart)[0]

  def sample(logits):
    return masking.sample(masking.disallow(logits, jnp.int32(MASK)), 1.0, keys)

  def exps(function):
    return jax.jit(function).lower(logits).compile().cost_analysis()["transcendentals"]

  together = exps(lambda x: (loss(x, MASK), sample(x)))
  apart = exps(lambda x: (loss(x, None), sample(x)))
  shared = logits.size if platform == "accelerator" else 0
  assert apart - together == pytest.approx(shared, rel=0.05, abs=0.05 * logits.size)
  found = jax.jit(lambda x: (sample(x), loss(x, MASK)))(logits)[0]
  np.testing.assert_array_equal(found[0], jax.jit(sample)(logits)[0])


def test_in_bfloat16_no_product_reads_a_float32_gradient_of_the_logits():
  B, K, E, V = 2, 3, 8, 700
  cfg = TransformerConfig(V, E, E, 1, 1, 4 * E, 8, compute=Compute("bfloat16"))
  head, tokens = heads.MlmHead(cfg), make(V)[1]
  x, word = jnp.ones((B, K, E), jnp.bfloat16), jnp.ones((V, E))
  weights = head.init(jax.random.key(0), x, word)

  def total(weights, x, word):
    return networks.nll(head.apply(weights, x, word), tokens)[0].sum()

  program = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(weights, x, word)
  products = [e for e in program.eqns if e.primitive.name == "dot_general"]
  read = [v.aval for e in products for v in e.invars if v.aval.size == B * K * V]
  assert len(read) == 3  # the gradients of the states, the table and the bias
  assert {aval.dtype for aval in read} == {jnp.dtype(jnp.bfloat16)}
  wide = [e for e in program.eqns if e.outvars[0].aval.shape == (B, K, V)]
  assert not [e for e in wide if "scatter" in e.primitive.name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_has_the_gradient_of_its_formula(dtype):
  V, E = 700, 8
  rng = np.random.default_rng(1)
  x, word = rng.normal(size=(2, 3, E)), rng.normal(size=(V, E))
  g = rng.normal(size=(2, 3, V))
  x, word = jnp.asarray(x, dtype), jnp.asarray(word, dtype)
  logits, vjp = jax.vjp(heads._word_logits, x, word, jnp.arange(V, dtype=jnp.float32))
  wide = [np.asarray(a, np.float64) for a in (x, word, jnp.asarray(g, dtype))]
  assert logits.dtype == jnp.float32
  by_hand = np.einsum("bke,ve->bkv", *wide[:2]) + np.arange(V)
  np.testing.assert_allclose(logits, by_hand, rtol=1e-5, atol=1e-5)  # float32 sums
  expected = (
    np.einsum("bkv,ve->bke", wide[2], wide[1]),
    np.einsum("bkv,bke->ve", wide[2], wide[0]),
    wide[2].sum((0, 1)),
  )
  # Sums of up to 700 products in float32; those for bfloat16 states and tables are rounded to it.
  rounding = {"float32": 1e-4, "bfloat16": 2.0**-8}[dtype]
  for found, wanted in zip(vjp(jnp.asarray(g, jnp.float32)), expected, strict=True):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=rounding, atol=1e-4)
