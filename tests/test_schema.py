"""The schema: a row for each field, and what it says is what the programs do."""

import warnings

import pytest

from electra_jax.config import compare, fields, files, schema, validate
from electra_jax.core import learning_rates
from electra_jax.finetune import from_config

BASE, FINE_TUNING = (compare.flatten(files.load(base)) for base in fields.BASES)
# Fields that may change in a run that resumes, and no others: where it reads, writes, evaluates and
# watches, and what depends on the machine.
FREE_GROUPS = "data eval checkpoint health hosts profile log".split()
FREE = """allow_config_change model.attention model.unroll model.remat train.accumulation
  optimizer.sharded""".split()


@pytest.mark.parametrize(
  ("rows", "base"), [(schema.PRETRAINING, BASE), (schema.FINE_TUNING, FINE_TUNING)]
)
def test_each_field_has_a_row_that_allows_its_default(rows, base):
  assert rows.keys() == base.keys()
  for name, row in rows.items():
    assert row.allowed is None or base[name] in row.allowed, name
    if row.earlier not in (schema.ALWAYS, None) and base[name] is not None:
      assert type(row.earlier) is type(base[name]), name
  for name in schema.names(rows, has_schedule=True):
    assert f"{name}_schedule" in rows


@pytest.mark.parametrize("field", [*BASE, *schema.HASHES])
def test_a_resumed_run_is_refused_another_value_of_a_field_if_it_defines_the_run(field):
  saved = BASE | {"data.manifest": "a", "data.vocab_hash": "b"}
  current = saved | {field: "another"}
  free = field in FREE or field.split(".")[0] in FREE_GROUPS and field not in schema.HASHES
  if free:
    assert compare.refuse_other_run(saved, current, "", "run") == []
    return
  with pytest.raises(ValueError, match=f"run holds another run: {field} was .*, is 'another'"):
    compare.refuse_other_run(saved, current, "", "run")


def test_a_field_that_this_version_lacks_refuses_where_others_of_its_group_define_a_run():
  saved = BASE | {"data.manifest": "a", "data.vocab_hash": "b"}
  later = saved | {"model.later": 1, "log.later": 2, "registered.objective.mine": "my_module"}
  with pytest.raises(ValueError, match="later was 1, is None; use another --workdir$"):
    compare.refuse_other_run(later, saved, "", "run")


@pytest.mark.parametrize("name", [n for n in files.known() if not n.startswith("finetune")])
def test_what_has_no_effect_is_known_for_every_configuration(name):
  config = files.load(files.resolve(name))
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    validate.warn_of_unread_overrides(config, BASE)
  said = " ".join(str(x.message) for x in found)
  assert ("model.window" in said) == (config.model.global_every == 1)
  assert ("generator.width_multiplier" in said) == (config.objective.name in ("bert", "clm"))


def test_a_schedule_of_ones_own_may_read_decay_steps(monkeypatch):
  own = learning_rates.SCHEDULES["wsd"]
  monkeypatch.setitem(learning_rates.SCHEDULES, "mine", lambda c, steps: own(c, steps))
  config = files.load("base.py")
  config.optimizer.decay_steps = 1000
  for schedule in ("wsd", "mine"):
    config.optimizer.schedule = schedule
    validate.check_end(config)
  config.optimizer.schedule = "joined"
  with pytest.raises(ValueError, match="needs schedule=wsd, got joined"):
    validate.check_end(config)


def test_fine_tuning_takes_every_schedule_and_wsd_with_its_share_only(monkeypatch):
  own = learning_rates.SCHEDULES["wsd"]
  monkeypatch.setitem(learning_rates.SCHEDULES, "mine", lambda c, steps: own(c, steps))
  config = files.load("finetune/base.py")
  for schedule, share in (
    ("product", None),
    ("joined", None),
    ("wsd", 0.2),
    ("mine", 0.2),
    ("mine", None),
  ):
    config.optimizer.schedule, config.optimizer.decay_frac = schedule, share
    from_config.check(config)
  for schedule, share in (("wsd", None), ("product", 0.2)):
    config.optimizer.schedule, config.optimizer.decay_frac = schedule, share
    with pytest.raises(ValueError, match="decay_frac, e.g. to 0.2, if and only if .*wsd: got"):
      from_config.check(config)
