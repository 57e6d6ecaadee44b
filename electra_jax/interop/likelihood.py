"""The training settings of a source (objective, mask rate, temperature), for scoring."""

import warnings
from collections.abc import Mapping

from electra_jax.config import specs
from electra_jax.core import scoring
from electra_jax.core.masking import Masking
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.data.tokenizer import Vocab
from electra_jax.interop.sources import ExchangeError, RunParams, Source

# Of the original's Small and Base, where a source does not say how it was trained.
ORIGINAL = {
  "objective": "electra",
  "generator_kind": "transformer",
  "mask_prob": 0.15,
  "temperature": 1.0,
  "unigram_share": 0.0,
  "disallow_correct": False,
}


def training(source: Source) -> Mapping | None:
  """Returns a source's training settings, with the fields of ORIGINAL; None if not recorded."""
  card = source.card
  if card.get("training") or not card.get("config") or source.finetuned:
    return card.get("training")
  config = specs.saved_config(card["config"])
  schedules, steps = specs.make_schedules(config), card["steps"]
  rates = ("mask_prob", "temperature", "unigram_share")
  return {
    "objective": config.objective.name,
    "generator_kind": config.generator.kind,
    "disallow_correct": config.objective.disallow_correct,
    **{name: float(schedules[name].at(steps)) for name in rates},
  }


def as_run(source: Source, vocab: Vocab, path: str) -> RunParams:
  """Returns the networks of a source at `path` as those of a run; the step is None.

  A masked language model alone is scored as one, whatever it was trained with.

  Raises:
    ExchangeError: its networks give no likelihood.
  """
  main, generator = (source.networks.get(role) for role in ("discriminator", "generator"))
  recorded = training(source)
  settings = dict(recorded or ORIGINAL)
  if main is None or (main.is_masked_lm and recorded is None):
    main, generator, settings["objective"] = source.networks[source.main], None, "bert"
  if source.finetuned or main.head is None:
    raise ExchangeError(f"{path} has no head of pretraining, which a likelihood needs")
  if settings["objective"] not in OBJECTIVES:
    raise ExchangeError(
      f"{path} was trained with the objective {settings['objective']!r}: name the module that"
      " registers it with --import"
    )
  kind = OBJECTIVES[settings["objective"]]
  if kind.log_p is scoring.implied and generator is None:
    raise ExchangeError(f"{path} has the discriminator alone, a likelihood needs its generator too")
  if recorded is None and generator is not None:
    warnings.warn(
      f"{path} does not say its mask rate: {ORIGINAL['mask_prob']} assumed, as of the original's"
      " Small and Base",
      stacklevel=2,
    )
  objective, generator_kind = settings.pop("objective"), settings.pop("generator_kind")
  spec = PretrainSpec(
    (generator or main).cfg,
    main.cfg,
    Masking(**settings, mask_token_prob=1.0, mask_id=vocab.mask, special_ids=vocab.special_ids),
    objective=objective,
    generator_kind=generator_kind,
    tying="none",
  )
  weights = dict(main.weights)
  params = {"embeddings": weights.pop("embeddings"), "discriminator": weights}
  if generator is not None:
    params["generator"] = generator.weights
  return RunParams(spec, params, None)
