"""What the networks share, and the vocabulary layer in slices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_objectives import RATES, SPEC, D, evaluate, fresh, make_batch, moved, term_gradients

from electra_jax.core import generators, networks, objectives, params
from electra_jax.core.networks import generator_size


def make(tie, **changes):
  generator = generator_size(D, 0.5, 1.0)
  if tie == "none":
    generator = dataclasses.replace(generator, embedding_size=generator.hidden_size)
  spec = networks.PretrainSpec(D if tie == "all" else generator, D, RATES, tying=tie, **changes)
  return spec, fresh(spec)


def shapes(spec):
  return jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))


WORD = "embeddings/word"
TABLES = {f"embeddings/{m}" for m in ("word", "position", "token_type", "layer_norm")}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("tie", "by_rtd", "by_mlm"),
  long_except(4, of=[
    ("none", TABLES, {"generator/embeddings"}),
    ("tokens", {WORD, "discriminator/embeddings"}, {WORD, "generator/embeddings"}),
    ("embeddings", TABLES, TABLES),
    ("all", TABLES, TABLES),
    ("gdes", {"discriminator/embedding_delta"}, TABLES),
    ("gdes_tables", {"discriminator/embedding_delta", "discriminator/embeddings"}, TABLES),
  ]),
)  # fmt: skip
def test_each_loss_reaches_what_its_network_looks_up_and_nothing_else(tie, by_rtd, by_mlm):
  spec, weights = make(tie)
  shared = {"discriminator/encoder"} if tie == "all" else set()
  own = {"discriminator/encoder", "discriminator/rtd_head"}
  rtd, mlm = term_gradients(spec, weights, "rtd_loss", "mlm_loss")
  assert moved(rtd) == own | by_rtd
  own = {"generator/mlm_head", *(shared or {"generator/encoder"})}
  assert moved(mlm) == own | by_mlm


@pytest.mark.slow
def test_gdes_starts_where_shared_embeddings_do_and_merges_into_plain_tables():
  spec, weights = make("gdes")
  shared = dataclasses.replace(spec, tying="embeddings")
  batch = make_batch()
  a, b = evaluate(spec, weights, batch), evaluate(shared, weights, batch)
  assert float(a["rtd_loss"].total) == float(b["rtd_loss"].total)
  delta = jax.tree.map(lambda x: x + 0.5, weights["discriminator"]["embedding_delta"])
  weights["discriminator"]["embedding_delta"] = delta
  merged = networks.embeddings(spec, weights, "discriminator")
  jax.tree.map(
    lambda m, e: np.testing.assert_array_equal(m, e + 0.5), merged, weights["embeddings"]
  )
  assert networks.embeddings(spec, weights, "generator") is weights["embeddings"]


def test_gdes_of_the_tables_leaves_each_network_its_norm():
  spec, weights = make("gdes_tables")
  own = weights["discriminator"]
  assert set(own["embeddings"]) == {"layer_norm"} and "layer_norm" not in own["embedding_delta"]
  own["embeddings"]["layer_norm"]["scale"] += 0.5
  merged = networks.embeddings(spec, weights, "discriminator")
  assert merged.keys() == weights["embeddings"].keys()
  np.testing.assert_array_equal(merged["layer_norm"]["scale"], 1.5)
  np.testing.assert_array_equal(merged["word"], weights["embeddings"]["word"])


@pytest.mark.slow
def test_an_untied_generators_tables_are_as_wide_as_itself():
  spec, weights = make("none")
  assert weights["generator"]["embeddings"]["word"].shape == (60, spec.generator.hidden_size)
  assert "project" not in weights["generator"]["encoder"]


def test_with_everything_shared_the_generator_adds_its_head_alone():
  spec, weights = make("all")
  assert set(weights["generator"]) == {"mlm_head"}
  head = params.count(weights["generator"]["mlm_head"])
  found = generators.count_networks(spec, weights)["generator"]
  assert found == head == (16 * 8 + 8) + 2 * 8 + 60


def test_gdes_trains_the_shared_tables_once_and_a_delta_of_their_size():
  spec, weights = make("gdes")
  plain, shared = make("embeddings")
  tables = params.count(weights["embeddings"])
  found = generators.count_networks(spec, weights)
  expected = generators.count_networks(plain, shared)
  # The discriminator that is kept is as large as any: its delta is merged into plain tables.
  assert found["discriminator"] == expected["discriminator"]
  assert found["generator"] == expected["generator"] + tables
  assert found["trained"] == expected["trained"] + tables == params.count(weights)


def test_a_frozen_generator_is_not_trained():
  spec, weights = make("none", generator_kind="frozen")
  found = generators.count_networks(spec, weights)
  assert found["generator"] == params.count(weights["generator"]) > 0
  assert found["trained"] == found["discriminator"]


@pytest.mark.parametrize("at", [1, 5, 16, 40])
def test_the_vocabulary_in_slices_is_the_whole_with_its_gradient(at):
  spec, weights = make("embeddings")
  rng = np.random.default_rng(0)
  states = jnp.asarray(rng.normal(size=(3, 16, 8)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 60, (3, 16)))
  cfg = spec.generator

  def sliced(network, states):
    loss, hit = networks.chunked_nll(cfg, network, states, tokens, chunk_size=at)
    return (loss * jnp.arange(48).reshape(3, 16)).sum(), (loss, hit)

  def whole(network, states):
    loss, hit = networks.nll(networks.vocabulary_logits(cfg, network, states), tokens)
    return (loss * jnp.arange(48).reshape(3, 16)).sum(), (loss, hit)

  args = networks.weights_of(spec, weights, "generator"), states
  (_, a), da = jax.jit(jax.value_and_grad(sliced, (0, 1), has_aux=True))(*args)
  (_, b), db = jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))(*args)
  np.testing.assert_array_equal(a[1], b[1])
  # The same products, summed in another order in float32.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), (a[0], da), (b[0], db)
  )


def test_every_weight_has_a_group():
  spec, weights = make("gdes")
  groups = generators.groups(spec, weights)
  assert jax.tree.structure(groups) == jax.tree.structure(weights)
  assert set(jax.tree.leaves(groups["embeddings"])) == {"generator"}
  tables = generators.groups(SPEC, shapes(SPEC))["embeddings"]
  assert set(jax.tree.leaves(tables)) == {"discriminator"}


@pytest.mark.slow
@pytest.mark.parametrize(
  "tie", long_except(3, of=["none", "tokens", "embeddings", "gdes", "gdes_tables"])
)
@pytest.mark.parametrize("fits", [("generator",), ("generator", "discriminator")])
def test_a_masked_language_model_starts_every_network_of_its_shape_with_its_tables(tie, fits):
  generator = D if len(fits) == 2 else generator_size(D, 1.0, 0.5)
  spec = networks.PretrainSpec(generator, D, RATES, tying=tie)
  mine = fresh(spec)
  alone = fresh(dataclasses.replace(SPEC, generator=generator))
  other = jax.tree.map(lambda x: x + 1.0, alone)
  del other["discriminator"]
  taken, _, new, _ = params.inherit(mine, params.match_roles(mine, other))
  for role in fits:
    tables = networks.embeddings(spec, taken, role)
    assert jax.tree.all(jax.tree.map(np.array_equal, tables, other["embeddings"])), role
    same = jax.tree.map(np.array_equal, taken[role]["encoder"], other["generator"]["encoder"])
    assert jax.tree.all(same), role
  if fits == ("generator",):
    assert "discriminator/encoder" in new


@pytest.mark.parametrize("width", [2, 3])
def test_tables_that_are_not_tied_come_to_each_network_that_a_masked_language_model_fits(width):
  tables, network = {"word": np.ones((6, 4))}, {"encoder": {"kernel": np.ones((2, 2))}}
  mine = {
    "embeddings": {"word": np.zeros((6, 4))},
    "generator": {**network, "embeddings": {"word": np.zeros((6, 4))}},
    "discriminator": {"encoder": {"kernel": np.zeros((width, width))}},
  }
  other = {"embeddings": tables, "generator": {**network, "mlm_head": {}}}
  found = params.match_roles(mine, other)
  assert found["generator"]["embeddings"] == tables
  assert ("discriminator" in found) == ("embeddings" in found) == (width == 2)


@pytest.mark.slow
def test_a_shared_encoder_brings_the_masked_language_models_head_to_the_generator():
  spec = networks.PretrainSpec(D, D, RATES, tying="all")
  other = fresh(networks.PretrainSpec(D, D, RATES, objective="bert"))
  other = jax.tree.map(lambda x: x + 1.0, other)
  mine = fresh(spec)
  taken, _, new, _ = params.inherit(mine, params.match_roles(mine, other))
  assert new == ["discriminator/rtd_head"]
  for mine, theirs in (("discriminator", "encoder"), ("generator", "mlm_head")):
    same = jax.tree.map(np.array_equal, taken[mine][theirs], other["discriminator"][theirs])
    assert jax.tree.all(same), theirs


@pytest.mark.parametrize("objective", ["bert", "electra_mlm"])
def test_a_causal_language_model_starts_another_objective_with_its_head(objective):
  small = {} if objective == "bert" else {"generator": generator_size(D, 0.5, 1.0)}
  first, second = (
    dataclasses.replace(SPEC, objective=x, **changes)
    for x, changes in (("clm", {}), (objective, small))
  )
  other, mine = jax.tree.map(lambda x: x + 1.0, fresh(first)), fresh(second)
  found, _, new, unused = params.inherit(mine, params.match_roles(mine, other))
  new = [name for name in new if not name.startswith("generator/")]
  assert new == (["discriminator/rtd_head"] if objective == "electra_mlm" else []) and not unused
  same = jax.tree.map(
    np.array_equal, found["discriminator"]["mlm_head"], other["discriminator"]["clm_head"]
  )
  assert jax.tree.all(same)


@pytest.mark.parametrize("tie", ["none", "tokens", "embeddings"])
@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_table_that_only_one_of_two_models_has_is_refused_by_name(tie, has, alone):
  target, source = (dataclasses.replace(D, token_types=x) for x in (has, not has))
  mine, other = (
    shapes(networks.PretrainSpec(size, size, RATES, tying=tying))
    for size, tying in ((target, tie), (source, "embeddings" if alone else tie))
  )
  if alone:
    del other["discriminator"]
  without, with_it = "layer_norm, position, word", "layer_norm, position, token_type, word"
  found, wanted = (without, with_it) if has else (with_it, without)
  message = f"^init_from: the source has the embeddings {found}, the model has {wanted}: set "
  with pytest.raises(ValueError, match=message):
    params.inherit(mine, params.match_roles(mine, other))


def test_no_table_of_a_source_is_left_out_in_silence():
  def made(**changes):
    return shapes(networks.PretrainSpec(D, D, RATES, **changes))

  shared = made(tying="embeddings")
  released = {k: v for k, v in shared.items() if k != "generator"}  # a discriminator alone
  mine = made(tying="tokens")
  for other in (shared, released, made(tying="all")):
    with pytest.raises(ValueError, match="the model has no embeddings/layer_norm, .*position"):
      params.inherit(mine, params.match_roles(mine, other))
  for alone in ({"objective": "bert"}, {"generator_kind": "uniform"}):  # no tables of a generator
    mine, other = made(**alone), made(tying="none")
    _, taken, _, _ = params.inherit(mine, params.match_roles(mine, other))
    assert "embeddings/word" in taken and "discriminator/encoder" in taken


def test_a_part_with_an_array_more_or_less_than_the_models_is_not_inherited():
  full = {"discriminator": {"rtd_head": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}}}
  less = {"discriminator": {"rtd_head": {"kernel": np.ones((2, 3))}}}
  with pytest.raises(ValueError, match=r"rtd_head/bias is None in the source, \(3,\) in the model"):
    params.inherit(full, less)
  with pytest.raises(ValueError, match=r"rtd_head/bias is \(3,\) in the source, None in the model"):
    params.inherit(less, full)


def test_a_frozen_generator_is_frozen_and_the_rest_is_the_discriminators():
  spec = dataclasses.replace(SPEC, generator_kind="frozen", tying="none")
  groups = generators.groups(spec, shapes(spec))
  for part, group in (
    ("generator", "frozen"), ("discriminator", "discriminator"), ("embeddings", "discriminator"),
  ):  # fmt: skip
    assert set(jax.tree.leaves(groups[part])) == {group}, part


def test_the_two_towers_begin_with_different_numbers():
  spec = dataclasses.replace(SPEC, generator_kind="two_tower")
  weights = jax.jit(
    lambda: generators.init_generator(spec, jax.random.key(0), (), jax.random.key(1))
  )()
  for name in ("qkv", "attention_output", "ffn_in", "ffn_output"):
    left, right = (weights[tower]["layers"][name]["kernel"] for tower in ("ltr", "rtl"))
    assert (left != right).any(), name


def test_the_logits_of_all_positions_never_exist_at_once_not_on_the_way_back_either():
  states, tokens = jax.ShapeDtypeStruct((3, 16, 8), jnp.float32), jnp.zeros((3, 16), jnp.int32)

  def loss(network, states):
    return networks.chunked_nll(SPEC.generator, network, states, tokens, chunk_size=4)[0].sum()

  network = networks.weights_of(SPEC, shapes(SPEC), "generator")
  program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(network, states)

  def sizes(jaxpr):
    for equation in jaxpr.eqns:
      yield from (x.aval.size for x in equation.outvars)
      for inner in jax.tree.leaves(list(equation.params.values())):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from sizes(inner)

  found = list(sizes(program.jaxpr))
  assert 3 * 4 * 60 in found  # a slice's logits
  assert max(found) < 3 * 16 * 60
