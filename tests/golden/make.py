"""Makes the golden files: tiny random networks of transformers, and what they say.

  python tests/golden/make.py    # needs torch and transformers

Each folder is one of Hugging Face's own, with its logits on fixed inputs beside it.
"""

from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
HEADS = {"rtd": "ElectraForPreTraining", "mlm": "ElectraForMaskedLM"}
# Vocabulary, embedding and hidden width, layers, heads, width of the feed-forward part, positions.
NETWORKS = {
  "discriminator": ("rtd", (50, 8, 12, 2, 3, 20, 10)),
  "generator": ("mlm", (50, 8, 12, 2, 3, 20, 10)),
  "equal_widths": ("rtd", (37, 12, 12, 1, 1, 48, 10)),  # no projection
  "wide_embeddings": ("mlm", (53, 16, 8, 2, 2, 24, 6)),
  "deep_discriminator": ("rtd", (167, 8, 16, 3, 4, 24, 7)),
  "shallow_generator": ("mlm", (167, 8, 4, 1, 1, 16, 7)),  # of the former: 1/3 as deep, 1/4 as wide
}


def main() -> None:
  import torch
  import transformers

  for name, (head, sizes) in NETWORKS.items():
    V, E, D, N, H, F, L = sizes
    torch.manual_seed(len(name))
    config = transformers.ElectraConfig(
      vocab_size=V, embedding_size=E, hidden_size=D, num_hidden_layers=N, num_attention_heads=H,
      intermediate_size=F, max_position_embeddings=L, initializer_range=0.3,
    )  # fmt: skip
    network = getattr(transformers, HEADS[head])(config).eval()
    for weight in network.parameters():  # biases and LayerNorms too: none is lost unseen
      weight.data += 0.1 * torch.randn_like(weight)
    ids = torch.randint(5, V, (3, L))
    segments = (torch.arange(L) > L // 2).long().expand(3, -1)
    mask = torch.arange(L) < torch.tensor([[L], [L - 3], [3]])
    with torch.no_grad():
      logits = network(input_ids=ids, attention_mask=mask.long(), token_type_ids=segments).logits
    network.save_pretrained(HERE / name)
    arrays = {"ids": ids, "segments": segments, "mask": mask, "logits": logits}
    np.savez_compressed(HERE / name / "outputs.npz", **{k: v.numpy() for k, v in arrays.items()})


if __name__ == "__main__":
  main()
