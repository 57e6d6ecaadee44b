"""Training FLOPs as the paper counts them (Clark et al. 2020, Section 3.3 and its script).

Every operation counts, a multiply-add as two. Embedding lookups count as matmuls with one-hot
vectors, two fifths of the total at small size. The backward pass counts as much as the forward
pass. Use these numbers only to compare with the paper; `electra_jax.core.flops` counts device work.
"""

import dataclasses

from electra_jax.core import attention
from electra_jax.core.heads import HEADS
from electra_jax.core.layers import FEED_FORWARDS
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.objectives import OBJECTIVES, generator_of
from electra_jax.core.transformer_config import TransformerConfig, take_fields

# Operations per element.
DROPOUT, LAYER_NORM, ACTIVATION, SOFTMAX = 4, 5, 8, 5
OUTPUT_FRAC = 0.15625  # fraction of tokens with masked-LM output: 20 of 128 at any mask rate


@dataclasses.dataclass(frozen=True)
class Network:
  """The sizes that determine the count.

  `output`: vocabulary layer on OUTPUT_FRAC of the tokens ("masked") or on "all", "binary"
  (replaced-token detection), or "none".
  """

  hidden_size: int
  num_layers: int
  length: int
  embedding_size: int
  output: str
  vocab_size: int = 30522
  num_heads: int = 0  # 0: heads of size 64
  ffn_size: int = 0  # 0: 4 x hidden_size
  output_size: int = 0  # input width of the output layer; 0: hidden_size
  gated: bool = False  # the feed-forward layer has a third matrix, for the gate
  keys: float = 0  # keys per query, the mean over layers; 0: length


