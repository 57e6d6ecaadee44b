"""Reads checkpoints of the original, google-research/electra, by the table of `huggingface`."""

from pathlib import Path

import numpy as np

from electra_jax.core.encoder import TransformerConfig
from electra_jax.interop.huggingface import ExchangeError, fill, shapes

# A scalar beside the generator's head, which the original's converters drop.
IGNORED = {"generator_predictions/temperature"}
_SCOPES = {
  "discriminator": {"embeddings": "electra", "encoder": "electra"},
  "generator": {"embeddings": "electra", "encoder": "generator"},
}


def load(prefix: str | Path, cfg: TransformerConfig, which: str) -> dict:
  """Returns the "discriminator" or the "generator" of a checkpoint of google-research/electra.

  Adam's slots and the step are ignored. The generator may have its own embeddings.

  Raises:
    ExchangeError: variables are missing, of another shape, or unknown in the network's scope.
  """
  import tensorflow as tf

  reader = tf.train.load_checkpoint(str(prefix))
  names = set(reader.get_variable_to_shape_map())
  scopes = dict(_SCOPES[which])
  if which == "generator" and "generator/embeddings/word_embeddings" in names:
    scopes["embeddings"] = "generator"
  head = "rtd_head" if which == "discriminator" else "mlm_head"
  seen = set()

  def read(name: str) -> np.ndarray | None:
    seen.add(name)
    try:
      return reader.get_tensor(name) if name in names else None
    except (tf.errors.OpError, ValueError, LookupError, RuntimeError) as error:
      raise ExchangeError(f"{name} cannot be read: {str(error).splitlines()[0]}") from None

  try:
    network = fill(
      cfg, shapes(cfg, head), lambda row, i: row.tf.format(i=i, **scopes), read, transposed=False
    )
  except ExchangeError as error:
    raise ExchangeError(f"{prefix}: {error}") from None
  slots = {n for n in names if n.endswith(("/adam_m", "/adam_v"))}
  mine = (f"{scopes['embeddings']}/embeddings/", f"{scopes['encoder']}/", f"{which}_predictions/")
  if extra := sorted(n for n in names - slots - seen - IGNORED if n.startswith(mine)):
    raise ExchangeError(f"{prefix}: unknown variables: {', '.join(extra[:8])}")
  return network


def newest(folder: Path) -> Path:
  """Returns the prefix of the newest checkpoint in a folder of the original."""
  import tensorflow as tf

  prefix = tf.train.latest_checkpoint(str(folder))
  if prefix is None:
    raise ExchangeError(f"{folder / 'checkpoint'} names no checkpoint")
  return Path(prefix)


def read_config(prefix: str | Path, which: str) -> TransformerConfig | None:
  """Returns the config of a network in a checkpoint of the original; None if it is not there.

  Sizes come from the variables; heads have a width of 64, as in the original.

  Raises:
    ExchangeError: the checkpoint cannot be read, or a size cannot be determined.
  """
  import tensorflow as tf

  try:
    found = tf.train.load_checkpoint(str(prefix)).get_variable_to_shape_map()
  except (tf.errors.OpError, ValueError) as error:
    raise ExchangeError(f"{prefix} is not a readable TF1 checkpoint: {error}") from None
  scopes = dict(_SCOPES[which])
  if which == "generator" and "generator/embeddings/word_embeddings" in found:
    scopes["embeddings"] = "generator"
  layer = f"{scopes['encoder']}/encoder/layer_"
  numbers = {int(n[len(layer) :].split("/")[0]) for n in found if n.startswith(layer)}
  if not numbers or f"{which}_predictions/dense/kernel" not in found:
    return None
  tables = f"{scopes['embeddings']}/embeddings/"
  try:
    vocab_size, embedding_size = found[f"{tables}word_embeddings"]
    max_positions, _ = found[f"{tables}position_embeddings"]
    hidden_size, ffn_size = found[f"{layer}0/intermediate/dense/kernel"]
  except (KeyError, ValueError) as error:
    raise ExchangeError(f"{prefix}: cannot infer the sizes, no matrix {error}") from None
  if hidden_size > 64 and hidden_size % 64:
    raise ExchangeError(
      f"{prefix}: the {which}'s width {hidden_size} is not a multiple of 64, so its number of"
      " attention heads cannot be inferred"
    )
  return TransformerConfig(
    vocab_size=vocab_size,
    embedding_size=embedding_size,
    hidden_size=hidden_size,
    num_layers=max(numbers) + 1,
    num_heads=max(1, hidden_size // 64),
    ffn_size=ffn_size,
    max_positions=max_positions,
  )


def left_out(prefix: str | Path) -> tuple[str, ...]:
  """Returns descriptions of the generators of a checkpoint that `read_config` cannot read."""
  import tensorflow as tf

  names = tf.train.load_checkpoint(str(prefix)).get_variable_to_shape_map()
  scopes = {name.split("/")[0] for name in names}
  return tuple(f"the original's {x}" for x in sorted(scopes) if x.startswith("generator"))
