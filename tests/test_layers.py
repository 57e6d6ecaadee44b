"""Single operations of the networks: their gradients, and the precision of bfloat16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.core import layers


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu_and_layer_norm_have_the_gradients_of_their_formulas(dtype):
  rng = np.random.default_rng(0)
  x, g = (jnp.asarray(rng.normal(size=(4, 3, 8)) * 3, dtype) for _ in range(2))
  scale, bias = (jnp.float32(rng.normal(size=8)) for _ in range(2))

  def formula(x, scale, bias):
    x = x.astype(jnp.float32)
    return jax.nn.standardize(x, epsilon=1e-12) * scale + bias

  def pull(f, g, *args):
    return jax.jit(lambda g, *args: jax.vjp(f, *args)[1](g))(g, *args)

  got = pull(lambda *a: layers.normalize(*a, 1e-12), jnp.float32(g), x, scale, bias)
  expected = pull(formula, jnp.float32(g), x, scale, bias)
  # Sums of a dozen float32 products of size 10; bfloat16 keeps 8 bits of the result.
  tolerance = (
    {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2**-7, "atol": 0.02}
  )
  for a, b in zip(got, expected, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(np.float32(a), np.float32(b), **tolerance)

  (got,) = pull(layers.gelu, g, x)
  (expected,) = pull(lambda x: jax.nn.gelu(x, approximate=False), g, x)
  assert got.dtype == expected.dtype == dtype
  np.testing.assert_allclose(np.float32(got), np.float32(expected), **tolerance)


@pytest.mark.parametrize("layer", ["gelu", *layers.NORMS])
def test_activations_and_norms_of_bfloat16_are_computed_in_float32(layer):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(50, 64)) * 3, jnp.bfloat16)
  module = None if layer == "gelu" else layers.NORMS[layer](1e-12)
  weights = None if layer == "gelu" else module.init(jax.random.key(0), x)
  apply = layers.gelu if layer == "gelu" else lambda x: module.apply(weights, x)
  exact = np.float32(apply(x.astype(jnp.float32)))
  # Rounding of the result alone, relative to it: the tail of GELU too.
  np.testing.assert_allclose(np.float32(apply(x)), exact, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_in_float32_has_a_gradient_of_products_in_its_own_dtype(dtype):
  rng = np.random.default_rng(0)
  x, y = (jnp.asarray(rng.normal(size=size), dtype) for size in ((2, 5, 3, 8), (2, 7, 3, 8)))
  g = jnp.float32(rng.normal(size=(2, 3, 5, 7)))
  spec = "blhd,bmhd->bhlm"

  def pull(g, x, y):
    return jax.vjp(lambda x, y: layers.einsum_float32(spec, x, y), x, y)[1](g)

  to_x, to_y = pull(g, x, y)
  assert to_x.dtype == to_y.dtype == dtype
  # By hand in float64, of the rounded gradient. Seven and five products of size 1; bfloat16 keeps
  # 8 bits of the result.
  rounded = np.float64(g.astype(dtype))
  tolerance = 1e-5 if dtype == jnp.float32 else 0.05
  expected = np.einsum("bhlm,bmhd->blhd", rounded, np.float64(y))
  np.testing.assert_allclose(np.float64(to_x), expected, atol=tolerance)
  expected = np.einsum("bhlm,blhd->bmhd", rounded, np.float64(x))
  np.testing.assert_allclose(np.float64(to_y), expected, atol=tolerance)

  assert layers.einsum_float32(spec, x, y).dtype == jnp.float32
  operands = jax.jit(pull).lower(g, x, y).as_text().split("stablehlo.dot_general")[1:]
  name = {jnp.float32: "f32", jnp.bfloat16: "bf16"}[dtype]
  for operand in (line.split(": (")[1].split(") ->")[0] for line in operands):
    assert operand.count(f"x{name}>") == 2, operand
  assert len(operands) >= 2


@pytest.mark.parametrize(("summed", "features"), [((6,), (10,)), ((10,), (6,)), ((2, 5), (3, 2))])
def test_the_gradients_of_a_product_are_numpys(summed, features):
  rng = np.random.default_rng(0)
  x, kernel, g = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((4, 3, *summed), (*summed, *features), (4, 3, *features))
  )
  dimensions = ((2, 3)[: len(summed)], (0, 1)[: len(summed)]), ((), ())
  y, gradients = jax.vjp(lambda x, w: layers.dot_general(x, w, dimensions), x, kernel)
  n = len(summed)
  np.testing.assert_allclose(y, np.tensordot(x, kernel, n), rtol=0, atol=1e-5)
  of_x = np.tensordot(g, kernel, (range(2, 2 + len(features)), range(n, kernel.ndim)))
  of_kernel = np.tensordot(x, g, ((0, 1), (0, 1)))
  for found, wanted in zip(gradients(g), (of_x, of_kernel), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)  # sums of a dozen numbers near 1


@pytest.mark.parametrize("platform", ["cpu", "cuda", "default"])
@pytest.mark.parametrize("from_rows", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 2, 6), 2), ((4, 3, 3, 2, 5), 2)])
def test_the_gradient_of_slices_is_their_gradients_in_one_array(
  shape, axis, from_rows, platform, monkeypatch
):
  def of_platform(*args, default, **forms):
    return forms.get(platform, default)(*args)

  monkeypatch.setattr(jax.lax, "platform_dependent", of_platform)
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)
  parts, gradient = jax.vjp(lambda x: layers.unstack(x, axis, from_rows), x)
  gs = tuple(rng.normal(size=part.shape).astype(np.float32) for part in parts)
  for i, part in enumerate(parts):
    np.testing.assert_array_equal(part, x.take(i, axis))
  np.testing.assert_array_equal(gradient(gs)[0], np.stack(gs, axis))


def test_each_platform_joins_the_gradients_of_slices_in_its_own_way():
  x = jnp.ones((4, 3, 2, 6))
  parts, gradient = jax.vjp(lambda x: layers.unstack(x, 2), x)
  for platform, barriers, pads in (("cpu", 2, 0), ("cuda", 0, 2), ("tpu", 0, 0)):
    lowered = jax.jit(gradient).trace(parts).lower(lowering_platforms=(platform,)).as_text()
    found = lowered.count("optimization_barrier"), lowered.count("stablehlo.pad")
    assert found == (barriers, pads), platform


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_on_accelerators_the_gradient_of_a_kernel_is_autodiffs(platform):
  x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 6), (6, 4)))

  def matrices(multiply) -> list[str]:
    traced = jax.jit(jax.grad(lambda w, x: jnp.sin(multiply(x, w)).sum())).trace(kernel, x)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    found = (line.strip() for line in lines if "dot_general" in line or "transpose" in line)
    return sorted(re.sub(r"%\w+", "%", line) for line in found)  # without the names of values

  assert matrices(layers.product) == matrices(jnp.matmul) and len(matrices(jnp.matmul)) == 3
