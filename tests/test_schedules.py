"""Schedules against NumPy, and what follows them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_objectives import RATES, SPEC, fresh, keys_of, make_batch

from electra_jax.core import masking, objectives, schedules


def test_a_schedule_is_numpys_interpolation():
  schedule = schedules.Schedule(0.0, schedules.parse("10=0.3, 50=0.1, 100%=0.2", 200))
  steps = np.arange(0, 250)
  expected = np.interp(steps, [10, 50, 200], [0.3, 0.1, 0.2])
  got = jax.jit(jax.vmap(schedule.at))(steps)
  np.testing.assert_allclose(got, expected, rtol=1e-6)  # float32 against float64
  assert schedules.parse("", 10) == ()


def test_a_jump_counts_from_its_step_on():
  weight = schedules.Schedule(0.0, schedules.parse("20=0,20=50", 100))
  assert [float(weight.at(t)) for t in (0, 19, 20, 21, 100)] == [0, 0, 50, 50, 50]


@pytest.mark.parametrize("text", ["0.3", "10%", "a=1", "0=1;5=2", "0=--1", "50%=1,20=2"])
def test_what_is_no_schedule_is_refused(text):
  with pytest.raises(ValueError, match="a schedule"):
    schedules.parse(text, 100)


def test_the_mask_rate_follows_its_schedule_with_as_many_slots():
  rate = schedules.Schedule(0.25, schedules.parse("0=0.5,10=0.125", 10))
  m = dataclasses.replace(RATES, mask_prob=rate)
  batch = make_batch(B=64)
  choose = jax.jit(lambda step: masking.choose(batch, m, keys_of(batch)[:, 0], step))
  tokens = batch.padding_mask.sum(-1)
  for step, rate in ((0, 0.5), (5, 0.3125), (10, 0.125)):
    masked = choose(jnp.int32(step))
    assert masked.positions.shape == (64, 8)  # (0.5 + 0.005) x 16
    np.testing.assert_array_equal(masked.weights.sum(-1), np.clip(np.round(rate * tokens), 1, 8))
  evaluated = masking.choose(batch, m, keys_of(batch)[:, 0])
  assert evaluated.positions.shape == (64, 4)  # the constant, 0.25


@pytest.mark.slow
def test_the_discriminators_weight_is_0_before_its_step_and_in_the_loss_all_the_same():
  weight = schedules.Schedule(50.0, schedules.parse("5=0,5=50", 10))
  spec = dataclasses.replace(SPEC, discriminator_weight=weight)
  params, batch = fresh(spec), make_batch()
  in_loss = []

  @jax.jit
  def weight_at(step):  # nothing else of the objective is left in the program
    term = objectives.make(spec)(params, batch, keys_of(batch), step)["rtd_loss"]
    in_loss.append(term.in_loss)
    return term.weight

  for step, weight in ((0, 0.0), (4, 0.0), (5, 50.0)):
    assert float(weight_at(jnp.int32(step))) == weight
  assert in_loss == [True]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, o in objectives.OBJECTIVES.items() if o.uses_generator])
def test_the_main_loss_of_every_objective_follows_the_schedule_of_its_weight(name):
  kind = "two_tower" if name == "electric" else "transformer"
  weight = schedules.Schedule(2.0, schedules.parse("0=1,10=3", 10))
  spec = dataclasses.replace(
    SPEC, objective=name, generator_kind=kind, discriminator_weight=weight, contrast_group=4
  )
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  found, batch = [], make_batch()

  def run(params, step):
    terms = objectives.make(spec)(params, batch, keys_of(batch), step)
    found.extend(k for k, t in terms.items() if isinstance(t.weight, jax.Array))
    return [t.weight for t in terms.values() if isinstance(t.weight, jax.Array)]

  assert len(jax.eval_shape(run, shapes, jnp.int32(0))) == 1
  main = {"replace_mlm": "replace_mlm_loss", "all_tokens_mlm": "all_tokens_loss"}
  assert found == [{**main, "electric": "nce_loss"}.get(name, "rtd_loss")]


@pytest.mark.long
def test_electrics_noise_follows_the_schedule_of_the_mask_rate():
  def at_rate(**changes):
    masking = dataclasses.replace(SPEC.masking, **changes)
    return dataclasses.replace(
      SPEC, objective="electric", generator_kind="two_tower", masking=masking
    )

  moving = at_rate(mask_prob=schedules.Schedule(0.2, schedules.parse("0=0.4,10=0.2", 10)))
  fixed, batch = at_rate(mask_prob=0.4), make_batch()

  @jax.jit
  def run(step):  # both in one program, which holds the networks once
    weights = objectives.init_params(fixed, jax.random.key(0))
    terms = (objectives.make(s)(weights, batch, keys_of(batch), step) for s in (moving, fixed))
    return [t["nce_loss"].total / t["nce_loss"].count for t in terms]

  a, b = run(jnp.int32(0))
  # The same sums in float32; log(p / (1 - p)) of 0.2 and 0.4 are 1 apart.
  assert float(a) == pytest.approx(float(b), rel=1e-5)