def block_flops(n: Network) -> float:
  """Returns the forward operations of one layer per token."""
  h, s, heads = n.hidden_size, n.keys or n.length, n.num_heads or max(1, n.hidden_size // 64)
  i = n.ffn_size or 4 * h
  attention = (
    3 * (2 * h * h + h)  # query, key, value
    + 2 * h * s  # scores
    + (SOFTMAX + DROPOUT + 1) * s * heads  # softmax, dropout, scaling
    + 2 * h * s  # weighted sum
  )
  # As in the original: this LayerNorm counts 5 per token, the other 5 per element.
  after = 2 * h * h + h + DROPOUT * h + h + LAYER_NORM
  feed_forward = 2 * h * i + (ACTIVATION + 1) * i + 2 * h * i + h
  if n.gated:
    feed_forward += 2 * h * i + i
  return attention + after + feed_forward + DROPOUT * h + h + LAYER_NORM * h


def embedding_flops(n: Network) -> float:
  """Returns the forward operations of the embedding per token."""
  e, h = n.embedding_size, n.hidden_size
  look_up = 2 * e * n.vocab_size + 2 * e * (n.length + 2)
  return look_up + (2 + LAYER_NORM + DROPOUT) * e + (2 * h * e + h if e != h else 0)


def output_flops(n: Network) -> float:
  """Returns the forward operations of the output layer per token, on average."""
  h, e, V = n.output_size or n.hidden_size, n.embedding_size, n.vocab_size
  if n.output == "binary":
    return 2 * h * h + h + ACTIVATION * h + 2 * h
  frac = {"masked": OUTPUT_FRAC, "all": 1.0, "none": 0.0}[n.output]
  hidden = 2 * h * e + e + (ACTIVATION + LAYER_NORM) * e
  return frac * (hidden + 2 * e * V + (SOFTMAX + 2) * V)


def forward_flops(n: Network) -> float:
  """Returns the forward operations per sequence."""
  return n.length * (n.num_layers * block_flops(n) + embedding_flops(n) + output_flops(n))


def train_flops(networks: list[Network], batch_size: int, steps: int) -> float:
  """Returns the operations of a training run, forward and backward."""
  return 2 * batch_size * steps * sum(forward_flops(n) for n in networks)


def _bert(hidden, layers, length, embedding=None, **changes) -> list[Network]:
  return [Network(hidden, layers, length, embedding or hidden, "masked", **changes)]


def _electra(hidden, layers, length, generator, embedding=None) -> list[Network]:
  e = embedding or hidden
  sizes = {"binary": hidden, "masked": generator}
  return [Network(size, layers, length, e, output) for output, size in sizes.items()]


# model: (networks, batch size, steps, the paper's FLOPs in Tables 1, 2, 8)
PAPER = {
  "GPT": ([Network(768, 12, 512, 768, "all", 40000)], 128, 960_800, 4.0e19),
  "BERT-Small": (_bert(256, 12, 128, 128), 128, 1_450_000, 1.4e18),
  "BERT-Base": (_bert(768, 12, 512), 256, 1_000_000, 6.4e19),
  "BERT-Large": (_bert(1024, 24, 512), 256, 1_000_000, 1.9e20),
  "BERT (ours)": (_bert(1024, 24, 512), 2048, 464_000, 7.1e20),
  "ELECTRA-Small": (_electra(256, 12, 128, 64, 128), 128, 1_000_000, 1.4e18),
  "ELECTRA-Small 50%": (_electra(256, 12, 128, 64, 128), 128, 500_000, 7.1e17),
  "ELECTRA-Small 25%": (_electra(256, 12, 128, 64, 128), 128, 250_000, 3.6e17),
  "ELECTRA-Small 12.5%": (_electra(256, 12, 128, 64, 128), 128, 125_000, 1.8e17),
  "ELECTRA-Small 6.25%": (_electra(256, 12, 128, 64, 128), 128, 62_500, 8.9e16),
  "ELECTRA-Base": (_electra(768, 12, 512, 256), 256, 766_000, 6.4e19),
  "ELECTRA-400K": (_electra(1024, 24, 512, 256), 2048, 400_000, 7.1e20),
  "ELECTRA-1.75M": (_electra(1024, 24, 512, 256), 2048, 1_750_000, 3.1e21),
  "RoBERTa-100K": (_bert(1024, 24, 512, vocab_size=50265), 8000, 100_000, 6.4e20),
  "RoBERTa-500K": (_bert(1024, 24, 512, vocab_size=50265), 8000, 500_000, 3.2e21),
  "ALBERT-xxl": (_bert(4096, 12, 512, 128), 4096, 1_500_000, 3.1e22),
}


def _network(cfg: TransformerConfig, length: int, output: str, output_size: int = 0) -> Network:
  given = {"length": length, "output": output, "output_size": output_size}
  keys = attention.encoder_scores(cfg, length) / (cfg.num_layers * length)
  gated = FEED_FORWARDS[cfg.feed_forward].gated
  return take_fields(Network, vars(cfg), **given, gated=gated, keys=keys)


def sequence_flops(spec: PretrainSpec, length: int) -> dict[str, float]:
  """Returns the operations of one sequence in a training step, by network.

  Beyond the paper: windows and gates count as computed, but biases, norms and positions always as
  in the paper's blocks. A frozen generator and a second sampling pass count only forward; a
  two-tower generator's vocabulary layer counts on every token. Sampling, single-logit heads and a
  detection head besides a vocabulary layer do not count.
  """
  definition, generator, parts = OBJECTIVES[spec.objective], generator_of(spec), {}
  if generator and generator.encoders:
    *others, last = generator.encoders
    output, width = "all" if generator.predicts_all else "masked", spec.generator.hidden_size
    networks = [_network(spec.generator, length, "none") for _ in others]
    networks.append(_network(spec.generator, length, output, len(generator.encoders) * width))
    forward = sum(forward_flops(n) for n in networks)
    passes = 2 if generator.trained else 1
    parts["generator"] = (passes + (not spec.sampling_dropout)) * forward
  output = "binary"
  if any(HEADS[name].predicts_words for name in definition.heads):
    output = "all" if definition.predicts_all else "masked"
  parts["discriminator"] = 2 * forward_flops(_network(spec.discriminator, length, output))
  if definition.second_pass:
    parts["second pass"] = 2 * forward_flops(_network(spec.discriminator, length, "none"))
  return parts
